"""Hostings against the exact model of layouts and shares."""

from __future__ import annotations

import random

import numpy as np
import pytest

from recycle.job.profile import Profile
from recycle.job.shape import Shape
from recycle.solve.layout.exact import least_load
from recycle.solve.layout.hostings import every_hosting
from recycle.solve.layout.units import Units, count_of


def case(seed: int) -> tuple[Units, Shape, int, int]:
    """(units, shape, dead workers, most units of a worker) of a small job."""
    chance = random.Random(seed)
    pipelines, ranks, per_rank = chance.choice([(2, 2, 2), (2, 3, 2), (3, 2, 2), (2, 3, 1)])
    seconds = np.array([chance.choice([1.0, 1.0, 1.0, 2.0]) for _ in range(ranks * per_rank)])
    most = per_rank + chance.choice([0, 1])
    units = Units((per_rank,) * ranks, {"forward": seconds, "static": np.ones(len(seconds))}, False, float(most))
    return units, Shape(pipelines, ranks, chance.choice([4, 6])), chance.choice([0, 1]), most


def test_two_workers_that_hold_three_of_four_units_share_the_rest_evenly() -> None:
    units = Units((2, 2), {"forward": np.array([3.0, 1.0, 1.0, 1.0]), "static": np.ones(4)}, False, 3.0)
    assert least_load(units, [1.0, 1.0], 4, 20.0) == pytest.approx(12.0)
    assert least_load(units, [1.0, 2.0], 4, 20.0) == pytest.approx(16.0), "the fast one also runs one of the others"
    assert least_load(units, [1.0], 4, 20.0) is None, "nobody can hold the model"


@pytest.mark.search
def test_no_hosting_has_less_to_do_than_the_exact_model_allows() -> None:
    """Of twelve small jobs, most hostings reach it; none falls below."""
    equal = 0
    for seed in range(12):
        units, shape, dead, most = case(seed)
        live = list(shape.workers())[dead:]
        found = list(every_hosting(units, shape, live, Profile(), {}, float("inf")))
        exact = least_load(units, [1.0] * len(live), shape.global_micro_batches, 20.0)
        assert exact is not None
        assert found
        best = min(made.seconds for made in found)
        for made in found:
            loads = made.quotas @ units.seconds
            assert made.seconds == pytest.approx(loads.max())
            assert (made.quotas.sum(axis=0) == shape.global_micro_batches).all()
            assert max(count_of(parts) for parts in made.parts) <= most
        assert best >= exact - 1e-6
        equal += best <= exact + 1e-6
    assert equal >= 6
