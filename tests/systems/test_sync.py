"""The sync of pipelines that were simulated one by one is that of the simulation of all."""

from __future__ import annotations

import pytest

from recycle import Profile, Shape, lower, simulate
from recycle.ir.families import one_f_one_b
from recycle.systems.bamboo.iteration import after_losing, healthy, iteration
from recycle.systems.reduces import reduce_order
from recycle.systems.sync import computed, synchronised


def test_equal_pipelines() -> None:
    profile = Profile(1.0, 1.0, 1.0, reduce=[1.0, 2.0, 4.0], step=[0.5, 0.25, 8.0])
    workers = computed(one_f_one_b(Shape(1, 3, 4)), profile)
    assert workers == [(18.0, (0,)), (16.0, (1,)), (14.0, (2,))]
    assert synchronised(workers, [1, 2, 4], [0.5, 0.25, 8.0], (2, 1, 0)) == 19 + 8
    assert simulate(lower(one_f_one_b(Shape(2, 3, 4), "barrier")), profile).period == 27


@pytest.mark.parametrize("dead", [0, 1, 2, 3])
@pytest.mark.parametrize("late", [0.0, 5.0, 50.0])
def test_copies_chain_the_reduces_of_neighbours(dead: int, late: float) -> None:
    hosts = after_losing(healthy(4), dead)
    assert hosts is not None
    profile = Profile(1.0, 1.0, 1.0, reduce=[1.0, late, 2.0, 3.0], step=[1.0, 2.0, 0.0, 0.0])
    workers = computed(iteration([healthy(4)], [7]), profile) + computed(iteration([hosts], [3]), profile)
    together = simulate(lower(iteration([healthy(4), hosts], [7, 3])), profile).period
    order = reduce_order((stages for _, stages in workers), [1.0] * 4)
    assert synchronised(workers, profile.per_stage("reduce", 4), profile.per_stage("step", 4), order) == together
