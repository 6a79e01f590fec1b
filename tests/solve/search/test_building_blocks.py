import itertools

import pytest

from recycle.ir.check import check
from recycle.solve.problem import Problem
from recycle.solve.search.building_blocks import block_orders
from recycle.solve.search.timing import time_order
from tests.solve.jobs import job


def orders(problem, steps, seed=0):
    tried = itertools.islice(block_orders(problem, steps=steps, seed=seed), 30)
    return [order for order, *_ in tried if order is not None]


@pytest.mark.parametrize("decoupled", [True, False])
@pytest.mark.parametrize(
    ("chunks", "limit", "stash"), [(1, 2, 1.0), (1, 3, 0.5), (2, 3, 1.0), (2, 4, 0.0), (3, 4, 0.5)]
)
def test_blocks_are_schedules_without_findings_within_the_caps(chunks, limit, stash, decoupled):
    times = {"forward": [1.0, 1.3, 0.6] * chunks, "backward_weight": [0.5, 1.0, 1.4] * chunks, "link": 0.2}
    made = job(1, 3, 5, limit, chunks=chunks, weight_stash=stash, decoupled=decoupled, **times)
    problem = Problem.of(made)
    found = orders(problem, 20)
    assert found
    for order in found:
        assert check(problem.schedule(order), profile=made.profile(), limits=made.activation_limits()) == []


def test_from_the_first_interval_that_is_met_they_shrink_down_to_the_shortest_that_load_and_memory_admit():
    problem = Problem.of(job(1, 6, 12, 5, chunks=2))
    tried = list(itertools.islice(block_orders(problem, steps=60), 24))
    intervals = [interval for order, interval, _ in tried if order is not None]
    assert tried[0][1] == (6 * 6 + 2) / 5  # slot-seconds of a micro-batch on the first rank, over its slots
    assert min(intervals) < 0.87 * intervals[0]
    assert all(interval >= tried[0][1] for _, interval, _ in tried)
    ample = Problem.of(job(1, 4, 8))
    assert all(interval >= 3 for _, interval, _ in itertools.islice(block_orders(ample, steps=1), 12))


def test_where_memory_is_ample_the_first_interval_is_the_work_of_the_busiest_worker():
    problem = Problem.of(job(1, 4, 32, forward=[1.0, 2.0, 1.0, 1.0]))
    order, *_ = next(block_orders(problem, steps=1))
    assert time_order(problem, order).period <= 32 * 4 + 3 * 4


@pytest.mark.search
def test_the_same_seed_gives_the_same_blocks_in_plain_python_and_compiled(in_both_ways):
    problem = Problem.of(job(1, 4, 6, 4, chunks=2, link=0.3, forward=[1.0, 1.1, 0.7, 0.9] * 2))
    plain, compiled = in_both_ways(lambda: list(itertools.islice(block_orders(problem, steps=30, seed=3), 6)))
    assert compiled == plain
