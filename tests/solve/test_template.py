from dataclasses import replace

import pytest
from hypothesis import assume, given, settings

from recycle.ir.check import check
from recycle.job.shape import Worker
from recycle.solve.assignment import by_slots
from recycle.solve.problem import Problem
from recycle.solve.search.list_scheduling import portfolio, schedule_by_policy
from recycle.solve.search.timing import time_order
from recycle.solve.template import copied_to_all, one_pipeline
from tests.solve.jobs import job, small_jobs


def copied(problem):
    """(the template's period, the order of the whole)."""
    assignment = by_slots(problem)
    template = one_pipeline(problem, assignment.slots)
    order = min(
        (schedule_by_policy(template, policy) for policy in list(portfolio(template))[:8]), key=period_in(template)
    )
    return time_order(template, order).period, copied_to_all(problem, assignment, template, order)


def period_in(problem):
    return lambda order: time_order(problem, order).period


@pytest.mark.search
@settings(max_examples=60, deadline=None)
@given(small_jobs())
def test_the_whole_is_valid_and_takes_no_longer_than_the_template(case):
    made, dead = case
    problem = Problem.of(made, dead)
    assume(problem.shape.ranks > 1 or problem.shape.chunks == 1 or problem.link == 0)
    assume(not problem.may_spread)  # the template has lanes enough then
    period, order = copied(problem)
    assert check(problem.schedule(order), profile=made.profile(), limits=made.activation_limits()) == []
    assert time_order(problem, order).period <= period + 1e-9


@pytest.mark.parametrize(("dead", "slots"), [(1, 8 * 8 // 7 + 1), (2, -(-64 // 6)), (7, 64)])
def test_with_ample_memory_it_takes_what_a_pipeline_with_so_many_micro_batches_does(dead, slots):
    """7 stages between: a fault-free pipeline of m micro-batches needs 3 m and the trip less its forwards."""
    problem = Problem.of(job(8, 4, 8, 64), [Worker(k, 1) for k in range(dead)])
    period, order = copied(problem)
    assert by_slots(problem).slots == slots
    assert time_order(problem, order).period <= period == 3 * slots


def test_a_template_has_lanes_enough_where_its_micro_batches_can_take_turns_on_those_of_several_pipelines():
    slow_links, one = job(2, 4, 8, chunks=2, link=3.0), job(1, 4, 8, chunks=2, link=3.0)
    assert not one_pipeline(Problem.of(slow_links), 8).may_queue
    assert one_pipeline(Problem.of(one), 8).may_queue
    assert not Problem.of(job(2, 4, 8, chunks=2, link=1.0)).may_queue


def test_a_rank_with_fewer_live_workers_than_run_in_a_slot_is_slower_and_has_less_memory_in_the_template():
    problem = Problem.of(job(4, 3, 12, [8, 8, 3], chunks=2), [Worker(3, 1), Worker(2, 2), Worker(3, 2)])
    template = one_pipeline(problem, 12, 4)
    assert template.speed == pytest.approx((1.0, 4 / 3, 2.0))
    assert template.cap == (8, 6, 2)
    assert one_pipeline(problem, 24, 2).speed == (1.0, 1.0, 1.0)


def test_where_peers_are_not_alike_its_workers_are_as_slow_as_the_slowest_or_have_the_mean_pace():
    problem = replace(Problem.of(job(3, 2, 6, 4)), speed=(1.0, 1.0, 1.0, 1.0, 2.0, 1.0))
    assert one_pipeline(problem, 6).speed == (2.0, 1.0)
    assert one_pipeline(problem, 6, is_mean=True).speed == pytest.approx((3 / 2.5, 1.0))
