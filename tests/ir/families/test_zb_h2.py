"""ZB-H2: order and figures in closed form."""

import pytest

from recycle import Profile, ScheduleError, Shape, check, lower, simulate
from recycle.ir.families import FAMILIES, zb_h2

TIMES = [(1, 1, 1), (2, 3, 1), (1, 2, 3), (3, 2, 1), (4, 1, 1)]
GRID = [(1, 1), (1, 3), (2, 3), (2, 4), (3, 5), (3, 8), (4, 7), (4, 8), (8, 16)]
CUT_SHORT = [(2, 1), (2, 2), (3, 4), (4, 1), (4, 6), (8, 8)]


def test_warm_up_is_doubled_and_weights_wait_two_micro_batches_more_on_each_rank() -> None:
    assert zb_h2(Shape(1, 2, 4)).text() == {
        "0.0": "0F0.0 0F0.1 0F0.2 0I0.0 0W0.0 0F0.3 0I0.1 0W0.1 0I0.2 0W0.2 0I0.3 0W0.3",
        "0.1": "1F0.0 1I0.0 1F0.1 1I0.1 1F0.2 1I0.2 1W0.0 1F0.3 1I0.3 1W0.1 1W0.2 1W0.3",
    }


@pytest.mark.parametrize(("ranks", "micro_batches"), GRID)
def test_makespan_bubbles_and_peak_follow_the_formulas(ranks: int, micro_batches: int) -> None:
    for times in TIMES:
        timeline = simulate(zb_h2(Shape(1, ranks, micro_batches)), Profile.uniform(*times))
        f, i, w = times
        bubble = (ranks - 1) * max(f, i - f, f + i - 2 * w)
        assert timeline.makespan == micro_batches * (f + i + w) + bubble
        assert timeline.bubble == [bubble] * ranks
        inner = max(b for b in timeline.inner_bubble if b is not None)
        assert inner == (ranks - 1) * max(0, i - f, f + i - 2 * w)
        assert timeline.peak_activations == [2 * ranks - 1] * ranks


def test_with_equal_times_no_worker_waits_between_its_first_and_last_instruction() -> None:
    timeline = simulate(zb_h2(Shape(1, 4, 8)))
    assert (timeline.makespan, timeline.inner_bubble) == (27, [0] * 4)
    assert timeline.peak_activations == [7] * 4


@pytest.mark.parametrize(("ranks", "micro_batches"), CUT_SHORT)
def test_fewer_micro_batches_than_the_warm_up_are_all_held(ranks: int, micro_batches: int) -> None:
    timeline = simulate(zb_h2(Shape(1, ranks, micro_batches)))
    assert timeline.peak_activations == [micro_batches] * ranks
    assert max(b for b in timeline.inner_bubble if b is not None) == 2 * ranks - 1 - micro_batches


def test_every_schedule_is_valid() -> None:
    for ranks, micro_batches in GRID + CUT_SHORT:
        assert check(lower(zb_h2(Shape(2, ranks, micro_batches)))) == []


def test_chunks_are_refused_and_the_family_is_registered() -> None:
    assert FAMILIES["zb-h2"] is zb_h2
    with pytest.raises(ScheduleError, match="zb-h2: needs chunks = 1, got 2"):
        zb_h2(Shape(1, 2, 2, 2))
