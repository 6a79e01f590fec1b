from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recycle.ir.simulate import simulate
from recycle.job.profile import Link
from recycle.job.shape import Worker
from recycle.solve.problem import Problem
from recycle.solve.search.list_scheduling import hosts_in, schedule_by_policy, schedule_by_priority
from recycle.solve.search.timing import time_order
from tests.solve.jobs import job, small_jobs


def any_order(problem, seed):
    """An order by random priorities, half of the time on random live hosts."""
    random = np.random.default_rng(seed)
    host = hosts_in(problem, schedule_by_policy(problem))
    if random.random() < 0.5:
        host = np.array([random.choice(problem.hosts[s]) for s in problem.stage_of])
    return schedule_by_priority(
        problem, host, random.random(problem.size), patience=2 * random.random(), weight_patience=random.random()
    )


@settings(max_examples=80, deadline=None)
@given(small_jobs(), st.integers(0, 999))
def test_an_order_takes_as_long_as_the_simulator_says(case, seed):
    made, dead = case
    problem = Problem.of(made, dead)
    order = any_order(problem, seed)
    timing, exact = time_order(problem, order), simulate(problem.schedule(order), made.profile())
    assert timing.makespan == exact.makespan
    assert timing.period >= exact.period - 1e-9


@pytest.mark.parametrize("staggered", [True, False])
@pytest.mark.parametrize(("ranks", "chunks"), [(1, 2), (2, 2), (3, 2), (4, 1), (3, 3)])
def test_right_shift_gives_the_simulators_period_also_where_transfers_queue(ranks, chunks, staggered):
    """Two ranks with chunks send activations and gradients over the same lanes, one rank with chunks to peers only."""
    equal = 0
    for seed in range(12):
        link = (0.5, 1.0, 2.0, 3.0)[seed % 4]
        made = job(3, ranks, 4, chunks * ranks, chunks=chunks, link=link, step=0.5, staggered=staggered)
        problem = Problem.of(made, [Worker(seed % 3, seed % ranks)])
        order = any_order(problem, seed)
        timing, exact = time_order(problem, order), simulate(problem.schedule(order), made.profile())
        assert timing.makespan == exact.makespan
        assert timing.period >= exact.period - 1e-9
        equal += timing.period <= exact.period + 1e-9
    assert equal >= 11


@pytest.mark.parametrize("staggered", [True, False])
@pytest.mark.parametrize(("ranks", "chunks", "base"), [(2, 1, 0.25), (2, 2, 1.0), (3, 2, 0.5), (4, 1, 1.5)])
def test_unlike_links_are_timed_one_by_one_whether_transfers_queue_or_not(ranks, chunks, base, staggered):
    equal = 0
    for seed in range(12):
        draw = np.random.default_rng(seed)
        made = job(3, ranks, 4, chunks * ranks, chunks=chunks, link=base, step=0.5, staggered=staggered)
        slow = {
            f"{k}.{r}>{h}.{(r + 1) % ranks}": Link(base * draw.integers(1, 6))
            for k, r, h in draw.integers(0, 2, (4, 3))
        }
        profile = replace(made.profile(), links={pair: link for pair, link in slow.items() if pair[:3] != pair[4:]})
        problem = Problem.of(made, [Worker(2, seed % ranks)], profile)
        order = any_order(problem, seed)
        timing, exact = time_order(problem, order), simulate(problem.schedule(order), profile)
        assert timing.makespan == exact.makespan
        assert timing.period >= exact.period - 1e-9
        equal += timing.period <= exact.period + 1e-9
    assert equal >= 11


def test_a_lane_that_is_busier_than_any_worker_sets_the_period():
    made = job(1, 2, 6, chunks=2, link=2.5)
    problem = Problem.of(made)
    order = schedule_by_policy(problem)
    timing = time_order(problem, order)
    assert timing.period == simulate(problem.schedule(order), made.profile()).period
    assert timing.period >= 6 * 3 * 2.5 > 6 * 6  # three transfers per micro-batch each way, six operations
