"""The order of reduces: beside each other where hosts are free."""

from __future__ import annotations

import random

import pytest

from recycle import Profile, Shape, check, lower, simulate
from recycle.ir.families import one_f_one_b
from recycle.systems.bamboo.iteration import healthy, iteration
from recycle.systems.oobleck.iteration import iteration as unequal
from recycle.systems.reduces import reduce_order, with_updates

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
    made = with_updates(plain, [1.0] * 3)
    assert check(lower(made), about_to_run=True) == []
    assert lower(made) == lower(plain)
