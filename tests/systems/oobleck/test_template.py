"""Templates: the formula, where it is exact, and what divide and conquer finds."""

from __future__ import annotations

from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recycle import Profile, Shape, lower, simulate
from recycle.ir import compiled
from recycle.ir.families import one_f_one_b
from recycle.systems.oobleck.template import templates
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
