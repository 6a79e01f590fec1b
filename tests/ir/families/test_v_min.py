"""V-min: figures against the closed form where it holds, the published orders and the cap; orders for other times."""

import pytest

from recycle import Profile, ScheduleError, Shape, check, lower, simulate
from recycle.ir.families import FAMILIES, v_min

TIMES = [(1, 1, 1), (2, 3, 1), (1, 2, 3), (3, 2, 1)]
GRID = [(p, n * p) for p in (1, 2, 3, 4, 5, 6, 7, 8) for n in (1, 2)] + [(4, 5), (7, 9), (16, 16), (16, 32)]
FEWER_MICRO_BATCHES_THAN_RANKS = [(2, 1), (4, 1), (4, 3), (7, 3), (8, 5)]
PUBLISHED = {(2, 2): 15, (2, 4): 27, (3, 3): 26, (3, 6): 41, (4, 4): 35, (4, 8): 59, (5, 5): 45, (5, 10): 75,
             (6, 6): 53, (6, 12): 89, (7, 7): 65, (7, 14): 107, (8, 8): 75, (8, 16): 123, (16, 16): 155}  # fmt: skip
"""(P, m) -> makespan at unit times of the order that the authors' own generator makes, timed by us."""


def cap(ranks: int) -> int:
    return 2 * ((ranks + 1) // 3 + 1)


@pytest.mark.parametrize(("ranks", "micro_batches"), GRID)
def test_makespan_and_peak_follow_the_formulas(ranks: int, micro_batches: int) -> None:
    timeline = simulate(v_min(Shape(1, ranks, micro_batches, 2)))
    bubble = max(ranks - 1, 3 * (2 * ranks - cap(ranks)) - 1)
    assert timeline.makespan == 6 * micro_batches + bubble
    assert timeline.bubble == [bubble] * ranks
    assert max(timeline.peak_activations) == min(cap(ranks), 2 * micro_batches)


@pytest.mark.parametrize(("ranks", "micro_batches"), PUBLISHED)
def test_no_order_is_longer_than_the_published_one(ranks: int, micro_batches: int) -> None:
    makespan = simulate(v_min(Shape(1, ranks, micro_batches, 2))).makespan
    shorter = {2: 2, 5: 4, 8: 4}.get(ranks, 3 if (ranks, micro_batches) == (3, 3) else 0)
    assert PUBLISHED[ranks, micro_batches] - makespan == shorter


def test_golden_figures_of_the_reference() -> None:
    timeline = simulate(v_min(Shape(1, 4, 8, 2)))
    assert (timeline.makespan, timeline.bubble, max(timeline.inner_bubble)) == (59, [11] * 4, 11)
    assert timeline.peak_activations == [4] * 4


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_the_bound_of_every_v_is_met_up_to_two_ranks(ranks: int) -> None:
    makespan = simulate(v_min(Shape(1, ranks, 2 * ranks, 2))).makespan
    assert (makespan == 12 * ranks + ranks - 1) == (ranks <= 2)


@pytest.mark.parametrize("times", TIMES[1:])
@pytest.mark.parametrize(("ranks", "micro_batches"), [(2, 4), (3, 6), (4, 4), (4, 8), (5, 10), (8, 8)])
def test_an_order_made_for_the_times_keeps_the_cap_and_is_never_longer(
    ranks: int, micro_batches: int, times: tuple[int, int, int]
) -> None:
    shape, profile = Shape(1, ranks, micro_batches, 2), Profile.uniform(*times)
    made = v_min(shape, times=times)
    f, i, w = times
    shortest = 2 * micro_batches * (f + i + w) + (ranks - 1) * f
    assert shortest <= simulate(made, profile).makespan <= simulate(v_min(shape), profile).makespan
    assert check(made, limits=[cap(ranks)] * ranks) == []


@pytest.mark.parametrize(
    ("times", "ranks", "micro_batches", "published", "ours"),
    [((2, 3, 1), 4, 8, 167, 141), ((2, 3, 1), 8, 16, 348, 279), ((3, 2, 1), 4, 8, 160, 144)],
)
def test_unequal_times_gain_against_the_published_order(
    times: tuple[int, int, int], ranks: int, micro_batches: int, published: int, ours: int
) -> None:
    makespan = simulate(v_min(Shape(1, ranks, micro_batches, 2), times=times), Profile.uniform(*times)).makespan
    assert makespan == ours < published


@pytest.mark.parametrize(("ranks", "micro_batches"), GRID[:-2] + FEWER_MICRO_BATCHES_THAN_RANKS)
def test_every_schedule_is_valid_and_keeps_the_cap(ranks: int, micro_batches: int) -> None:
    schedule = v_min(Shape(2, ranks, micro_batches, 2))
    assert check(schedule, limits=[cap(ranks)] * ranks) == []
    assert check(lower(schedule), about_to_run=True) == []


@pytest.mark.parametrize("ranks", [9, 10, 11, 12, 21, 34])
def test_the_cap_is_kept_for_any_number_of_ranks(ranks: int) -> None:
    assert max(simulate(v_min(Shape(1, ranks, ranks, 2))).peak_activations) == cap(ranks)


def test_other_chunks_are_refused_and_the_family_is_registered() -> None:
    assert FAMILIES["v-min"] is v_min
    with pytest.raises(ScheduleError, match=r"v-min: needs chunks = 2 .*, got 3"):
        v_min(Shape(1, 2, 4, 3))
