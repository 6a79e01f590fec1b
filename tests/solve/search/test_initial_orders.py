from dataclasses import replace

import msgspec
import pytest

from recycle.job.profile import Profile
from recycle.job.shape import Worker
from recycle.solve.effort import Effort
from recycle.solve.planner import plan
from recycle.solve.problem import Problem
from recycle.solve.search.initial_orders import ALL_POLICIES, initial_orders, without_slow
from tests.solve.jobs import job


def begun(made, dead, most):
    return initial_orders(Problem.of(made, [Worker(*one) for one in dead]), Effort(0.0), most)


@pytest.mark.slow
def test_stages_with_unlike_numbers_of_dead_meet_their_bound_when_dealt_by_load():
    per_stage = {key: [1.0, 3.0] for key in ("forward", "backward_input", "backward_weight")}
    assert begun(job(4, 2, 12, **per_stage), [(0, 0), (2, 0), (2, 1)], ALL_POLICIES).best.period == 144


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


def left_out(speed, **other):
    problem = Problem.of(job(4, 2, 4, **other), [Worker(3, 1)], Profile(speed=speed))
    return [set(one.dead - problem.dead) for one in without_slow(problem)]


def test_all_slow_workers_are_left_out_and_each_alone_the_slowest_first():
    a, b = Worker(0, 0), Worker(1, 1)
    assert left_out({"0.0": 1.5, "1.1": 2.0}) == [{a, b}, {b}, {a}]
    assert left_out({"0.0": 1.5}) == [{a}]


def test_what_is_slower_than_the_median_is_slow():
    assert left_out({"0.0": 0.5}) == []
    assert left_out({"0.0": 1.5, "1.0": 1.5, "2.0": 1.5, "3.0": 1.5}) == []


def test_nobody_is_left_out_where_all_are_alike_or_nothing_is_re_routed():
    assert left_out({}) == []
    problem = Problem.of(job(2, 2, 4, reroute=False), (), Profile(speed={"0.0": 2.0}))
    assert without_slow(problem) == []
