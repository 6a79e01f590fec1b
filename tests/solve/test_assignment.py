"""Assignments, and templates that are copied to all pipelines by their slots."""

import numpy as np
import pytest
from hypothesis import assume, given, settings

from recycle import Link, Profile, check
from recycle.solve.assignment import assign_by_load, assign_by_slots, avoid_slow_links, home_hosts
from recycle.solve.effort import Deadline
from recycle.solve.problem import Problem
from recycle.solve.search.list_scheduling import portfolio, schedule_by_policy
from recycle.solve.search.order_kernels import time_order
from recycle.solve.template import copy_to_pipelines, template_problem, unfold
from tests.solve.jobs import DEAD, job, small_problems, worked_example


@settings(max_examples=30)
@given(small_problems())
def test_slots_give_each_worker_at_most_one_micro_batch_of_a_stage(case):
    _, problem = case
    assignment, n = assign_by_slots(problem), problem.micro_batches
    host = assignment.host.reshape(problem.shape.stages, n)
    for stage, row in enumerate(host.tolist()):
        assert set(row) <= set(problem.hosts[stage])
        assert len({*zip(row, assignment.slot.tolist(), strict=True)}) == n
        for g, w in enumerate(row):
            home = g // problem.shape.micro_batches * problem.shape.ranks + problem.shape.rank_of(stage)
            assert w == home or home not in problem.hosts[stage]
    fewest = min(len(hosts) for hosts in problem.hosts)
    assert assignment.slots == max(problem.shape.micro_batches, -(-n // fewest))
    by_pipeline = assignment.slot.reshape(problem.shape.pipelines, -1)
    assert (np.diff(by_pipeline, axis=1) > 0).all()


@settings(max_examples=30)
@given(small_problems())
def test_load_of_equal_hosts_differs_by_at_most_one_and_live_homes_keep_theirs(case):
    _, problem = case
    assignment = assign_by_load(problem)
    for row, hosts in zip(assignment.host.reshape(problem.shape.stages, -1), problem.hosts, strict=True):
        assert np.ptp([(row == w).sum() for w in hosts]) <= 1
    homes = home_hosts(problem).ravel()
    live = np.isin(homes, [w for hosts in problem.hosts for w in hosts])
    assert (assignment.host == homes)[live].all()


@pytest.mark.parametrize("dead", [[], [DEAD]])
def test_hosts_are_exchanged_within_slots_to_avoid_a_slow_link(dead):
    profile = Profile(latency=0.5, links={"0.1>0.2": Link(2.0), "0.2>0.1": Link(2.0)})
    problem = Problem.from_job(worked_example(8), dead, profile)
    for assignment in (assign_by_slots(problem), assign_by_load(problem)):
        host, around = assignment.host.reshape(4, -1), avoid_slow_links(problem, assignment).host.reshape(4, -1)
        assert ((host[1] == 1) & (host[2] == 2)).any()
        assert not ((around[1] == 1) & (around[2] == 2)).any()
        assert (np.sort(around, axis=1) == np.sort(host, axis=1)).all()
    fixed = Problem.from_job(job(3, 4, 6, reroute=False), (), profile)
    assert np.array_equal(avoid_slow_links(fixed, assign_by_slots(fixed)).host, assign_by_slots(fixed).host)


@pytest.mark.search
@settings(max_examples=30)
@given(small_problems())
def test_copied_template_is_valid_and_not_longer(case):
    priced, problem = case
    assume(problem.shape.ranks > 1 or problem.shape.chunks == 1 or problem.link == 0)
    assignment = assign_by_slots(problem)
    template = template_problem(problem, assignment.slots)
    orders = [schedule_by_policy(template, policy) for policy in list(portfolio(template))[:8]]
    period, best = min((time_order(template, order).period, order) for order in orders)
    order = copy_to_pipelines(problem, assignment, template, best)
    assert check(problem.schedule(order), profile=priced.profile(), limits=priced.activation_limits()) == []
    assert time_order(problem, order).period <= period + 1e-9


@pytest.mark.search
@settings(max_examples=30)
@given(small_problems())
def test_unfolded_template_is_valid(case):
    priced, problem = case
    for running in {len(hosts) for hosts in problem.hosts}:
        assignment = assign_by_slots(problem, running)
        template = template_problem(problem, assignment.slots, running)
        unfolded = unfold(problem, assignment, template, schedule_by_policy(template), Deadline(None))
        assert (
            check(problem.schedule(unfolded.order), profile=priced.profile(), limits=priced.activation_limits()) == []
        )
        assert time_order(problem, unfolded.order).period == unfolded.period
