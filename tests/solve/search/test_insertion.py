from dataclasses import replace
from itertools import islice
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings

from recycle.ir.check import check
from recycle.job import PricedJob
from recycle.job.shape import Worker
from recycle.solve.assignment import by_slots, possible_assignments
from recycle.solve.effort import STEPS_OF_ORDER, Effort
from recycle.solve.problem import Problem
from recycle.solve.search.event_loop import UNLIMITED
from recycle.solve.search.initial_orders import best_of_portfolio
from recycle.solve.search.insertion import _neighbour, inserted, insertion_orders, plain, vary_insertion
from recycle.solve.search.list_scheduling import hosts_in
from recycle.solve.search.timing import time_order, timed
from tests.solve.jobs import job, small_jobs


def tight() -> tuple[PricedJob, Problem]:
    """Two chunks, little memory, slow links, and a dead worker on the last rank."""
    made = job(3, 5, 9, 6, chunks=2, link=1.5)
    return made, Problem.of(made, [Worker(1, 4)])


@pytest.mark.search
@settings(max_examples=60, deadline=None)
@given(small_jobs())
def test_every_manner_gives_a_schedule_without_findings(case):
    made, dead = case
    problem = Problem.of(made, dead)
    found = 0
    for order, manner in islice(insertion_orders(problem, possible_assignments(problem)), 0, None, 3):
        other = inserted(problem, _neighbour(problem, manner, Random(2)))
        for one in (order, other):
            if one is not None:
                assert check(problem.schedule(one), profile=made.profile(), limits=made.activation_limits()) == []
                found += 1
    assert found


@pytest.mark.search
def test_where_older_micro_batches_come_first_tight_memory_lets_more_through():
    _, problem = tight()
    listed, _ = best_of_portfolio(problem, Effort(0.0), assignments=possible_assignments(problem))
    best = min(
        time_order(problem, order).period for order, _ in insertion_orders(problem, possible_assignments(problem))
    )
    assert best == 147.5
    assert listed.period > 165


def test_a_host_runs_as_many_micro_batches_as_it_was_dealt_and_those_at_home_stay():
    _, problem = tight()
    assignment = by_slots(problem)
    order = inserted(problem, plain(problem, assignment, waiting=2))
    assigned = assignment.host.reshape(10, 27)
    host = hosts_in(problem, order).reshape(10, 27)
    for stage in range(10):
        assert sorted(host[stage]) == sorted(assigned[stage])
    lives = [w for w in range(15) if w != 9]
    homes = np.arange(27)[None, :] // 9 * 5 + np.arange(10)[:, None] % 5
    assert (host == homes)[np.isin(homes, lives)].all()


def test_with_little_memory_a_free_manner_moves_what_finds_its_own_worker_busy_and_keeps_the_deal_in_numbers():
    problem = Problem.of(job(4, 5, 10, 2), [Worker(1, 2)])
    best = {False: np.inf, True: np.inf}
    for order, manner in insertion_orders(problem, possible_assignments(problem)):
        if manner.spare:
            continue
        best[manner.is_free] = min(best[manner.is_free], time_order(problem, order).period)
        host, assigned = (one.reshape(5, 40) for one in (hosts_in(problem, order), manner.assignment.host))
        assert (np.sort(host) == np.sort(assigned)).all()
    assert best == {False: 70, True: 65}


def test_with_some_to_spare_workers_fill_their_slots_with_more_of_one_chunk_than_of_the_other():
    problem = Problem.of(job(8, 6, 12, 4, chunks=2), [Worker(1, 2)])
    assignment = by_slots(problem)
    periods = {}
    for spare in (0.0, 0.2):
        order = inserted(problem, plain(problem, assignment, 5, is_free=True, spare=spare))
        periods[spare] = time_order(problem, order).period
        host = hosts_in(problem, order).reshape(12, 96)
        counts = [[int((host[stage] == w).sum()) for w in problem.hosts[stage]] for stage in (0, 6)]
        assert [sum(row) for row in counts] == [96, 96]
        assert (max(counts[0]) > 12 > min(counts[0])) == (spare > 0)
    assert periods == {0.0: 153, 0.2: 146}


def test_without_re_routing_no_manner_is_free():
    problem = replace(Problem.of(job(2, 3, 4, 2)), reroute=False)
    assert not any(manner.is_free for _, manner in insertion_orders(problem, possible_assignments(problem)))


def test_the_oldest_micro_batch_never_waits():
    problem = Problem.of(job(1, 4, 6, 4))
    order = inserted(problem, plain(problem, possible_assignments(problem)[0], waiting=UNLIMITED))
    assert [program[0] for program in order] == [0, 6, 12, 18]
    assert order[3][1] == 24 + 18  # on the last stage its backward follows its forward at once


@pytest.mark.search
def test_a_search_of_manners_depends_on_its_seed_and_gains():
    _, problem = tight()
    order, manner = next(insertion_orders(problem, possible_assignments(problem)))
    start = timed(problem, order)
    found = [
        vary_insertion(problem, start, manner, Effort(0.0, steps=150 * STEPS_OF_ORDER, seed=seed))[0]
        for seed in (5, 5, 6)
    ]
    assert found[0] == found[1] != found[2]
    assert max(one.period for one in found) < start.period - 3
    assert found[0].period == time_order(problem, found[0].order).period


@pytest.mark.search
def test_insertion_gives_the_same_in_plain_python_and_compiled(in_both_ways):
    made = job(3, 3, 5, 4, chunks=2, link=0.3, weight_stash=0.5, forward=[1.0, 1.1, 0.7] * 2)
    problem = Problem.of(made, [Worker(0, 1)])
    both = in_both_ways(lambda: [order for order, _ in insertion_orders(problem, possible_assignments(problem))])
    assert both[0] == both[1]
    assert both[0]
