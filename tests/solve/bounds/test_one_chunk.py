import itertools
import random

import pytest
from hypothesis import given, settings

from recycle.ir.simulate import simulate
from recycle.job.profile import Link, Profile
from recycle.solve.bounds import lower_bound, one_chunk
from recycle.solve.problem import Problem
from recycle.solve.search.list_scheduling import portfolio, schedule_by_policy
from tests.solve.jobs import DEAD, job, small_jobs, worked_example


@pytest.mark.parametrize(
    ("limit", "decoupled", "staggered", "bound"),
    [
        ([4, 3, 2, 1], False, False, 36),
        (4, False, False, 33),
        (8, False, False, 33),
        ([4, 3, 2, 1], True, False, 32),
        (4, True, False, 29),
        ([4, 3, 2, 1], True, True, 32),
        (4, True, True, 29),
        (5, True, True, 28),
        (6, True, True, 27),
    ],
)
def test_every_row_of_the_worked_example_is_proven_optimal(limit, decoupled, staggered, bound):
    problem = Problem.of(worked_example(limit, decoupled=decoupled, staggered=staggered), [DEAD])
    assert lower_bound(problem) == bound


@pytest.mark.parametrize(
    ("shape", "limit", "dead", "bound"),
    [
        ((4, 8, 8), 8, [(1, 3)], 35),
        ((4, 8, 16), 8, [(1, 3)], 67),
        ((4, 8, 16), 8, [(1, 3), (2, 3)], 97),
        ((8, 4, 16), 4, [(1, 2)], 58),
        ((8, 8, 16), 8, [(1, 4)], 59),
        ((8, 8, 32), 8, [(1, 4)], 114),
        ((16, 16, 64), 16, [(1, 4)], 216),
        ((1, 4, 6), 4, [], 21),
        ((1, 8, 16), 8, [], 55),
        ((24, 64, 64), 64, [(0, 40)], 256),  # the round trip of stage 0 dwarfs its load
        ((24, 64, 64), 64, [(0, 3)], 258),  # 67 micro-batches, 64 slots: the trip of 121 is not filled
    ],
)
def test_the_bounds_of_the_published_rows(shape, limit, dead, bound):
    problem = Problem.of(job(*shape, limit), [type(DEAD)(*w) for w in dead])
    assert lower_bound(problem) == bound


def test_each_bound_on_stage_2_of_the_worked_example():
    problem = Problem.of(worked_example([4, 3, 2, 1]), [DEAD])
    assert one_chunk.load(problem, 2) == 9 * 3
    assert one_chunk.round_trip(problem, 2) == 9 * 3 + (1 + 2 - 2)
    assert one_chunk.memory(problem, 2) == 5 * (3 + 1 + 1)  # of 9 micro-batches one slot takes 5
    assert one_chunk.arrivals(problem)[2] == 2
    assert one_chunk.departures(problem)[2] == 2 + 1


def test_a_slow_host_gets_fewer_micro_batches():
    slow = Profile(speed={"0.0": 2.0})
    problem = Problem.of(job(2, 1, 3), [], slow)
    assert one_chunk.load(problem, 0) == min(max(3 * a * 2, 3 * (6 - a)) for a in range(7)) == 12


@pytest.mark.search
@pytest.mark.parametrize("seed", range(8))
def test_where_links_differ_the_fastest_bounds_and_the_slowest_is_searched_with(seed):
    draw = random.Random(seed).uniform
    fast, slow = draw(0.1, 0.5), draw(1.0, 2.0)
    profile = Profile(latency=fast, links={"*.*>0.*": Link(slow), "0.1>1.2": Link(0.0)}, message=[4.0, 1.0, 2.0, 9.0])
    problem = Problem.of(worked_example([4, 3, 2, 1]), [DEAD], profile)
    assert (problem.links, problem.link, problem.hop) == ((fast, slow), slow, fast)  # 1.2 is dead
    timeline = simulate(problem.schedule(schedule_by_policy(problem)), profile)
    assert timeline.period >= lower_bound(problem) > 28


def test_the_link_time_of_a_problem_counts_the_message_of_each_boundary():
    profile = Profile(latency=1.0, bandwidth=2.0, message=[4.0, 1.0, 2.0, 9.0])
    assert Problem.of(worked_example(4), [], profile).links == (1.5, 2.0, 3.0)
    assert Problem.of(job(2, 1, 3), [], Profile(latency=1.0)).links == (0.0,)


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


def test_the_way_through_a_later_stage_bounds_an_earlier_one():
    problem = Problem.of(worked_example([4, 3, 2, 1]), [DEAD])
    # stage 2: 9 micro-batches, 2 slots: 7 of their W come before the last F; one idle slot before the first I
    assert one_chunk.last_backward(problem, 2) == 9 * 2 + 7 + 1
    assert (
        max(one_chunk.detours(problem))[0] == 2 + 26 + 2 + 1
    )  # F of stages 0 and 1, stage 2, I of stages 1 and 0, the last W
    stashed = Problem.of(worked_example([4, 3, 2, 1], weight_stash=0.5), [DEAD])
    assert one_chunk.last_backward(stashed, 2) == 9 * 2 + 6 + 1  # 9 - 2 - 0.5 * 8 slots over, half a slot each


@pytest.mark.parametrize(
    ("limit", "stash", "last_start", "bound"),
    [
        (2, 1.0, 2 * 13, 39),  # 5 micro-batches in 2 slots, each held for 13: two rounds before the fifth
        (3, 1.0, 13 + 1, 27),  # the fifth is second in its round
        (2, 0.0, 2 * 12, 37),  # held until the I only
    ],
)
def test_the_last_micro_batch_waits_for_whole_rounds_of_slots(limit, stash, last_start, bound):
    problem = Problem.of(job(1, 6, 5, [limit, 6, 6, 6, 6, 6], weight_stash=stash, backward_weight=1))
    assert one_chunk._last_start(problem, 0, 0, 5) == last_start
    assert one_chunk.memory(problem, 0) == bound
