"""Orders of legs: complete, within memory, timed from above and closely, and the same compiled."""

from __future__ import annotations

import random

import numpy as np
import pytest

from recycle.ir.compiled import load
from recycle.ir.simulate import simulate
from recycle.job.cut import profile_of_cut
from recycle.job.profile import Profile
from recycle.job.shape import Shape, Worker
from recycle.solve.effort import Deadline
from recycle.solve.layout import route_search
from recycle.solve.layout.ranges import balanced
from recycle.solve.layout.route_search import best_order, legs_of
from recycle.solve.layout.routes import Routes, joint_schedule, routes_of
from recycle.solve.layout.units import Parts, Units
from recycle.solve.search.event_loop import list_schedule
from tests.solve.layout.spans import spans

SHAPE = Shape(3, 4, 8)
UNITS = Units(
    (2,) * 4,
    {
        "forward": np.full(8, 1.0),
        "backward_input": np.full(8, 1.5),
        "backward_weight": np.full(8, 0.5),
        "step": np.full(8, 0.25),
        "static": np.ones(8),
        "message": np.zeros(8),
    },
    False,
    3.0,
)


def random_routes(seed: int) -> Routes:
    chance = random.Random(seed)
    live = [worker for worker in SHAPE.workers() if worker != Worker(1, 2)]
    parts: list[Parts] = []
    for worker in live:
        begin = max(0, 2 * worker.rank - chance.randint(0, 1))
        parts.append(((begin, min(8, 2 * worker.rank + 2 + chance.randint(0, 1))),))
    found = balanced(UNITS, parts, [1.0] * len(live), 24)
    assert found is not None
    return routes_of(live, found[1], [worker.pipeline for worker in live], spans(found[1]))


@pytest.mark.parametrize("seed", range(6))
def test_the_period_is_an_estimate_from_above(seed: int) -> None:
    """And not by more than a tenth, though reduces of stages in a row are waited for."""
    routes = random_routes(seed)
    legs = legs_of(routes, UNITS, Profile(), SHAPE, [8.0] * len(routes.workers), split=True, in_bytes=False)
    order = best_order(routes, legs, UNITS, Deadline(None))
    assert order is not None
    schedule = joint_schedule(
        SHAPE, routes, order.programs, routes.names(SHAPE), [Worker(1, 2)], "staggered", split=True
    )
    prices = profile_of_cut(Profile(2.0, 3.0, 1.0, step=0.5), schedule.shape, (2,) * 4)
    period = simulate(schedule, prices).period
    assert period <= order.period + 1e-9
    assert order.period <= 1.1 * period


def test_memory_that_one_micro_batch_does_not_fit_into_gives_no_order() -> None:
    routes = random_routes(0)
    legs = legs_of(routes, UNITS, Profile(), SHAPE, [0.4] * len(routes.workers), split=True, in_bytes=False)
    assert best_order(routes, legs, UNITS, Deadline(None)) is None


@pytest.mark.soak
def test_compiled_loops_make_the_same_order(monkeypatch: pytest.MonkeyPatch) -> None:
    routes = random_routes(1)
    legs = legs_of(routes, UNITS, Profile(), SHAPE, [8.0] * len(routes.workers), split=True, in_bytes=False)
    rules = list(route_search.policies(routes, legs))[:4]
    plain = [route_search._scheduled(routes, legs, UNITS, rule) for rule in rules]
    load(list_schedule)
    compiled = [route_search._scheduled(routes, legs, UNITS, rule) for rule in rules]
    for one, other in zip(plain, compiled, strict=True):
        assert one is not None
        assert other is not None
        assert one.period == other.period
        assert all(np.array_equal(a, b) for a, b in zip(one.programs, other.programs, strict=True))
