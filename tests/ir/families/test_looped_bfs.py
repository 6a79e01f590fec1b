"""Looped breadth-first: order and figures in closed form."""

import pytest

from recycle import Profile, Shape, check, lower, simulate
from recycle.ir.families import FAMILIES, gpipe, looped_bfs

TIMES = [(1, 1, 1), (2, 3, 1), (1, 2, 3)]
GRID = [(1, 3, 2), (2, 2, 2), (2, 3, 5), (3, 2, 4), (4, 1, 6), (4, 2, 4), (4, 2, 8), (8, 2, 8)]
FEWER_MICRO_BATCHES_THAN_RANKS = [(2, 2, 1), (4, 2, 3), (4, 3, 1), (3, 4, 2)]


def test_chunks_go_up_one_after_the_other_and_then_down() -> None:
    assert looped_bfs(Shape(1, 2, 2, 2)).text() == {
        "0.0": "0F0.0 0F0.1 2F0.0 2F0.1 2B0.1 2B0.0 0B0.1 0B0.0",
        "0.1": "1F0.0 1F0.1 3F0.0 3F0.1 3B0.1 3B0.0 1B0.1 1B0.0",
    }


@pytest.mark.parametrize(("ranks", "chunks", "micro_batches"), GRID + FEWER_MICRO_BATCHES_THAN_RANKS)
def test_makespan_bubbles_and_peak_follow_the_formulas(ranks: int, chunks: int, micro_batches: int) -> None:
    for times in TIMES:
        timeline = simulate(looped_bfs(Shape(1, ranks, micro_batches, chunks)), Profile.uniform(*times))
        f, b = times[0], times[1] + times[2]
        extra = (chunks - 1) * max(0, ranks - micro_batches)
        assert timeline.makespan == (micro_batches * chunks + ranks - 1 + extra) * (f + b)
        assert timeline.bubble == [(ranks - 1 + extra) * (f + b)] * ranks
        assert timeline.inner_bubble == [(ranks - 1 - r + extra) * (f + b) for r in range(ranks)]
        assert timeline.peak_activations == [micro_batches * chunks] * ranks


def test_golden_figures_of_the_reference() -> None:
    timeline = simulate(looped_bfs(Shape(1, 4, 8, 2)))
    assert (timeline.makespan, timeline.bubble, timeline.peak_activations) == (57, [9] * 4, [16] * 4)


def test_every_schedule_is_valid() -> None:
    for ranks, chunks, micro_batches in GRID + FEWER_MICRO_BATCHES_THAN_RANKS:
        assert check(lower(looped_bfs(Shape(2, ranks, micro_batches, chunks)))) == []


def test_with_one_chunk_it_takes_as_long_and_holds_as_much_as_gpipe() -> None:
    one, other = simulate(looped_bfs(Shape(2, 4, 6))), simulate(gpipe(Shape(2, 4, 6)))
    assert (one.makespan, one.peak_activations) == (other.makespan, other.peak_activations)


def test_the_family_is_registered() -> None:
    assert FAMILIES["looped-bfs"] is looped_bfs
