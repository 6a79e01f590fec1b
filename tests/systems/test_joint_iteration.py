"""Pipelines that reduce together: shares of the batch, the order of reduces, and when each of them has ended."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recycle import JobError, Profile, Shape, check, lower, simulate
from recycle.ir.families import one_f_one_b
from recycle.systems.bamboo.pipelines import after_losing, healthy, iteration
from recycle.systems.joint_iteration import (
    SETTLED,
    computed,
    ends_of_1f1b,
    even_shares,
    hosted,
    joint_schedule,
    micro_batches_of,
    reduce_order,
    shape_for,
    synchronised,
)
from recycle.systems.oobleck.iteration import iteration as unequal


def test_the_shape_has_room_for_all_and_exactly_the_batch() -> None:
    assert shape_for(3, 4, 18) == Shape(3, 4, 6)
    assert shape_for(7, 4, 32) == Shape(8, 4, 4)
    assert shape_for(3, 4, 7, chunks=2) == Shape(7, 4, 1, 2)
    with pytest.raises(JobError):
        shape_for(5, 4, 4)


def test_even_shares() -> None:
    assert even_shares(32, 3) == [11, 11, 10]
    assert even_shares(32, 4) == [8, 8, 8, 8]


def test_parts_consist_of_the_stages_between_the_cuts_of_any_pipeline() -> None:
    assert list(hosted((3, 3), (2, 1, 1, 2))) == [(0, 1), (2, 3)]
    assert list(hosted((2, 2, 2), (2, 1, 1, 2))) == [(0,), (1, 2), (3,)]


def test_every_micro_batch_is_dealt_once_and_first_to_its_home() -> None:
    dealt = micro_batches_of(Shape(4, 2, 4), [7, 6, 3])
    assert [" ".join(map(str, own)) for own in dealt] == [
        "0.0 0.1 0.2 0.3 2.3 3.0 3.1",
        "1.0 1.1 1.2 1.3 3.2 3.3",
        "2.0 2.1 2.2",
    ]


FREE = Profile(0.0, 0.0, 0.0, reduce=1.0)


def test_copies_reduce_even_stages_then_odd_ones() -> None:
    """Each of the 8 workers shares a stage with either neighbour: two rounds, not eight in a row."""
    made = iteration([healthy(8)], [1])
    assert reduce_order(made.placement, [1.0] * 8) == (0, 2, 4, 6, 1, 3, 5, 7)
    assert simulate(lower(made), FREE).makespan == 2


@pytest.mark.parametrize("stages", [3, 5, 7])
def test_an_odd_ring_takes_three_rounds(stages: int) -> None:
    assert simulate(lower(iteration([healthy(stages)], [1])), FREE).makespan == 3


def test_pipelines_that_are_cut_differently_need_no_more_than_their_fullest_worker() -> None:
    """Stages 0 1 2 | 3 4 5 and 0 1 | 2 3 | 4 5: three rounds where one behind the other would be six."""
    made, common = unequal([(3, 3), (2, 2, 2)], [1, 1])
    assert common == (1,) * 6
    assert simulate(lower(made), FREE).makespan == 3


def test_every_stage_is_reduced_once_and_all_workers_agree() -> None:
    chance = random.Random(3)
    for _ in range(30):
        stages = chance.randint(1, 8)
        hosted = [chance.sample(range(stages), chance.randint(0, stages)) for _ in range(6)]
        order = reduce_order(hosted, [chance.choice([1.0, 2.0, 5.0]) for _ in range(stages)])
        assert sorted(order) == list(range(stages))


def test_a_plain_schedule_gets_what_lower_would_write() -> None:
    plain = one_f_one_b(Shape(2, 3, 4), "barrier")
    programs = {worker: plain.program(worker) for worker in plain.live}
    made = joint_schedule(plain.shape, programs, plain.placement, [1.0] * 3, **plain.metadata)
    assert check(lower(made), about_to_run=True) == []
    assert lower(made) == lower(plain)


def test_equal_pipelines() -> None:
    profile = Profile(1.0, 1.0, 1.0, reduce=[1.0, 2.0, 4.0], step=[0.5, 0.25, 8.0])
    workers = computed(one_f_one_b(Shape(1, 3, 4)), profile)
    assert workers == [(18.0, (0,)), (16.0, (1,)), (14.0, (2,))]
    assert synchronised(workers, profile, [1.0] * 3) == 19 + 8
    assert simulate(lower(one_f_one_b(Shape(2, 3, 4), "barrier")), profile).period == 27


@pytest.mark.parametrize("dead", [0, 1, 2, 3])
@pytest.mark.parametrize("late", [0.0, 5.0, 50.0])
def test_copies_chain_the_reduces_of_neighbours(dead: int, late: float) -> None:
    hosts = after_losing(healthy(4), dead)
    assert hosts is not None
    profile = Profile(1.0, 1.0, 1.0, reduce=[1.0, late, 2.0, 3.0], step=[1.0, 2.0, 0.0, 0.0])
    workers = computed(iteration([healthy(4)], [7]), profile) + computed(iteration([hosts], [3]), profile)
    together = simulate(lower(iteration([healthy(4), hosts], [7, 3])), profile).period
    assert synchronised(workers, profile, [1.0] * 4) == together


times = st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=5)


@settings(derandomize=True, max_examples=60, deadline=None, database=None)
@given(times, st.sampled_from([0.0, 0.5, 3.0]), st.integers(1, 40))
def test_they_are_those_of_the_simulation(stages: list[tuple[int, int]], latency: float, more: int) -> None:
    profile = Profile([float(f) for f, _ in stages], [float(b) for _, b in stages], 0.0, latency=latency)

    def simulated(micro_batches: int) -> list[float]:
        return [end for end, _ in computed(one_f_one_b(Shape(1, len(stages), micro_batches)), profile)]

    count = SETTLED * len(stages) + more
    assert ends_of_1f1b(simulated, max(f + b for f, b in stages), count) == pytest.approx(simulated(count))


def test_many_micro_batches_cost_no_more_than_a_few() -> None:
    asked = []

    def simulated(micro_batches: int) -> list[float]:
        asked.append(micro_batches)
        profile = Profile([1.0, 2.0], [2.0, 4.0], 0.0)
        return [end for end, _ in computed(one_f_one_b(Shape(1, 2, micro_batches)), profile)]

    assert ends_of_1f1b(simulated, 6.0, 10_000) == [3 + 60_000, 60_001]
    assert max(asked) == SETTLED * 2
