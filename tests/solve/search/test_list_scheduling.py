import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recycle.errors import PlanError
from recycle.ir import compiled
from recycle.ir.check import check
from recycle.ir.compiled import run
from recycle.job.shape import Worker
from recycle.solve.problem import Problem
from recycle.solve.search import event_loop
from recycle.solve.search.list_scheduling import hosts_in, portfolio, schedule_by_policy, schedule_by_priority
from recycle.solve.search.order_kernels import NEVER, forward_pass, timed_order
from recycle.solve.search.timing import time_order
from tests.solve.jobs import DEAD, job, small_jobs, worked_example


@pytest.mark.search
@settings(max_examples=25, deadline=None)
@given(small_jobs())
def test_every_policy_gives_a_schedule_without_findings(case):
    made, dead = case
    problem = Problem.of(made, dead)
    for policy in itertools.islice(portfolio(problem), 0, None, 5):
        order = schedule_by_policy(problem, policy, noise=0.1, seed=3)
        findings = check(problem.schedule(order), profile=made.profile(), limits=made.activation_limits())
        assert findings == []
        assert problem.is_within_caps(order)


@pytest.mark.parametrize(("limit", "chunks"), [(2, 2), (3, 3), (4, 2)])
def test_chunks_do_not_deadlock_under_the_tightest_caps(limit, chunks):
    made = job(3, 4, 6, limit, chunks=chunks)
    problem = Problem.of(made, [DEAD])
    schedule = problem.schedule(schedule_by_policy(problem))
    assert check(schedule, profile=made.profile(), limits=made.activation_limits()) == []


@pytest.mark.search
def test_the_compiled_loops_make_and_time_the_same_order(in_both_ways):
    problem = Problem.of(job(4, 8, 8, 8), [Worker(1, 3)])
    policy = list(portfolio(problem))[7]
    plain, fast = in_both_ways(lambda: schedule_by_policy(problem, policy, noise=0.1, seed=5))
    assert fast == plain
    plainly, timing = in_both_ways(lambda: time_order(problem, plain))
    assert (timing.period, timing.makespan, timing.due) == (plainly.period, plainly.makespan, plainly.due)
    assert (timing.latest_starts == plainly.latest_starts).all()


@pytest.mark.parametrize(("ranks", "chunks", "limit"), [(6, 1, 6), (2, 2, 6), (3, 2, 6)])
def test_the_clock_of_the_event_loop_lets_transfers_queue_as_the_timing_does(ranks, chunks, limit, monkeypatch):
    """Timed on its own, the order begins its operations one after the other as the loop did."""
    ends = []
    monkeypatch.setattr(event_loop, "run", lambda *arguments: ends.append(run(*arguments)) or ends[-1])
    for link in (0.75, 2.0, 4.0):
        problem = Problem.of(job(2, ranks, 5, limit, chunks=chunks, link=link), [Worker(1, 0)])
        order = schedule_by_policy(problem)
        begun = ends.pop()[-1].begun
        _, _, timed, *_ = run(forward_pass, 0, problem.arrays, timed_order(problem, order), -NEVER, 0)
        starts = [timed.new_begin[x] for x in begun]
        assert starts == sorted(starts)


def test_a_stage_without_live_workers_is_refused_by_name():
    with pytest.raises(PlanError, match="no live worker is left for stage 1"):
        Problem.of(job(2, 2, 2), [Worker(0, 1), Worker(1, 1)])


def test_a_dead_worker_without_re_routing_is_refused():
    made = job(2, 2, 2, reroute=False)
    Problem.of(made)
    with pytest.raises(
        PlanError, match=r"\[planner\] reroute: .* micro-batches of 0\.1 when it is dead; set reroute = true"
    ):
        Problem.of(made, [Worker(0, 1)])


def test_small_problems_do_not_load_numba():
    assert Problem.of(worked_example(4)).size < compiled.COMPILE_FROM


def test_a_slot_for_a_deeper_chunk_is_set_aside_only_for_micro_batches_that_have_not_been_through_the_last_stage():
    """Two activations: a micro-batch begins when the deeper chunk of the one before is done, not when all of it is."""
    problem = Problem.of(job(1, 4, 6, 2, chunks=2))
    order = schedule_by_policy(problem)
    assert problem.is_within_caps(order)
    assert time_order(problem, order).period == 6 * (3 * 4 + 2) + 3


def test_no_micro_batch_enters_before_its_release():
    problem = Problem.of(job(1, 2, 4))
    release = np.array([0.0, 10.0, 20.0, 30.0])
    order = schedule_by_priority(problem, np.repeat([0, 1], 4), np.arange(24.0), release=release)
    assert order[0] == [0, 8, 16, 1, 9, 17, 2, 10, 18, 3, 11, 19]


@settings(max_examples=80, deadline=None)
@given(small_jobs(), st.integers(0, 99), st.sampled_from([0.0, 0.5, 2.0]), st.sampled_from([0.0, 0.5, 5.0]))
def test_any_priorities_give_a_valid_schedule(case, seed, patience, weight_patience):
    made, dead = case
    problem = Problem.of(made, dead)
    random = np.random.default_rng(seed)
    host = hosts_in(problem, schedule_by_policy(problem))
    order = schedule_by_priority(
        problem, host, random.random(problem.size), patience=patience, weight_patience=weight_patience
    )
    assert check(problem.schedule(order), profile=made.profile(), limits=made.activation_limits()) == []


def test_patience_keeps_a_weight_gradient_from_holding_up_what_is_about_to_come():
    """Stage 0 may begin W0 at 9 or wait for I1, which comes at 9.5 and is more urgent."""
    made = job(1, 2, 2, 2, forward=2.0, backward_input=[2.0, 2.0], backward_weight=[4.0, 0.5], link=0.25)
    problem = Problem.of(made)
    order = schedule_by_policy(problem)
    priority = time_order(problem, order).latest_starts + np.repeat([0.0, 0.0, 100.0], 4)
    host = hosts_in(problem, order)
    eager, patient = (
        schedule_by_priority(problem, host, priority, weight_patience=patience) for patience in (0.0, 3.0)
    )
    assert problem.schedule(eager).text()["0.0"] == "0F0.0 0F0.1 0I0.0 0W0.0 0I0.1 0W0.1"
    assert problem.schedule(patient).text()["0.0"] == "0F0.0 0F0.1 0I0.0 0I0.1 0W0.0 0W0.1"


@pytest.mark.search
def test_the_compiled_loop_makes_the_same_order(in_both_ways):
    problem = Problem.of(job(4, 8, 8, 8, link=0.25), [Worker(1, 3)])
    order = schedule_by_policy(problem)
    priority = time_order(problem, order).latest_starts + np.random.default_rng(5).normal(0, 1, problem.size)
    host = hosts_in(problem, order)
    plain, compiled = in_both_ways(
        lambda: schedule_by_priority(problem, host, priority, patience=0.5, weight_patience=1.0)
    )
    assert compiled == plain
