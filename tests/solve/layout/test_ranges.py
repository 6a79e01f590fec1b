"""Ranges of units: the load that they allow, who hosts what so that a load is reached, and what that copies."""

from __future__ import annotations

import numpy as np
import pytest

from recycle.solve.layout.ranges import balanced, cheapest_ranges
from recycle.solve.layout.units import Units


def units(count: int, ranks: int, most: float) -> Units:
    return Units((count // ranks,) * ranks, {"forward": np.ones(count), "static": np.ones(count)}, False, most)


def test_neighbours_that_host_a_unit_both_share_it() -> None:
    """Three workers host two of four units each, and four each do 4 of 12 micro-batches' 48."""
    found = balanced(units(4, 2, 2.0), [((0, 2),), ((1, 3),), ((2, 4),)], [1.0] * 3, 12)
    assert found is not None
    seconds, quotas = found
    assert seconds == 16
    assert quotas.tolist() == [[12, 4, 0, 0], [0, 8, 8, 0], [0, 0, 4, 12]]


def test_every_host_runs_as_many_as_are_asked_for() -> None:
    found = balanced(units(3, 1, 3.0), [((0, 2),), ((0, 3),)], [1.0, 1.0], 8, least=1)
    assert found is not None
    assert (found[1][0, :2] >= 1).all()
    assert (found[1][1] >= 1).all()


@pytest.mark.parametrize(("factor", "copied"), [(1.3, 0), (1.02, 4), (1.0025, 7)])
def test_helpers_move_only_as_far_as_a_load_asks_for(factor: float, copied: int) -> None:
    """Of four pipelines of eight ranks with two units each the first worker is dead, and nobody can hold three."""
    model = units(16, 8, 2.5)
    had = [((2 * r, 2 * r + 2),) for k in range(4) for r in range(8) if (k, r) != (0, 0)]
    least = 64 * 16 / 31
    found = cheapest_ranges(model, had, [1.0] * 31, 64, least * factor, [2] * 16)
    assert found is not None
    hosted = [parts for parts, _ in found]
    fresh = sorted(set(hosted) - set(had))
    assert len(hosted) <= 31
    assert sum(hosted.count(parts) for parts in fresh) <= copied
    shared = balanced(model, hosted, [1.0] * len(hosted), 64_000)
    assert shared is not None
    assert shared[0] <= 1000 * least * factor * 1.001
    for u in range(16):
        assert sum(a <= u < b for ((a, b),) in hosted) >= 2


def test_no_ranges_reach_less_than_an_even_share() -> None:
    model = units(8, 4, 3.0)
    had = [((2 * r, 2 * r + 2),) for _ in range(2) for r in range(4)][1:]
    assert cheapest_ranges(model, had, [1.0] * 7, 64, 64 * 8 / 7 * 0.99, [1] * 8) is None


def test_blocks_never_cross_a_fault_free_stage() -> None:
    blocks, ends = units(18, 3, 9.0).in_blocks(7)
    assert ends == [0, 3, 6, 9, 12, 15, 18]
    assert blocks.whole == (2, 2, 2)
    assert blocks.seconds.tolist() == [3.0] * 6
    uneven = Units((3, 1), {"forward": np.arange(4.0), "static": np.ones(4)}, False, 3.0)
    blocks, ends = uneven.in_blocks(4)
    assert (blocks.whole, ends, blocks.seconds.tolist()) == ((2, 1), [0, 1, 3, 4], [0.0, 3.0, 3.0])
