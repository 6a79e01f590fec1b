"""V-half and V-min: figures against closed forms where they hold, the published orders and the cap; other times."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest

from recycle import Profile, Schedule, ScheduleError, Shape, check, lower, simulate
from recycle.ir.families import FAMILIES, v_half, v_min

TIMES = [(2, 3, 1), (1, 2, 3), (3, 2, 1)]
GRID = [(p, n * p) for p in (1, 2, 3, 4, 5, 6, 7, 8) for n in (1, 2)] + [(4, 5), (7, 9)]
LARGE = [(16, 16), (16, 32)]
FEWER_MICRO_BATCHES_THAN_RANKS = [(2, 1), (4, 1), (4, 3), (7, 3), (8, 5)]
SIZES = [(2, 2), (2, 4), (3, 3), (3, 6), (4, 4), (4, 8), (5, 5), (5, 10),
         (6, 6), (6, 12), (7, 7), (7, 14), (8, 8), (8, 16), (16, 16)]  # fmt: skip


@dataclass(frozen=True)
class Capped:
    """A family that keeps to a number of activations, and its figures.

    Attributes:
        cap: activations (in chunks) that a worker may hold, of the number of ranks.
        published: makespans at unit times of the orders that the authors' own generator makes, by `SIZES`; timed by us.
        shorter: (P, m) -> by how much ours is shorter.
        golden: makespan, bubble of each worker, largest inner bubble and peak of each for P = 4, m = 8.
        unequal: (times, P, m, published, ours): makespans for unequal times.
    """

    family: Callable[..., Schedule]
    name: str
    cap: Callable[[int], int]
    published: tuple[int, ...]
    shorter: dict[tuple[int, int], int]
    golden: tuple[int, int, int, int]
    unequal: tuple[tuple[tuple[int, int, int], int, int, int, int], ...]


HALF = Capped(
    v_half,
    "v-half",
    lambda ranks: 2 * (ranks // 2) + 2,
    (15, 25, 23, 41, 34, 53, 44, 71, 48, 83, 66, 101, 65, 113, 137),
    {(2, 2): 2, (4, 4): 5, (5, 5): 3, (6, 6): 1, (7, 7): 7},
    (53, 5, 5, 6),
    (((2, 3, 1), 4, 8, 124, 118), ((2, 3, 1), 8, 16, 266, 253), ((3, 2, 1), 4, 8, 123, 117)),
)
MIN = Capped(
    v_min,
    "v-min",
    lambda ranks: 2 * ((ranks + 1) // 3 + 1),
    (15, 27, 26, 41, 35, 59, 45, 75, 53, 89, 65, 107, 75, 123, 155),
    {(2, 2): 2, (2, 4): 2, (5, 5): 4, (5, 10): 4, (8, 8): 4, (8, 16): 4, (3, 3): 3},
    (59, 11, 11, 4),
    (((2, 3, 1), 4, 8, 167, 141), ((2, 3, 1), 8, 16, 348, 279), ((3, 2, 1), 4, 8, 160, 144)),
)


@pytest.fixture(params=[HALF, MIN], ids=lambda capped: capped.name)
def capped(request: pytest.FixtureRequest) -> Capped:
    found: Capped = request.param
    return found


def test_makespan_and_peak_follow_the_formulas(capped: Capped) -> None:
    for ranks, micro_batches in GRID + LARGE:
        timeline = simulate(capped.family(Shape(1, ranks, micro_batches, 2)))
        cap = capped.cap(ranks)
        bubble = max(ranks - 1, 3 * (2 * ranks - cap) - 1)
        assert (ranks, timeline.makespan) == (ranks, 6 * micro_batches + bubble)
        assert timeline.bubble == [bubble] * ranks
        assert max(timeline.peak_activations) == min(cap, 2 * micro_batches)


def test_no_order_is_longer_than_the_published_one(capped: Capped) -> None:
    for size, published in zip(SIZES, capped.published, strict=True):
        ranks, micro_batches = size
        makespan = simulate(capped.family(Shape(1, ranks, micro_batches, 2))).makespan
        assert (size, published - makespan) == (size, capped.shorter.get(size, 0))


def test_golden_figures_of_the_reference(capped: Capped) -> None:
    timeline = simulate(capped.family(Shape(1, 4, 8, 2)))
    makespan, bubble, inner, peak = capped.golden
    assert (timeline.makespan, timeline.bubble, max(timeline.inner_bubble)) == (makespan, [bubble] * 4, inner)
    assert timeline.peak_activations == [peak] * 4


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_the_bound_of_every_v_is_met_up_to_two_ranks(capped: Capped, ranks: int) -> None:
    makespan = simulate(capped.family(Shape(1, ranks, 2 * ranks, 2))).makespan
    assert (makespan == 12 * ranks + ranks - 1) == (ranks <= 2)


@pytest.mark.parametrize("times", TIMES)
def test_an_order_made_for_the_times_keeps_the_cap_and_is_never_longer(
    capped: Capped, times: tuple[int, int, int]
) -> None:
    f, i, w = times
    profile = Profile.uniform(*times)
    for ranks, micro_batches in [(2, 4), (3, 6), (4, 4), (4, 8), (5, 10), (8, 8)]:
        shape = Shape(1, ranks, micro_batches, 2)
        made = capped.family(shape, times=times)
        shortest = 2 * micro_batches * (f + i + w) + (ranks - 1) * f
        assert shortest <= simulate(made, profile).makespan <= simulate(capped.family(shape), profile).makespan
        assert check(made, limits=[capped.cap(ranks)] * ranks) == []


def test_unequal_times_gain_against_the_published_order(capped: Capped) -> None:
    for times, ranks, micro_batches, published, ours in capped.unequal:
        schedule = capped.family(Shape(1, ranks, micro_batches, 2), times=times)
        assert simulate(schedule, Profile.uniform(*times)).makespan == ours < published


def test_every_schedule_is_valid_and_keeps_the_cap(capped: Capped) -> None:
    for ranks, micro_batches in GRID + FEWER_MICRO_BATCHES_THAN_RANKS:
        schedule = capped.family(Shape(2, ranks, micro_batches, 2))
        assert check(schedule, limits=[capped.cap(ranks)] * ranks) == []
        assert check(lower(schedule), about_to_run=True) == []


def test_the_cap_is_kept_for_any_number_of_ranks(capped: Capped) -> None:
    for ranks in (9, 10, 11, 12, 21, 34):
        assert max(simulate(capped.family(Shape(1, ranks, ranks, 2))).peak_activations) == capped.cap(ranks)


@pytest.mark.parametrize("chunks", [1, 3])
def test_other_chunks_are_refused_and_the_family_is_registered(capped: Capped, chunks: int) -> None:
    assert FAMILIES[capped.name] is capped.family
    with pytest.raises(ScheduleError, match=rf"{capped.name}: needs chunks = 2 .*, got {chunks}"):
        capped.family(Shape(1, 2, 4, chunks))


@pytest.mark.parametrize("times", [(1, 1), (1, -1, 1), (1, float("nan"), 1), (1, float("inf"), 1)])
def test_impossible_times_are_refused(capped: Capped, times: tuple[float, ...]) -> None:
    with pytest.raises(ScheduleError, match="times must be three finite numbers of at least 0"):
        capped.family(Shape(1, 2, 4, 2), times=times)
