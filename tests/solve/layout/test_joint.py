"""Chains of different cuts as one schedule: valid, and no slower than the slowest of them."""

from __future__ import annotations

import pytest

from recycle.ir.check import check
from recycle.ir.families import one_f_one_b, zb_h2
from recycle.ir.lower import lower
from recycle.ir.schedule import Schedule
from recycle.ir.simulate import simulate
from recycle.profile import Profile
from recycle.shape import Shape, Worker
from recycle.solve.layout.chains import Cut
from recycle.solve.layout.joint import common_cut, hosted, joint_schedule, micro_batches_of


def joint(cuts: list[Cut], shares: list[int], family: object = zb_h2, optimizer: str = "staggered") -> Schedule:
    shape = Shape(len(cuts), max(map(len, cuts)), sum(shares) // len(cuts))
    workers = [[Worker(k, r) for r in range(len(cut))] for k, cut in enumerate(cuts)]
    batches = micro_batches_of(shape, shares, range(len(cuts)))
    failed = [worker for worker in shape.workers() if worker.rank >= len(cuts[worker.pipeline])]
    made = [family(Shape(1, len(cut), share)) for cut, share in zip(cuts, shares, strict=True)]  # type: ignore[operator]
    return joint_schedule(shape, list(zip(made, cuts, workers, batches, strict=True)), failed, optimizer)  # type: ignore[arg-type]


def test_stages_lie_between_the_cuts_of_any_chain() -> None:
    assert common_cut([(3, 3), (2, 2, 2)]) == (2, 1, 1, 2)
    assert list(hosted((3, 3), (2, 1, 1, 2))) == [(0, 1), (2, 3)]
    assert list(hosted((2, 2, 2), (2, 1, 1, 2))) == [(0,), (1, 2), (3,)]


def test_every_micro_batch_is_dealt_once_and_first_to_its_home() -> None:
    dealt = micro_batches_of(Shape(4, 2, 4), [7, 6, 3], range(3))
    assert [" ".join(map(str, mine)) for mine in dealt] == [
        "0.0 0.1 0.2 0.3 2.3 3.0 3.1",
        "1.0 1.1 1.2 1.3 3.2 3.3",
        "2.0 2.1 2.2",
    ]
    elsewhere = micro_batches_of(Shape(3, 2, 2), [3, 2, 1], [2, 0])
    assert [" ".join(map(str, mine)) for mine in elsewhere] == ["2.0 2.1 1.0", "0.0 0.1", "1.1"]


@pytest.mark.parametrize("family", [one_f_one_b, zb_h2])
@pytest.mark.parametrize(
    ("cuts", "shares"), [([(4,) * 8, (5, 5, 5, 5, 4, 4, 4)], [36, 28]), ([(3, 3), (2, 2, 2), (1, 5)], [5, 6, 1])]
)
def test_it_is_valid_and_reads_back(family: object, cuts: list[Cut], shares: list[int]) -> None:
    schedule = joint(cuts, shares, family)
    assert check(lower(schedule)) == []
    assert Schedule.loads(schedule.dumps()) == schedule
    assert schedule.shape.units == sum(cuts[0])


def test_chains_of_unlike_depth_do_not_hold_each_other_up() -> None:
    """The busiest worker has 36 micro-batches of 4 units, and nobody waits for a reduce further down the model."""
    schedule = joint([(4,) * 8, (5, 5, 5, 5, 4, 4, 4)], [36, 28])
    each = Profile(*[[float(units) for units in schedule.shape.cut]] * 3)
    assert simulate(schedule, each).period == 36 * 4 * 3


def test_activations_count_by_the_units_of_their_stage() -> None:
    """ZB-H2 holds 2 P - 1 micro-batches on its first rank. Of 32 units on 16 ranks a fault-free stage has two."""
    alike = joint([(4,) * 8, (4,) * 8], [32, 32])
    assert simulate(alike).peak_activations[0] == 15
    unlike = joint([(4,) * 8, (2,) * 16], [32, 32])
    peaks = simulate(unlike).peak_activations
    assert (peaks[0], peaks[16]) == (15 * 2, 31)
