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
from recycle.solve.problem import Problem
from recycle.solve.search.event_loop import UNLIMITED
from recycle.solve.search.insertion import _neighbour, inserted, insertion_orders, plain
from recycle.solve.search.list_scheduling import hosts_in
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


def test_without_re_routing_no_manner_is_free():
    problem = replace(Problem.of(job(2, 3, 4, 2)), reroute=False)
    assert not any(manner.is_free for _, manner in insertion_orders(problem, possible_assignments(problem)))


def test_the_oldest_micro_batch_never_waits():
    problem = Problem.of(job(1, 4, 6, 4))
    order = inserted(problem, plain(problem, possible_assignments(problem)[0], waiting=UNLIMITED))
    assert [program[0] for program in order] == [0, 6, 12, 18]
    assert order[3][1] == 24 + 18  # on the last stage its backward follows its forward at once
