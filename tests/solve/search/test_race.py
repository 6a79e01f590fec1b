from dataclasses import replace

import msgspec
import pytest

from recycle.shape import Worker
from recycle.solve.planner import plan
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
