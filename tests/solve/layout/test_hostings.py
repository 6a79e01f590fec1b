"""Ways to host a model: whom they leave each unit with, and hosting what is held already."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import pytest

from recycle.job.profile import Profile
from recycle.job.shape import Shape, Worker
from recycle.solve.layout.hostings import every_hosting, hosting_as_held, hostings
from recycle.solve.layout.units import Parts, Units


def alike(ranks: int, layers: int, state_limit: float, chunks: int = 1) -> Units:
    each = layers // ranks
    prices = {name: np.ones(layers) for name in ("forward", "backward_input", "backward_weight", "static")}
    return Units((each // chunks,) * ranks * chunks, prices, False, state_limit * each, chunks)


def hosts(hosted: Sequence[Parts], count: int) -> list[int]:
    return [sum(begin <= unit < end for parts in hosted for begin, end in parts) for unit in range(count)]


@pytest.mark.search
@pytest.mark.parametrize(
    ("pipelines", "ranks", "layers", "count", "chunks"),
    [(2, 4, 8, 1, 1), (2, 4, 16, 2, 1), (3, 4, 8, 4, 1), (4, 4, 16, 6, 1), (3, 4, 16, 4, 2), (3, 2, 12, 1, 3)],
)
def test_a_unit_that_has_two_hosts_keeps_two(pipelines: int, ranks: int, layers: int, count: int, chunks: int) -> None:
    units, shape = alike(ranks, layers, 1.5, chunks), Shape(pipelines, ranks, 8, chunks)
    refused = made = 0
    for seed in range(4):
        dead = random.Random(seed).sample(list(shape.workers()), count)
        live = [worker for worker in shape.workers() if worker not in dead]
        left = hosts([units.given[worker.rank] for worker in live], layers)
        every = list(every_hosting(units, shape, live, Profile(), {}, float("inf")))
        kept = list(hostings(units, shape, live, Profile(), {}, float("inf")))
        for hosting in kept:
            assert all(now >= min(2, before) for now, before in zip(hosts(hosting.parts, layers), left, strict=True))
        made, refused = made + len(kept), refused + len(every) - len(kept)
    assert made
    assert refused or count == 1


def test_what_workers_hold_already_is_shared_evenly_and_all_of_it_is_used() -> None:
    units, shape = alike(2, 8, 1.5), Shape(3, 2, 4)
    held: dict[Worker, Parts] = {
        Worker(0, 0): ((0, 5),),
        Worker(0, 1): ((3, 8),),
        Worker(2, 0): ((0, 2), (4, 6)),
        Worker(2, 1): ((2, 4), (6, 8)),
    }
    hosting = hosting_as_held(units, shape, held, Profile())
    assert hosting is not None
    assert hosting.wanted == held
    assert (hosting.quotas.sum(axis=0) == 12).all()
    assert hosting.seconds == pytest.approx(3 * 12 * 8 / 4)
    assert hosting_as_held(units, shape, {Worker(0, 0): ((0, 5),), Worker(2, 1): ((6, 8),)}, Profile()) is None
