"""GPipe: order and figures in closed form."""

import pytest

from recycle import Profile, ScheduleError, Shape, simulate
from recycle.ir.families import FAMILIES, gpipe


def test_all_forwards_come_before_all_backwards() -> None:
    assert gpipe(Shape(1, 2, 2)).text() == {"0.0": "0F0.0 0F0.1 0B0.0 0B0.1", "0.1": "1F0.0 1F0.1 1B0.0 1B0.1"}


@pytest.mark.parametrize(("ranks", "micro_batches"), [(2, 2), (4, 4), (4, 8), (8, 16)])
def test_bubble_and_peak_follow_the_formulas(ranks: int, micro_batches: int) -> None:
    for times in [(1, 1, 1), (2, 3, 1), (1, 2, 3), (3, 2, 1)]:
        timeline = simulate(gpipe(Shape(1, ranks, micro_batches)), Profile.uniform(*times))
        f, b = times[0], times[1] + times[2]
        assert timeline.bubble == [(ranks - 1) * (f + b)] * ranks
        assert timeline.peak_activations == [micro_batches] * ranks


def test_chunks_are_refused_and_the_family_is_registered() -> None:
    assert FAMILIES["gpipe"] is gpipe
    with pytest.raises(ScheduleError, match="gpipe: needs chunks = 1, got 2"):
        gpipe(Shape(1, 2, 2, 2))
