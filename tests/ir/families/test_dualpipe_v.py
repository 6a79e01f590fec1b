"""DualPipeV: order, against torch's own as well, and figures in closed form where it holds."""

from types import SimpleNamespace

import pytest

from recycle import Profile, ScheduleError, Shape, Worker, check, lower, simulate
from recycle.ir.families import FAMILIES, dualpipe_v

GRID = [(1, 2), (1, 5), (2, 4), (2, 5), (3, 6), (3, 9), (4, 8), (4, 10), (4, 16), (5, 11), (8, 16), (8, 24)]


def test_the_steady_state_overlaps_a_forward_with_the_other_chunks_backward() -> None:
    assert dualpipe_v(Shape(1, 2, 5, 2)).text() == {
        "0.0": "0F0.0 0F0.1 0F0.2 3F0.0 3I0.0 3W0.0 3F0.1 (0F0.3;3B0.1) (3F0.2;0B0.0) (0F0.4;3B0.2) (3F0.3;0B0.1)"
        " 3B0.3 (3F0.4;0B0.2) 3B0.4 0I0.3 0W0.3 0I0.4 0W0.4",
        "0.1": "1F0.0 2F0.0 1F0.1 2F0.1 1F0.2 2B0.0 (2F0.2;1B0.0) (1F0.3;2B0.1) (2F0.3;1B0.1) (1F0.4;2B0.2)"
        " (2F0.4;1B0.2) 2B0.3 1B0.3 2I0.4 1I0.4 2W0.4 1W0.4",
    }


@pytest.mark.parametrize(("ranks", "micro_batches"), GRID)
def test_where_f_equals_i_and_w_is_no_longer_than_f_the_worst_bubble_follows_the_formula(
    ranks: int, micro_batches: int
) -> None:
    for times in [(1, 1, 1), (2, 2, 1), (3, 3, 2), (3, 3, 0)]:
        for pair in [0.75, 1]:
            overlapped = pair * sum(times)
            profile = Profile(*times, overlapped_pair=overlapped)
            timeline = simulate(dualpipe_v(Shape(1, ranks, micro_batches, 2)), profile)
            _, i, w = times
            assert max(timeline.bubble) == (ranks - 1) * (overlapped + i + w - 3 * w)
            assert timeline.peak_activations == [2 * ranks + 1] * ranks


@pytest.mark.parametrize("times", [(2, 3, 1), (1, 2, 3), (3, 2, 1), (1, 1, 2)])
def test_for_other_times_the_formula_does_not_hold(times: tuple[int, int, int]) -> None:
    f, i, w = times
    worst = max(b for b in simulate(dualpipe_v(Shape(1, 4, 8, 2)), Profile(*times)).bubble if b is not None)
    assert worst != 3 * (f + i + w + i + w - 3 * w)


def test_nor_for_pairs_that_take_longer_than_their_halves() -> None:
    worst = max(b for b in simulate(dualpipe_v(Shape(1, 4, 8, 2)), Profile(overlapped_pair=4)).bubble if b is not None)
    assert worst != 3 * (4 + 2 - 3)


def test_golden_figures_of_the_reference() -> None:
    timeline = simulate(dualpipe_v(Shape(1, 4, 10, 2)), Profile(overlapped_pair=3))
    assert (timeline.makespan, timeline.bubble, timeline.inner_bubble) == (66, [6] * 4, [6, 5, 4, 3])
    assert timeline.peak_activations == [9] * 4


def test_a_pair_that_hides_work_shortens_the_iteration() -> None:
    schedule = dualpipe_v(Shape(1, 4, 10, 2))
    apart, together = simulate(schedule), simulate(schedule, Profile(overlapped_pair=2))
    assert (apart.makespan, together.makespan) == (66, 52)


def test_every_schedule_is_valid() -> None:
    for ranks, micro_batches in GRID:
        schedule = dualpipe_v(Shape(2, ranks, micro_batches, 2))
        assert check(schedule, limits=[2 * ranks + 1] * ranks) == []
        assert check(lower(schedule), about_to_run=True) == []


@pytest.mark.parametrize(("ranks", "micro_batches"), GRID)
def test_the_order_is_that_of_torchs_schedule(ranks: int, micro_batches: int) -> None:
    torch = pytest.importorskip("torch.distributed.pipelining.schedules")
    shape = SimpleNamespace(pp_group_size=ranks, _n_microbatches=micro_batches)
    schedule = dualpipe_v(Shape(1, ranks, micro_batches, 2))
    for rank in range(ranks):
        actions = torch.ScheduleDualPipeV._calculate_single_rank_operations(shape, rank)
        texts = [str(action).removesuffix("OVERLAP_F_B").removeprefix("-1") for action in actions]
        assert [str(i).replace("0.", "") for i in schedule.program(Worker(0, rank))] == texts


def test_few_micro_batches_and_other_chunks_are_refused_and_the_family_is_registered() -> None:
    assert FAMILIES["dualpipe-v"] is dualpipe_v
    with pytest.raises(ScheduleError, match=r"dualpipe-v: needs micro_batches of at least 2 \* ranks = 8, got 7"):
        dualpipe_v(Shape(1, 4, 7, 2))
    with pytest.raises(ScheduleError, match=r"dualpipe-v: needs chunks = 2 .*, got 1"):
        dualpipe_v(Shape(1, 4, 8))
