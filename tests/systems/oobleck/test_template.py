"""Templates: the formula, and what divide and conquer finds; the best multiset of them, and shares of the batch."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations, combinations_with_replacement, pairwise, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recycle import Profile, Shape, lower, simulate
from recycle.ir import compiled
from recycle.ir.families import one_f_one_b
from recycle.systems.oobleck import template as module
from recycle.systems.oobleck.template import distribute, instantiate, templates
from tests.systems.closed_forms import template_seconds

quick = settings(derandomize=True, max_examples=60, deadline=None, database=None)
times = st.lists(st.integers(1, 6), min_size=1, max_size=6)


def simulated(forward: list[float], backward: list[float], micro_batches: int) -> float:
    profile = Profile(forward, backward, 0.0)
    return simulate(lower(one_f_one_b(Shape(1, len(forward), micro_batches), "barrier")), profile).period


@pytest.mark.parametrize("stages", [1, 2, 5, 8])
def test_even_stages_take_what_1f1b_takes(stages: int) -> None:
    assert template_seconds([3.0] * stages) == (4 * stages + stages - 1) * 3
    assert template_seconds([3.0] * stages) == simulated([1.0] * stages, [2.0] * stages, 4 * stages)
    assert template_seconds([3.0] * stages, 7 * stages) == simulated([1.0] * stages, [2.0] * stages, 7 * stages)


@quick
@given(st.integers(1, 7), st.integers(1, 9), st.integers(1, 9), st.integers(0, 20))
def test_it_is_exact_for_equal_stages(stages: int, forward: int, backward: int, more: int) -> None:
    made = simulated([float(forward)] * stages, [float(backward)] * stages, stages + more)
    assert template_seconds([float(forward + backward)] * stages, stages + more) == made


@quick
@given(times, times)
def test_what_runs_is_never_faster_than_its_slowest_stage_or_the_formula(f: list[int], b: list[int]) -> None:
    stages = min(len(f), len(b))
    seconds = [float(x + y) for x, y in zip(f, b, strict=False)]
    made = simulated(list(map(float, f[:stages])), list(map(float, b[:stages])), 4 * stages)
    assert made >= 4 * stages * max(seconds)
    assert made >= template_seconds(seconds)


def test_light_stages_behind_the_slowest_make_the_formula_too_short() -> None:
    assert template_seconds([10.0, 1.0, 1.0, 1.0]) == 13 + 11 * 10 + 13 == 136
    assert simulated([5.0, 0.5, 0.5, 0.5], [5.0, 0.5, 0.5, 0.5], 16) == 160


def stage_seconds(layers: list[float], split: tuple[int, ...]) -> list[float]:
    ends = [0]
    for count in split:
        ends.append(ends[-1] + count)
    return [sum(layers[a:b]) for a, b in pairwise(ends)]


@quick
@given(st.lists(st.integers(1, 9), min_size=1, max_size=9))
def test_templates_are_what_the_formula_says_and_near_the_best_split(layers: list[int]) -> None:
    """Divide and conquer keeps the best of every part, which the whole may want otherwise; never by much here."""
    times = list(map(float, layers))
    for made in templates(times, len(layers)):
        assert sum(made.split) == len(layers)
        assert made.seconds == template_seconds(stage_seconds(times, made.split))
        splits = (
            tuple(b - a for a, b in pairwise([0, *cuts, len(layers)]))
            for cuts in combinations(range(1, len(layers)), made.stages - 1)
        )
        best = min(template_seconds(stage_seconds(times, split)) for split in splits)
        assert best <= made.seconds <= 1.1 * best


def test_equal_layers_are_cut_evenly() -> None:
    found = {made.stages: made.split for made in templates([1.0] * 24, 8)}
    assert found[4] == (6, 6, 6, 6)
    assert found[8] == (3,) * 8
    assert sorted(found[5]) == [4, 5, 5, 5, 5]
    assert list(found) == list(range(1, 9))


def test_compiled_and_plain_find_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    layers = [1.0, 3.0, 2.0, 2.0, 1.0, 4.0, 1.0]
    monkeypatch.setattr(compiled, "_compiled", {})
    plain = templates(layers, 7)
    monkeypatch.setattr(compiled, "COMPILE_FROM", 0)
    assert templates(layers, 7) == plain


fewer = settings(quick, max_examples=40)
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
@fewer
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


@fewer
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
