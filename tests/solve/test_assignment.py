import numpy as np
import pytest
from hypothesis import given, settings

from recycle.job.profile import Link, Profile
from recycle.job.shape import Worker
from recycle.solve.assignment import (
    around_slow_links,
    at_home,
    by_load,
    by_slots,
    possible_assignments,
    spread_over_lanes,
)
from recycle.solve.problem import Problem
from tests.solve.jobs import DEAD, job, small_jobs, worked_example


def pipelines_at(problem, stage, pipeline):
    m = problem.shape.micro_batches
    first = stage * problem.micro_batches + pipeline * m
    return [problem.shape.worker_at(w).pipeline for w in possible_assignments(problem)[0].host[first : first + m]]


def of_each_stage(problem, assignment):
    """Micro-batches of each live host, by stage."""
    host = assignment.host.reshape(problem.shape.stages, -1)
    return [[int((row == w).sum()) for w in hosts] for row, hosts in zip(host, problem.hosts, strict=True)]


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
    assert all(max(counts) - min(counts) <= 1 for counts in of_each_stage(problem, assignment))
    homes = at_home(problem).ravel()
    live = np.isin(homes, [w for hosts in problem.hosts for w in hosts])
    assert (assignment.host == homes)[live].all()


def test_by_slots_with_more_pipelines_at_work_the_poorest_stage_takes_two_in_some_slots_and_no_host_two_more():
    problem = Problem.of(job(4, 3, 12), [Worker(3, 1)])
    assignment = by_slots(problem, 4)
    host = assignment.host.reshape(3, -1)
    assert assignment.slots == 12
    assert not assignment.is_free_of_clashes
    assert of_each_stage(problem, assignment) == [[12] * 4, [16] * 3, [12] * 4]
    twice = [slot for slot in range(12) if len({*host[1][assignment.slot == slot].tolist()}) == 3]
    assert twice == list(range(12))
    assert by_slots(problem).is_free_of_clashes
    assert by_slots(problem).slots == 16


@settings(max_examples=60, deadline=None)
@given(small_jobs())
def test_spread_over_lanes_every_worker_has_as_many_of_each_stage_in_each_slot_as_before(case):
    made, dead = case
    problem = Problem.of(made, dead)
    assignment = by_slots(problem)
    hosts = problem.shape.stages, problem.micro_batches
    for one in spread_over_lanes(problem, assignment):
        for before, after in zip(assignment.host.reshape(hosts), one.host.reshape(hosts), strict=True):
            assert sorted(zip(assignment.slot, before, strict=True)) == sorted(zip(assignment.slot, after, strict=True))


def test_what_a_worker_sends_one_after_the_other_goes_to_different_peers_where_lanes_are_slow():
    problem = Problem.of(job(3, 4, 6, link=2.0))
    host = spread_over_lanes(problem, by_slots(problem))[0].host.reshape(4, 3, 6)
    assert [w // 4 for w in host[0, 0]] == [0] * 6
    assert [w // 4 for w in host[1, 0]] == [0, 2, 1, 0, 2, 1]
    assert [w // 4 for w in host[2, 0]] == [0] * 6
    fast = Problem.of(job(3, 4, 6, link=0.5))
    assert spread_over_lanes(fast, by_slots(fast))[0].host.tolist() == by_slots(fast).host.tolist()


@pytest.mark.parametrize("dead", [[], [DEAD]])
def test_around_a_slow_link_hosts_are_exchanged_inside_slots_until_nothing_goes_over_it(dead):
    profile = Profile(latency=0.5, links={"0.1>0.2": Link(2.0), "0.2>0.1": Link(2.0)})
    problem = Problem.of(worked_example(8), dead, profile)
    for assignment in (by_slots(problem), by_load(problem)):
        host, around = assignment.host.reshape(4, -1), around_slow_links(problem, assignment).host.reshape(4, -1)
        assert ((host[1] == 1) & (host[2] == 2)).any()
        assert not ((around[1] == 1) & (around[2] == 2)).any()
        assert [np.bincount(row, minlength=12).tolist() for row in around] == [
            np.bincount(row, minlength=12).tolist() for row in host
        ]
    fixed = Problem.of(job(3, 4, 6, reroute=False), (), profile)
    assert np.array_equal(around_slow_links(fixed, by_slots(fixed)).host, by_slots(fixed).host)


def test_a_slightly_slow_worker_keeps_all_and_so_does_any_where_nothing_may_be_re_routed():
    made = job(3, 2, 4)
    assert pipelines_at(Problem.of(made, (), Profile(speed={"1.1": 1.2})), 1, 1) == [1] * 4
    fixed = job(3, 2, 4, reroute=False)
    assert pipelines_at(Problem.of(fixed, (), Profile(speed={"1.1": 3.0})), 1, 1) == [1] * 4
