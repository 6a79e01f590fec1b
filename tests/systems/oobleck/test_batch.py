"""Shares of the batch: both rules, against all ways."""

from __future__ import annotations

from itertools import product
from statistics import pvariance

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recycle.systems.oobleck.batch import distribute

quick = settings(derandomize=True, max_examples=40, deadline=None, database=None)
cases = st.lists(st.integers(1, 5), min_size=1, max_size=4).flatmap(
    lambda weights: st.tuples(st.just([float(w) for w in weights]), st.integers(len(weights), len(weights) + 9))
)


def all_ways(count: int, batch: int) -> list[tuple[int, ...]]:
    return [ways for ways in product(range(1, batch + 1), repeat=count) if sum(ways) == batch]


@quick
@given(cases)
def test_the_longest_is_as_short_as_can_be(case: tuple[list[float], int]) -> None:
    weights, batch = case
    shares = distribute(weights, batch)
    assert sum(shares) == batch
    assert min(shares) >= 1
    best = min(max(w * b for w, b in zip(weights, ways, strict=True)) for ways in all_ways(len(weights), batch))
    assert max(w * b for w, b in zip(weights, shares, strict=True)) == best


@quick
@given(cases)
def test_no_single_move_makes_the_variance_less(case: tuple[list[float], int]) -> None:
    weights, batch = case
    shares = distribute(weights, batch, "variance")
    assert sum(shares) == batch

    def variance(ways: list[int]) -> float:
        return pvariance([w * b for w, b in zip(weights, ways, strict=True)])

    for giver in range(len(weights)):
        for taker in range(len(weights)):
            moved = [b - (p == giver) + (p == taker) for p, b in enumerate(shares)]
            if moved[giver] >= 1:
                assert variance(moved) >= variance(shares) - 1e-9


def test_pipelines_of_one_template_may_differ_by_one() -> None:
    assert distribute([1.0, 1.0, 1.0], 8) == [3, 3, 2]
    assert distribute([2.0, 1.0], 9) == [3, 6]


def test_every_pipeline_needs_a_micro_batch() -> None:
    with pytest.raises(ValueError, match="2 micro-batch"):
        distribute([1.0, 1.0, 1.0], 2)
