import itertools
import random
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recycle.ir.families import interleaved, looped_bfs
from recycle.ir.simulate import simulate
from recycle.job.profile import Link, Profile
from recycle.job.shape import Worker
from recycle.solve.bounds import closed_form, closed_forms, lower_bound
from recycle.solve.problem import Problem
from recycle.solve.search.list_scheduling import portfolio, schedule_by_policy
from tests.solve.jobs import DEAD, job, small_jobs, worked_example

FEW_SLOTS = [4, 3, 2, 1]


@pytest.mark.parametrize(
    ("limit", "decoupled", "staggered", "bound"),
    [
        (FEW_SLOTS, False, False, 36),
        (4, False, False, 33),
        (8, False, False, 33),
        (FEW_SLOTS, True, False, 32),
        (4, True, False, 29),
        (FEW_SLOTS, True, True, 32),
        (4, True, True, 29),
        (5, True, True, 28),
        (6, True, True, 27),
    ],
)
def test_every_row_of_the_worked_example_is_proven_optimal(limit, decoupled, staggered, bound):
    problem = Problem.of(worked_example(limit, decoupled=decoupled, staggered=staggered), [DEAD])
    assert lower_bound(problem) == bound


@pytest.mark.parametrize(
    ("shape", "chunks", "limit", "dead", "bound"),
    [
        ((4, 8, 8), 1, 8, [(1, 3)], 35),
        ((4, 8, 16), 1, 8, [(1, 3), (2, 3)], 97),
        ((8, 8, 32), 1, 8, [(1, 4)], 114),
        ((1, 8, 16), 1, 8, [], 55),
        ((24, 64, 64), 1, 64, [(0, 40)], 256),  # the round trip of stage 0 dwarfs its load
        ((24, 64, 64), 1, 64, [(0, 3)], 258),  # 67 micro-batches, 64 slots: the trip of 121 is not filled
        ((1, 4, 8), 2, None, [], 8 * 2 * 3),
        ((1, 4, 8), 2, 8, [], 48 + 3),  # rank 0: 8 F down and 3 I back up to stage 4, and 8 forwards to do meanwhile
        ((1, 4, 8), 2, 6, [], 48 + 5),
        ((16, 8, 6), 2, 16, [], 47),  # no rank reduces before its last host is done
        ((2, 4, 8), 2, 8, [(1, 2)], 96),
        ((4, 4, 8), 2, None, [(1, 2)], 22 * 3),  # 64 units on 3 hosts
    ],
)
def test_the_bounds_of_unit_times(shape, chunks, limit, dead, bound):
    problem = Problem.of(job(*shape, limit, chunks=chunks), [Worker(*w) for w in dead])
    assert lower_bound(problem) == bound


@pytest.mark.parametrize(("chunks", "limit"), [(1, None), (2, None), (2, 16)])
def test_hosts_of_few_micro_batches_wait_longer_for_the_first_backward(chunks, limit):
    problem = Problem.of(job(3, 6, 3, limit, chunks=chunks))
    units, way = 3 * chunks, 6 * chunks + 5  # through all stages, and back to the deepest chunk of rank 0
    assert closed_forms.load(problem, 0) == units * 3 + way - units


def test_load_and_memory_of_a_stage_with_few_slots():
    problem = Problem.of(worked_example(FEW_SLOTS), [DEAD])
    assert closed_forms.load(problem, 2) == 9 * 3 + (1 + 2 - 2)
    assert closed_forms.memory(problem, 2) == 5 * (3 + 1 + 1)  # of 9 micro-batches one slot takes 5


@pytest.mark.parametrize(("limit", "bound"), [(2, 29), (3, 20), (4, 17)])
def test_memory_counts_whole_units(limit, bound):
    problem = Problem.of(job(1, 2, 4, limit, chunks=2))  # 4 units held for 8 + 1 and 4 for 4 + 1, 56 in all
    # 2 slots by 29: 2 * 9 + 2 * 5 = 28 in that which begins an F later, and 9 + 4 * 5 = 29
    assert closed_forms.memory(problem, 0) == bound


