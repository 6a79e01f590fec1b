"""1F1B: order and figures in closed form."""

import pytest

from recycle import Profile, ScheduleError, Shape, simulate
from recycle.ir.families import FAMILIES, one_f_one_b


def test_warm_up_shrinks_by_one_per_rank_and_then_backwards_alternate_with_forwards() -> None:
    assert one_f_one_b(Shape(1, 3, 4)).text() == {
        "0.0": "0F0.0 0F0.1 0F0.2 0B0.0 0F0.3 0B0.1 0B0.2 0B0.3",
        "0.1": "1F0.0 1F0.1 1B0.0 1F0.2 1B0.1 1F0.3 1B0.2 1B0.3",
        "0.2": "2F0.0 2B0.0 2F0.1 2B0.1 2F0.2 2B0.2 2F0.3 2B0.3",
    }


@pytest.mark.parametrize(("ranks", "micro_batches"), [(2, 2), (4, 4), (4, 8), (8, 16), (4, 2)])
def test_bubble_and_peak_follow_the_formulas(ranks: int, micro_batches: int) -> None:
    for times in [(1, 1, 1), (2, 3, 1), (1, 2, 3), (3, 2, 1)]:
        timeline = simulate(one_f_one_b(Shape(1, ranks, micro_batches)), Profile.uniform(*times))
        f, b = times[0], times[1] + times[2]
        assert timeline.bubble == [(ranks - 1) * (f + b)] * ranks
        assert timeline.peak_activations == [min(ranks - r, micro_batches) for r in range(ranks)]


def test_pipelines_are_copies_of_each_other() -> None:
    programs = one_f_one_b(Shape(3, 2, 2)).text()
    assert programs["0.1"] == "1F0.0 1B0.0 1F0.1 1B0.1"
    assert programs["2.1"] == "1F2.0 1B2.0 1F2.1 1B2.1"


def test_chunks_are_refused_and_the_family_is_registered() -> None:
    assert FAMILIES["1f1b"] is one_f_one_b
    with pytest.raises(ScheduleError, match="1f1b: needs chunks = 1, got 2"):
        one_f_one_b(Shape(1, 2, 2, 2))
