"""ZB-V: order, figures in closed form and where that ends, orders made for other times."""

from types import SimpleNamespace

import pytest

from recycle import Profile, ScheduleError, Shape, Worker, check, lower, simulate
from recycle.ir.families import FAMILIES, zb_v

TIMES = [(1, 1, 1), (2, 3, 1), (1, 2, 3), (3, 2, 1)]
GRID = [(1, 1), (1, 3), (2, 3), (2, 4), (3, 5), (3, 8), (4, 8), (4, 12), (6, 12), (8, 16)]
CUT_SHORT = [(2, 2), (3, 3), (3, 4), (4, 4), (4, 6), (5, 5), (8, 8), (8, 14)]
FEWER_MICRO_BATCHES_THAN_RANKS = [(2, 1), (3, 2), (4, 1), (4, 3), (8, 5)]


def test_chunks_take_turns_and_the_weights_left_over_fill_the_end() -> None:
    assert zb_v(Shape(1, 2, 4, 2)).text() == {
        "0.0": "0F0.0 0F0.1 0F0.2 3F0.0 3I0.0 3W0.0 3F0.1 3I0.1 3W0.1 0F0.3 0I0.0 0W0.0 3F0.2 3I0.2 3W0.2"
        " 0I0.1 0W0.1 3F0.3 3I0.3 3W0.3 0I0.2 0W0.2 0I0.3 0W0.3",
        "0.1": "1F0.0 2F0.0 1F0.1 2F0.1 2I0.0 2W0.0 1F0.2 1I0.0 1W0.0 2F0.2 2I0.1 2W0.1 1F0.3 1I0.1 1W0.1"
        " 2F0.3 2I0.2 2W0.2 1I0.2 2I0.3 1I0.3 1W0.2 2W0.3 1W0.3",
    }


@pytest.mark.parametrize(("ranks", "micro_batches"), GRID)
def test_where_i_takes_at_least_f_bubbles_follow_the_formulas(ranks: int, micro_batches: int) -> None:
    for times in [*TIMES[:3], (1, 3, 3), (2, 2, 5), (4, 9, 2)]:
        timeline = simulate(zb_v(Shape(1, ranks, micro_batches, 2)), Profile.uniform(*times))
        f, i, w = times
        extra = max(0, ranks - 2) * max(0, w - i)
        bubble = (ranks - 1) * max(i, 2 * (i - w)) + extra
        assert timeline.makespan == 2 * micro_batches * (f + i + w) + bubble
        assert timeline.bubble == [bubble] * ranks
        assert max(b for b in timeline.inner_bubble if b is not None) == (ranks - 1) * max(i - f, 2 * (i - w)) + extra
        assert timeline.peak_activations == [2 * ranks] * ranks


def test_where_f_takes_longer_than_i_the_formula_does_not_hold() -> None:
    timeline = simulate(zb_v(Shape(1, 4, 8, 2)), Profile.uniform(3, 2, 1))
    assert timeline.bubble == [11] * 4
    assert 3 * max(2, 2 * (2 - 1)) == 6


@pytest.mark.parametrize(("ranks", "micro_batches"), GRID)
def test_with_equal_times_the_shortest_v_there_can_be_has_no_inner_bubble(ranks: int, micro_batches: int) -> None:
    timeline = simulate(zb_v(Shape(1, ranks, micro_batches, 2)))
    assert (timeline.makespan, timeline.period) == (6 * micro_batches + ranks - 1, 6 * micro_batches)
    assert timeline.inner_bubble == [0] * ranks


@pytest.mark.parametrize(("ranks", "micro_batches"), CUT_SHORT)
def test_down_to_m_equal_p_the_makespan_is_still_the_bound(ranks: int, micro_batches: int) -> None:
    timeline = simulate(zb_v(Shape(1, ranks, micro_batches, 2)))
    assert timeline.makespan == 6 * micro_batches + ranks - 1
    assert 0 < max(b for b in timeline.inner_bubble if b is not None) < ranks
    assert max(peak for peak in timeline.peak_activations if peak is not None) == 2 * ranks


@pytest.mark.parametrize(("ranks", "micro_batches"), FEWER_MICRO_BATCHES_THAN_RANKS)
def test_below_p_micro_batches_the_bound_is_not_met(ranks: int, micro_batches: int) -> None:
    timeline = simulate(zb_v(Shape(1, ranks, micro_batches, 2)))
    assert timeline.makespan > 6 * micro_batches + ranks - 1
    assert timeline.peak_activations[0] == 2 * micro_batches


def test_golden_figures_of_the_reference() -> None:
    timeline = simulate(zb_v(Shape(1, 4, 8, 2)))
    assert (timeline.makespan, timeline.bubble, timeline.inner_bubble) == (51, [3] * 4, [0] * 4)
    assert timeline.peak_activations == [8] * 4


@pytest.mark.parametrize(
    ("times", "made_for_equal_times", "made_for_them"), [((2, 3, 1), 108, 107), ((1, 2, 3), 104, 102)]
)
def test_an_order_made_for_the_times_is_shorter(
    times: tuple[int, int, int], made_for_equal_times: int, made_for_them: int
) -> None:
    schedules = zb_v(Shape(1, 4, 8, 2)), zb_v(Shape(1, 4, 8, 2), times=times)
    makespans = [simulate(schedule, Profile.uniform(*times)).makespan for schedule in schedules]
    assert makespans == [made_for_equal_times, made_for_them]
    assert check(schedules[1], limits=[8] * 4) == []
    assert schedules[1].metadata == {"family": "zb-v", "times": list(times)}


def test_every_schedule_is_valid_and_keeps_the_cap() -> None:
    for ranks, micro_batches in GRID + CUT_SHORT + FEWER_MICRO_BATCHES_THAN_RANKS:
        schedule = zb_v(Shape(2, ranks, micro_batches, 2))
        assert check(schedule, limits=[2 * ranks] * ranks) == []
        assert check(lower(schedule), about_to_run=True) == []


@pytest.mark.parametrize(("ranks", "micro_batches"), GRID)
def test_the_order_for_equal_times_is_that_of_torchs_schedule(ranks: int, micro_batches: int) -> None:
    torch = pytest.importorskip("torch.distributed.pipelining.schedules")
    shape = SimpleNamespace(pp_group_size=ranks, _n_microbatches=micro_batches, num_stages=2 * ranks)
    schedule = zb_v(Shape(1, ranks, micro_batches, 2))
    for rank in range(ranks):
        actions = torch.ScheduleZBVZeroBubble._calculate_single_rank_operations(shape, rank)
        texts = [str(action) for action in actions if action is not None]
        assert [str(i).replace("0.", "", 1) for i in schedule.program(Worker(0, rank))] == texts


def test_other_chunks_are_refused_and_the_family_is_registered() -> None:
    assert FAMILIES["zb-v"] is zb_v
    for chunks in (1, 3):
        with pytest.raises(ScheduleError, match=rf"zb-v: needs chunks = 2 .*, got {chunks}"):
            zb_v(Shape(1, 2, 4, chunks))
