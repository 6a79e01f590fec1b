"""Pipelines that reduce together: shares of the batch, the order of reduces, and when each of them has ended."""

from __future__ import annotations

import random

import pytest

from recycle import JobError, Profile, Shape, check, lower, simulate
from recycle.ir.families import one_f_one_b
from recycle.systems.bamboo.pipelines import healthy, iteration
from recycle.systems.joint_iteration import (
    joint_schedule,
    micro_batches_of,
    reduce_order,
    shape_for,
)
from recycle.systems.oobleck.pipelines import iteration as unequal


def test_the_shape_has_room_for_all_and_exactly_the_batch() -> None:
    assert shape_for(3, 4, 18) == Shape(3, 4, 6)
    assert shape_for(7, 4, 32) == Shape(8, 4, 4)
    assert shape_for(3, 4, 7, chunks=2) == Shape(7, 4, 1, 2)
    with pytest.raises(JobError):
        shape_for(5, 4, 4)


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
