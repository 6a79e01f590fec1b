"""Multisets of templates: the best, by enumeration and by dynamic programming; shares of the batch, by both rules."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations_with_replacement, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recycle.systems.oobleck import instantiate as module
from recycle.systems.oobleck.instantiate import distribute, instantiate

quick = settings(derandomize=True, max_examples=40, deadline=None, database=None)
weights = st.dictionaries(st.integers(2, 7), st.integers(1, 9).map(float), min_size=1, max_size=5)


def multisets(sizes: list[int], nodes: int) -> list[tuple[int, ...]]:
    most = nodes // min(sizes)
    return [
        chosen
        for count in range(1, most + 1)
        for chosen in combinations_with_replacement(sizes, count)
        if sum(chosen) == nodes
    ]


@pytest.mark.parametrize("enumerated", [module.ENUMERATED, 0])
@quick
@given(weights, st.integers(4, 16), st.integers(1, 3))
def test_enumeration_finds_the_shortest_iteration_and_dynamic_programming_the_fastest_in_all(
    enumerated: int, of: dict[int, float], nodes: int, least: int
) -> None:
    def seconds(chosen: Sequence[int]) -> float:
        each = [of[size] for size in chosen]
        return max(w * b for w, b in zip(each, distribute(each, 12), strict=True)) + len(chosen) / 8

    def rate(chosen: Sequence[int]) -> float:
        return sum(1 / of[size] for size in chosen)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "ENUMERATED", enumerated)
        found = instantiate(of, nodes, least, 12, lambda chosen: len(chosen) / 8 if enumerated else 0.0)
    able = [chosen for chosen in multisets(sorted(of), nodes) if least <= len(chosen) <= 12]
    if not able:
        assert found is None
        return
    assert found is not None
    assert sum(found) == nodes
    assert least <= len(found) <= 12
    if enumerated:
        assert seconds(found) == min(map(seconds, able))
    else:
        assert rate(found) == pytest.approx(max(map(rate, able)))


def test_hundreds_of_nodes_take_a_moment() -> None:
    of = {size: 1.0 / size**1.01 for size in range(4, 60)}
    found = instantiate(of, 400, 2, 4096, lambda chosen: 0.0)
    assert found is not None
    assert sum(found) == 400


def test_the_sync_counts_for_how_many_pipelines_there_are() -> None:
    of = {size: 1.0 / size**1.01 for size in range(4, 60)}
    slow = instantiate(of, 400, 2, 4096, lambda chosen: 100.0 * len(chosen))
    fast = instantiate(of, 400, 2, 4096, lambda chosen: 100.0 / len(chosen))
    assert slow is not None
    assert fast is not None
    assert len(slow) < len(fast)


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


def test_pipelines_of_one_template_may_differ_by_one() -> None:
    assert distribute([1.0, 1.0, 1.0], 8) == [3, 3, 2]
    assert distribute([2.0, 1.0], 9) == [3, 6]


def test_every_pipeline_needs_a_micro_batch() -> None:
    with pytest.raises(ValueError, match="2 micro-batch"):
        distribute([1.0, 1.0, 1.0], 2)