def test_the_way_through_a_later_stage_bounds_an_earlier_one():
    problem = Problem.of(worked_example(FEW_SLOTS), [DEAD])
    # stage 2: 9 micro-batches, 2 slots: 7 of their W come before the last F; one idle slot before the first I
    assert closed_forms.last_backward(problem, 2) == 9 * 2 + 7 + 1
    # F of stages 0 and 1, stage 2, I of stages 1 and 0, the last W
    assert max(closed_forms.detours(problem))[0] == 2 + 26 + 2 + 1
    stashed = Problem.of(worked_example(FEW_SLOTS, weight_stash=0.5), [DEAD])
    assert closed_forms.last_backward(stashed, 2) == 9 * 2 + 6 + 1  # 9 - 2 - 0.5 * 8 slots over, half a slot each


def test_a_slow_host_gets_fewer_micro_batches_and_holds_them_longer():
    slow = Profile(speed={"0.0": 2.0})
    problem = Problem.of(job(2, 1, 3), [], slow)
    assert closed_forms.load(problem, 0) == min(max(3 * a * 2, 3 * (6 - a)) for a in range(7)) == 12
    tight = Problem.of(job(2, 1, 3, 1), [], slow)
    assert closed_forms.memory(tight, 0) == 12


@pytest.mark.search
def test_under_the_barrier_the_way_to_a_rank_and_back_counts():
    problem = Problem.of(job(1, 4, 8, 8, chunks=2, staggered=False))
    orders = (schedule_by_policy(problem, policy) for policy in portfolio(problem))
    assert lower_bound(problem) == min(simulate(problem.schedule(order)).makespan for order in orders) == 51
    assert lower_bound(Problem.of(job(1, 4, 1, chunks=2, staggered=False))) == 8 + 8 + 1  # one micro-batch, and its W


def test_a_bound_of_many_workers_takes_no_longer_than_a_few():
    problem = Problem.of(job(32, 64, 64, 128, chunks=2), [Worker(3, 7)])
    begun = time.process_time()
    assert closed_form(problem) == 64 * 2 * 3 + 64  # 192 slots to stage 127 and back to 64, and 128 forwards
    assert time.process_time() - begun < 2.0


@pytest.mark.search
@pytest.mark.parametrize("seed", range(4))
def test_where_links_differ_the_fastest_bounds_and_the_slowest_is_searched_with(seed):
    draw = random.Random(seed).uniform
    fast, slow = draw(0.1, 0.5), draw(1.0, 2.0)
    profile = Profile(latency=fast, links={"*.*>0.*": Link(slow), "0.1>1.2": Link(0.0)}, message=[4.0, 1.0, 2.0, 9.0])
    problem = Problem.of(worked_example(FEW_SLOTS), [DEAD], profile)
    assert (problem.links, problem.link, problem.hop) == ((fast, slow), slow, fast)  # 1.2 is dead
    timeline = simulate(problem.schedule(schedule_by_policy(problem)), profile)
    assert timeline.period >= lower_bound(problem) > 28


@pytest.mark.search
@settings(max_examples=30, deadline=None)
@given(small_jobs())
def test_no_constructed_schedule_beats_the_bound(case):
    made, dead = case
    problem = Problem.of(made, dead)
    bound = lower_bound(problem)
    for policy in itertools.islice(portfolio(problem), 3):
        timeline = simulate(problem.schedule(schedule_by_policy(problem, policy)), made.profile())
        assert timeline.period >= bound - 1e-9
        if not made.planner.staggered:
            assert timeline.period == pytest.approx(timeline.makespan)


@pytest.mark.search
@settings(max_examples=20, deadline=None)
@given(st.integers(1, 3), st.integers(2, 4), st.integers(1, 3), st.integers(2, 3), st.booleans())
def test_no_family_beats_the_bound_of_the_memory_that_it_takes(pipelines, ranks, groups, chunks, staggered):
    optimizer = "staggered" if staggered else "barrier"
    for family in (interleaved, looped_bfs):
        shape = job(pipelines, ranks, groups * ranks, chunks=chunks).shape
        timeline = simulate(family(shape, optimizer))
        peaks = [int(timeline.peak_activations[rank]) for rank in range(ranks)]
        limited = job(pipelines, ranks, groups * ranks, peaks, chunks=chunks, staggered=staggered, decoupled=False)
        assert lower_bound(Problem.of(limited)) <= timeline.period + 1e-9
