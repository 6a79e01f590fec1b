"""Assignments, and templates that are copied to all pipelines by their slots."""

import numpy as np
import pytest
from hypothesis import assume, given, settings

from recycle.ir.check import check
from recycle.job.profile import Link, Profile
from recycle.job.shape import Worker
from recycle.solve.assignment import around_slow_links, at_home, by_load, by_slots
from recycle.solve.effort import Deadline
from recycle.solve.problem import Problem
from recycle.solve.search.list_scheduling import portfolio, schedule_by_policy
from recycle.solve.search.order_kernels import time_order
from recycle.solve.template import copied_to_all, one_pipeline, unfold
from tests.solve.jobs import DEAD, job, small_jobs, worked_example


@settings(max_examples=60, deadline=None)
@given(small_jobs())
def test_by_slots_every_micro_batch_has_a_live_host_and_nobody_has_two_of_a_stage_in_one_slot(case):
    made, dead = case
    problem = Problem.of(made, dead)
    assignment, n = by_slots(problem), problem.micro_batches
    host = assignment.host.reshape(problem.shape.stages, n)
    for stage, row in enumerate(host.tolist()):
        assert set(row) <= set(problem.hosts[stage])
        assert len({*zip(row, assignment.slot.tolist(), strict=True)}) == n
        for g, w in enumerate(row):
            home = g // problem.shape.micro_batches * problem.shape.ranks + stage % problem.shape.ranks
            assert w == home or home not in problem.hosts[stage]
    fewest = min(len(hosts) for hosts in problem.hosts)
    assert assignment.slots == max(problem.shape.micro_batches, -(-n // fewest))
    by_pipeline = assignment.slot.reshape(problem.shape.pipelines, -1)
    assert (np.diff(by_pipeline, axis=1) > 0).all()


@settings(max_examples=60, deadline=None)
@given(small_jobs())
def test_by_load_alike_hosts_differ_by_one_micro_batch_at_most_and_what_has_a_home_stays(case):
    made, dead = case
    problem = Problem.of(made, dead)
    assignment = by_load(problem)
    for row, hosts in zip(assignment.host.reshape(problem.shape.stages, -1), problem.hosts, strict=True):
        assert np.ptp([(row == w).sum() for w in hosts]) <= 1
    homes = at_home(problem).ravel()
    live = np.isin(homes, [w for hosts in problem.hosts for w in hosts])
    assert (assignment.host == homes)[live].all()


@pytest.mark.parametrize("dead", [[], [DEAD]])
def test_around_a_slow_link_hosts_are_exchanged_inside_slots_until_nothing_goes_over_it(dead):
    profile = Profile(latency=0.5, links={"0.1>0.2": Link(2.0), "0.2>0.1": Link(2.0)})
    problem = Problem.of(worked_example(8), dead, profile)
    for assignment in (by_slots(problem), by_load(problem)):
        host, around = assignment.host.reshape(4, -1), around_slow_links(problem, assignment).host.reshape(4, -1)
        assert ((host[1] == 1) & (host[2] == 2)).any()
        assert not ((around[1] == 1) & (around[2] == 2)).any()
        assert (np.sort(around, axis=1) == np.sort(host, axis=1)).all()
    fixed = Problem.of(job(3, 4, 6, reroute=False), (), profile)
    assert np.array_equal(around_slow_links(fixed, by_slots(fixed)).host, by_slots(fixed).host)


@pytest.mark.search
@settings(max_examples=60, deadline=None)
@given(small_jobs())
def test_the_whole_is_valid_and_takes_no_longer_than_the_template(case):
    made, dead = case
    problem = Problem.of(made, dead)
    assume(problem.shape.ranks > 1 or problem.shape.chunks == 1 or problem.link == 0)
    assignment = by_slots(problem)
    template = one_pipeline(problem, assignment.slots)
    orders = [schedule_by_policy(template, policy) for policy in list(portfolio(template))[:8]]
    period, best = min((time_order(template, order).period, order) for order in orders)
    order = copied_to_all(problem, assignment, template, best)
    assert check(problem.schedule(order), profile=made.profile(), limits=made.activation_limits()) == []
    assert time_order(problem, order).period <= period + 1e-9


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


def test_a_rank_with_fewer_live_workers_than_run_in_a_slot_is_slower_and_has_less_memory_in_the_template():
    problem = Problem.of(job(4, 3, 12, [8, 8, 3], chunks=2), [Worker(3, 1), Worker(2, 2), Worker(3, 2)])
    template = one_pipeline(problem, 12, 4)
    assert template.speed == pytest.approx((1.0, 4 / 3, 2.0))
    assert template.cap == (8, 6, 2)
    assert one_pipeline(problem, 24, 2).speed == (1.0, 1.0, 1.0)
