import pytest
from hypothesis import given, settings

from recycle.ir.check import check
from recycle.solve.assignment import by_slots
from recycle.solve.effort import Deadline, Effort
from recycle.solve.problem import Problem
from recycle.solve.search.initial_orders import initial_orders
from recycle.solve.search.list_scheduling import schedule_by_policy
from recycle.solve.search.timing import time_order
from recycle.solve.template import one_pipeline, unfold
from tests.solve.jobs import job, small_jobs


@pytest.mark.search
@settings(max_examples=60, deadline=None)
@given(small_jobs())
def test_with_any_number_of_pipelines_at_work_what_is_unfolded_is_valid(case):
    made, dead = case
    problem = Problem.of(made, dead)
    for running in {len(hosts) for hosts in problem.hosts}:
        assignment = by_slots(problem, running)
        template = one_pipeline(problem, assignment.slots, running)
        found = unfold(problem, assignment, template, schedule_by_policy(template), Deadline(None))
        assert check(problem.schedule(found.order), profile=made.profile(), limits=made.activation_limits()) == []
        assert time_order(problem, found.order).period == found.period


@pytest.mark.search
def test_pipelines_that_are_alike_take_turns_on_each_others_lanes_where_links_are_slow():
    """Two chunks send each micro-batch twice over each lane: 16 x 4 alone, and the way to the last stage and back."""
    made = job(4, 4, 16, chunks=2, link=2.0)
    problem = Problem.of(made)
    begun = initial_orders(problem, Effort(0.0))
    alone = initial_orders(Problem.of(job(1, 4, 16, chunks=2, link=2.0)), Effort(0.0))
    assert begun.best.period < alone.best.period - 4
    assert check(problem.schedule(begun.best.order), profile=made.profile()) == []
