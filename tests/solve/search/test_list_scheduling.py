import itertools

import numpy as np
import pytest
from hypothesis import given, settings

from recycle.errors import PlanError
from recycle.ir import compiled
from recycle.ir.check import check
from recycle.ir.compiled import run
from recycle.ir.families import zb_h1
from recycle.ir.simulate import simulate
from recycle.job.shape import Worker
from recycle.solve.problem import Problem
from recycle.solve.search import event_loop
from recycle.solve.search.list_scheduling import portfolio, schedule_by_policy, schedule_by_priority
from recycle.solve.search.order_kernels import NEVER, forward_pass, timed_order
from recycle.solve.search.timing import time_order
from tests.solve.jobs import DEAD, job, small_jobs, worked_example


def periods(problem):
    """The period under each policy of the portfolio."""
    return [time_order(problem, schedule_by_policy(problem, policy)).period for policy in portfolio(problem)]


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


@pytest.mark.parametrize(
    ("shape", "limit", "dead", "period"),
    [((4, 4, 8), 7, [(1, 2)], 33), ((4, 8, 16), 15, [(1, 3)], 66), ((3, 4, 6), 8, [(1, 2)], 27)],
)
def test_with_memory_to_spare_the_list_scheduler_is_optimal(shape, limit, dead, period):
    problem = Problem.of(job(*shape, limit), [Worker(*w) for w in dead])
    assert min(periods(problem)) == period


def test_without_the_split_every_backward_is_whole():
    problem = Problem.of(worked_example(8, decoupled=False), [DEAD])
    text = problem.schedule(schedule_by_policy(problem)).text()
    assert "B1.0" in text["0.2"] + text["2.2"]
    assert not any(kind in program for program in text.values() for kind in "IW")


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


def test_forwards_first_keeps_the_pace_of_zb_h1_without_failures():
    problem = Problem.of(job(2, 16, 64, 16))
    assert min(periods(problem)) == 64 * 3 + 15


def test_an_even_clock_keeps_the_pace_where_times_differ():
    made = job(1, 8, 32, 8, forward=100, backward_input=115, backward_weight=85, link=4, step=40)
    problem = Problem.of(made)
    best = {}
    for policy in portfolio(problem):
        period = time_order(problem, schedule_by_policy(problem, policy)).period
        best[policy.evenness] = min(period, best.get(policy.evenness, period))
    zb_h1_period = simulate(zb_h1(made.shape), made.profile()).period
    assert best[1.0] <= zb_h1_period < best[0.0]


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
