import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recycle.ir.families import interleaved, looped_bfs
from recycle.ir.simulate import simulate
from recycle.job.shape import Worker
from recycle.solve.assignment import by_load
from recycle.solve.bounds import chunked, lower_bound
from recycle.solve.planner import plan
from recycle.solve.problem import Problem
from recycle.solve.search.list_scheduling import portfolio, schedule_by_policy
from tests.solve.exhaustive import best_of_all
from tests.solve.jobs import job


@pytest.mark.parametrize(
    ("shape", "chunks", "limit", "dead", "bound"),
    [
        ((1, 4, 8), 2, None, [], 8 * 2 * 3),
        ((1, 4, 8), 2, 8, [], 48 + 3),  # rank 0: 8 F down and 3 I back up to stage 4, and 8 forwards to do meanwhile
        ((1, 4, 8), 2, 6, [], 48 + 5),
        ((2, 4, 8), 2, 8, [], 51),  # both of the two wait
        ((16, 8, 6), 2, 16, [], 47),  # no rank reduces before its last host is done
        ((2, 4, 8), 2, 8, [(1, 2)], 96),
        ((4, 4, 8), 2, None, [(1, 2)], 22 * 3),  # 64 units on 3 hosts
        ((4, 8, 16), 2, None, [(1, 3)], 43 * 3),
    ],
)
def test_the_bounds_of_unit_times(shape, chunks, limit, dead, bound):
    problem = Problem.of(job(*shape, limit, chunks=chunks), [Worker(*w) for w in dead])
    assert lower_bound(problem) == bound


def test_slots_take_whole_units_of_two_lengths():
    filled = chunked._filled(np.array([4.9, 5.0, 9.0, 12.0, 13.0]), [8.0, 5.0])
    assert filled.tolist() == [0.0, 5.0, 8.0, 10.0, 13.0]


@pytest.mark.parametrize(("limit", "bound"), [(2, 29), (3, 20), (4, 17)])
def test_memory_counts_whole_units(limit, bound):
    problem = Problem.of(job(1, 2, 4, limit, chunks=2))  # 4 units held for 8 + 1 and 4 for 4 + 1, 56 in all
    # 2 slots by 29: 2 * 9 + 2 * 5 = 28 in that which begins an F later, and 9 + 4 * 5 = 29
    assert chunked.memory(problem, 0) == bound


def test_a_bound_of_many_workers_takes_no_longer_than_a_few():
    problem = Problem.of(job(32, 64, 64, 128, chunks=2), [Worker(3, 7)])
    begun = time.process_time()
    assert lower_bound(problem) == 64 * 2 * 3 + 64  # 192 slots to stage 127 and back to 64, and 128 forwards
    assert time.process_time() - begun < 2.0


@pytest.mark.search
@pytest.mark.parametrize(
    ("shape", "limit", "dead", "period"),
    [((1, 4, 8), 8, [], 51), ((2, 4, 8), 8, [], 51), ((4, 4, 8), 8, [(1, 2)], 66), ((4, 8, 16), 32, [(1, 3)], 129)],
)
def test_with_memory_for_a_whole_warm_up_plans_meet_the_bound(shape, limit, dead, period):
    planned = plan(job(*shape, limit, chunks=2, steps=100), [Worker(*w) for w in dead])
    assert (planned.period, planned.lower_bound) == (period, period)


@pytest.mark.search
def test_under_the_barrier_the_way_to_a_rank_and_back_counts():
    made = job(1, 4, 8, 8, chunks=2, staggered=False)
    problem = Problem.of(made)
    orders = (schedule_by_policy(problem, policy) for policy in portfolio(problem))
    assert lower_bound(problem) == min(simulate(problem.schedule(order)).makespan for order in orders) == 51
    assert lower_bound(Problem.of(job(1, 4, 1, chunks=2, staggered=False))) == 8 + 8 + 1  # one micro-batch, and its W


@pytest.mark.search
@pytest.mark.parametrize(
    ("shape", "keys", "optimum", "bound"),
    [
        ((1, 2, 1), {"limit": 2}, 9, 9),
        ((1, 2, 1), {"limit": 2, "staggered": False}, 9, 9),
        ((1, 2, 1), {"limit": 2, "link": 0.5, "step": [0.0, 1.0, 2.0, 0.0]}, 14, 13),
        ((1, 2, 1), {"forward": [1.0, 2.0, 1.0, 3.0], "weight_stash": 0.5}, 12, 12),
        ((1, 2, 1), {"backward_weight": [4.0, 0.5, 3.0, 1.0], "weight_stash": 0.5}, 14, 14),
        ((1, 1, 2), {"limit": 2, "decoupled": False}, 12, 12),
    ],
)
def test_no_bound_is_above_the_optimum_of_an_exhaustive_search(shape, keys, optimum, bound):
    made = job(*shape, chunks=2, **keys)
    problem = Problem.of(made)
    found, proven = best_of_all(problem, made.prices), lower_bound(problem)
    assert proven <= found + 1e-9
    assert (found, proven) == (optimum, bound)


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


def test_re_routed_units_are_dealt_out_evenly_over_all_chunks_of_a_worker():
    problem = Problem.of(job(4, 8, 16, chunks=2), [Worker(1, 3)])
    host = by_load(problem).host.reshape(16, 64)
    units = [int((host[[3, 11]] == k * 8 + 3).sum()) for k in (0, 2, 3)]
    assert (sum(units), max(units)) == (128, 43)


@pytest.mark.search
def test_groups_of_micro_batches_keep_the_pace_where_times_differ():
    made = job(1, 4, 8, 8, chunks=2, forward=100, backward_input=115, backward_weight=85, link=4, step=40)
    problem = Problem.of(made)
    best: dict[int, float] = {}
    for policy in portfolio(problem):
        period = simulate(problem.schedule(schedule_by_policy(problem, policy)), made.profile()).period
        best[policy.group] = min(period, best.get(policy.group, period))
    assert set(best) == {0, 4, 2}
    assert max(best[4], best[2]) < best[0]
    assert {policy.group for policy in portfolio(Problem.of(job(1, 4, 8, 8)))} == {0}
