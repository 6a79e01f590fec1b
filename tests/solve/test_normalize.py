import itertools
import random

import pytest
from hypothesis import given, settings, strategies as st

from recycle import Link, PlanError, Profile, Shape, Worker
from recycle.plans import arrange, dead_roles, failure_vector, moves_needed
from recycle.solve.bounds import closed_form
from recycle.solve.normalize import StageBounds, cheapest, normal_vectors, normalize
from recycle.solve.problem import Problem
from tests.solve.jobs import job, small_jobs


def moving(*arguments, **other):
    return job(*arguments, move=True, **other)


def bound_of(priced, vector):
    return closed_form(Problem.from_job(priced, dead_roles(priced.shape, vector)))


@pytest.mark.parametrize(("limit", "stays", "moves"), [(7, 48, 33), (4, 49, 35)])
def test_dead_workers_are_spread_over_stages_if_it_pays(limit, stays, moves):
    stacked = [Worker(0, 1), Worker(1, 1)]
    before = normalize(job(4, 4, 8, limit), stacked)
    after = normalize(moving(4, 4, 8, limit), stacked)
    assert (before.vector, before.moves) == ((0, 2, 0, 0), ())
    assert (max(after.vector), len(after.moves)) == (1, 1)
    assert stays <= before.period <= stays + 3
    assert after.period == moves


@settings(max_examples=40)
@given(small_jobs())
def test_bound_of_a_vector_is_the_largest_of_its_stages(case):
    priced, dead = case
    vector = failure_vector(priced.shape, dead)
    bounds = StageBounds(priced, sum(vector))
    assert bounds.bound_of(vector) == pytest.approx(bound_of(priced, vector))


def test_no_worker_moves_if_copying_costs_more_than_it_saves(tmp_path):
    stacked = [Worker(0, 1), Worker(1, 1)]  # moving one worker saves 15 units of time in each iteration

    def moved(seconds, **planner):
        path = tmp_path / f"{seconds}.json"
        Profile(static=[0.0, 2.0 * seconds, 0.0, 0.0], bandwidth=2.0).save(path)
        result = normalize(moving(4, 4, 8, 7, profile=str(path), **planner), stacked)
        assert all((move.bytes, result.seconds) == (2.0 * seconds, seconds) for move in result.moves)
        return len(result.moves)

    assert (moved(14_000), moved(16_000)) == (1, 0)
    assert moved(16_000, iterations_between_changes=10_000.0) == 1
    assert moved(140, iterations_between_changes=1.0) == 0


@pytest.mark.search
@settings(max_examples=15)
@given(st.integers(0, 10_000))
def test_moving_is_never_worse_than_staying(seed):
    chance = random.Random(seed)
    shape = Shape(chance.randint(2, 4), chance.randint(2, 4), chance.randint(1, 4))
    sizes = (shape.pipelines, shape.ranks, shape.micro_batches)
    limit = chance.choice([None, shape.ranks, 2 * shape.ranks - 1])
    dead = chance.sample(list(shape.workers()), chance.randint(1, shape.worker_count - shape.ranks))
    if max(failure_vector(shape, dead)) == shape.pipelines:
        dead = [worker for worker in dead if worker.pipeline]
    stays, moves = normalize(job(*sizes, limit), dead), normalize(moving(*sizes, limit), dead)
    priced = moving(*sizes, limit)
    assert moves.period <= stays.period
    assert bound_of(priced, moves.vector) <= bound_of(priced, stays.vector)
    assert (moves.period < stays.period) == bool(moves.moves)
    assert failure_vector(shape, moves.vacant) == moves.vector
    assert len(moves.moves) == moves_needed(stays.vector, moves.vector)
    assert max(moves.vector) < shape.pipelines


def test_copies_come_from_the_peer_that_finishes_first():
    shape = Shape(4, 2, 1)
    profile = Profile(static=[10.0, 40.0], bandwidth=1.0, links={"3.1>*.0": Link(0.0, 4.0)})
    failed = [Worker(0, 1), Worker(1, 1)]
    vacant, moves, seconds = arrange(shape, failed, (1, 1), profile)
    assert [(m.worker, m.role, m.source, m.bytes) for m in moves] == [("1.0", "0.1", "3.1", 40.0)]
    assert seconds == 10
    assert vacant == {Worker(1, 1), Worker(1, 0)}  # the dead roles lie in one pipeline
    _, both, seconds = arrange(shape, failed, (2, 0), Profile(static=[10.0, 40.0], bandwidth=1.0))
    assert sorted(m.source for m in both) == ["2.1", "3.1"]  # each sends one
    assert seconds == 40
    with pytest.raises(PlanError, match="needs more live workers"):
        arrange(shape, failed, (0, 1), profile)


def test_normal_vectors_are_the_most_even_and_the_one_with_fewest_stages():
    assert normal_vectors(StageBounds(job(16, 4, 4, 7), 3), 3) == [(0, 2, 1, 0), (0, 3, 0, 0)]
    even = normal_vectors(StageBounds(job(4, 4, 8, 7), 4), 4)
    assert even == [(1, 1, 1, 1)]
    assert normal_vectors(StageBounds(job(2, 2, 2), 3), 3) == []


def test_dynamic_program_finds_the_least_cost():
    chance = random.Random(3)
    for _ in range(30):
        room = [chance.randint(0, 3) for _ in range(4)]
        table = {(rank, dead): chance.random() for rank in range(4) for dead in range(4)}
        total = chance.randint(0, 6)
        fitting = [v for v in itertools.product(*(range(most + 1) for most in room)) if sum(v) == total]
        vector = cheapest(room, total, lambda rank, dead, costs=table: costs[rank, dead])
        least = min((sum(table[pair] for pair in enumerate(v)) for v in fitting), default=None)
        assert (vector is None) == (least is None)
        if vector is not None:
            assert sum(table[pair] for pair in enumerate(vector)) == pytest.approx(least)
