from dataclasses import replace

import msgspec
import pytest

from recycle.job.shape import Worker
from recycle.solve.effort import Deadline, Effort
from recycle.solve.planner import plan
from recycle.solve.problem import Problem
from recycle.solve.search.race import begin_all, race
from tests.solve.jobs import job


def slowed(made, speed):
    """The job with workers of these speed factors."""
    return msgspec.structs.replace(made, prices=replace(made.prices, speed=speed))


@pytest.mark.search
@pytest.mark.parametrize(
    ("shape", "limit", "dead", "slow", "factor"),
    [
        ((5, 4, 6), 1, [(3, 0), (3, 1), (3, 2)], (1, 3), 2.0),
        ((3, 4, 6), 2, [], (0, 0), 3.0),
        ((4, 2, 8), None, [(1, 0)], (2, 1), 1.5),
    ],
)
def test_a_plan_is_no_worse_than_that_of_the_job_without_its_slow_worker(shape, limit, dead, slow, factor):
    made = slowed(job(*shape, limit, steps=400), {f"{slow[0]}.{slow[1]}": factor})
    dead = [Worker(*one) for one in dead]
    assert plan(made, dead).period <= plan(made, [*dead, Worker(*slow)]).period


def test_a_worker_that_is_a_little_slow_is_not_left_out():
    made = slowed(job(3, 2, 6, steps=400), {"1.1": 1.1})
    planned = plan(made)
    assert planned.period < plan(made, [Worker(1, 1)]).period
    assert len(planned.schedule.text()["1.1"]) > 0


@pytest.mark.search
def test_where_time_is_short_one_beginning_is_searched_and_nothing_better_is_lost():
    made = slowed(job(3, 5, 7, 1), {"1.4": 1.2})
    problem = Problem.of(made, [], made.prices)
    beginnings = begin_all(problem, Effort(0.0))
    assert len(beginnings) == 2
    best = beginnings[0].best.period
    assert best == min(beginning.best.period for beginning in beginnings)
    for seconds in (0.001, 0.3):
        assert race(beginnings, Effort(0.0, Deadline(seconds))).period <= best
