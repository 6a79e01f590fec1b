"""ZB-H1: order and figures in closed form."""

import pytest

from recycle import Profile, ScheduleError, Shape, check, lower, simulate
from recycle.ir.families import FAMILIES, one_f_one_b, zb_h1

TIMES = [(1, 1, 1), (2, 3, 1), (1, 2, 3), (3, 2, 1), (6, 3, 5)]
GRID = [(1, 3), (2, 2), (2, 5), (3, 7), (4, 4), (4, 8), (8, 16), (2, 1), (4, 1), (4, 3), (8, 5)]


def test_weights_wait_one_micro_batch_more_on_each_rank() -> None:
    assert zb_h1(Shape(1, 3, 4)).text() == {
        "0.0": "0F0.0 0F0.1 0F0.2 0I0.0 0W0.0 0F0.3 0I0.1 0W0.1 0I0.2 0W0.2 0I0.3 0W0.3",
        "0.1": "1F0.0 1F0.1 1I0.0 1F0.2 1I0.1 1W0.0 1F0.3 1I0.2 1W0.1 1I0.3 1W0.2 1W0.3",
        "0.2": "2F0.0 2I0.0 2F0.1 2I0.1 2F0.2 2I0.2 2W0.0 2F0.3 2I0.3 2W0.1 2W0.2 2W0.3",
    }


@pytest.mark.parametrize(("ranks", "micro_batches"), GRID)
def test_makespan_bubbles_and_peak_follow_the_formulas(ranks: int, micro_batches: int) -> None:
    for times in TIMES:
        timeline = simulate(zb_h1(Shape(1, ranks, micro_batches)), Profile.uniform(*times))
        f, i, w = times
        filled = min(ranks, micro_batches) - 1
        bubble = (ranks - 1) * (f + i) - filled * min(times)
        assert timeline.makespan == micro_batches * (f + i + w) + bubble
        assert timeline.bubble == [bubble] * ranks
        assert max(b for b in timeline.inner_bubble if b is not None) == (ranks - 1) * (f + i) - filled * min(f, w)
        assert timeline.peak_activations == [min(ranks, micro_batches)] * ranks


@pytest.mark.parametrize("times", [(1, 1, 1), (2, 3, 1), (3, 2, 1), (1, 2, 3)])
def test_the_papers_bubble_holds_where_w_is_the_shortest(times: tuple[int, int, int]) -> None:
    f, i, w = times
    bubble = simulate(zb_h1(Shape(1, 4, 8)), Profile.uniform(*times)).bubble[0]
    assert (bubble == 3 * (f + i - w)) == (w <= min(f, i))


@pytest.mark.parametrize(("times", "makespan", "bubble"), [((1, 1, 1), 27, 3), ((2, 3, 1), 60, 12)])
def test_golden_figures_of_the_reference(times: tuple[int, int, int], makespan: int, bubble: int) -> None:
    timeline = simulate(zb_h1(Shape(1, 4, 8)), Profile.uniform(*times))
    assert (timeline.makespan, timeline.bubble, timeline.peak_activations) == (makespan, [bubble] * 4, [4] * 4)


def test_no_worker_holds_more_than_the_worst_of_1f1b() -> None:
    worst = max(peak for peak in simulate(one_f_one_b(Shape(1, 4, 8))).peak_activations if peak is not None)
    assert simulate(zb_h1(Shape(1, 4, 8))).peak_activations == [worst] * 4


def test_every_schedule_is_valid() -> None:
    for ranks, micro_batches in GRID:
        assert check(lower(zb_h1(Shape(2, ranks, micro_batches)))) == []


def test_chunks_are_refused_and_the_family_is_registered() -> None:
    assert FAMILIES["zb-h1"] is zb_h1
    with pytest.raises(ScheduleError, match="zb-h1: needs chunks = 1, got 2"):
        zb_h1(Shape(1, 2, 2, 2))
