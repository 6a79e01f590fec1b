"""Pipelines of unequal depth as one schedule: the time of each alone, and of their sync."""

from __future__ import annotations

from itertools import accumulate, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recycle import Profile, Shape, Worker, check, lower, simulate
from recycle.ir.families import one_f_one_b
from recycle.systems.joint_iteration import computed, hosted, synchronised
from recycle.systems.oobleck.iteration import common_cut, iteration
from recycle.systems.oobleck.template import templates
from recycle.systems.setting import Split
from tests.systems.closed_forms import template_seconds

quick = settings(derandomize=True, max_examples=30, deadline=None, database=None)


def test_stages_are_what_lies_between_any_two_cuts() -> None:
    assert common_cut([(2, 2), (2, 2)]) == ((2, 2), 2)
    assert common_cut([(3, 3), (2, 2, 2)]) == ((1, 1, 1, 1, 1, 1), 3)
    assert common_cut([(4, 4), (3, 5)]) == ((3, 1, 2, 2), 2)
    assert common_cut([(1, 2), (2, 1)]) == ((1, 1, 1), 3), "two ranks would need four stages of three layers"
    assert list(hosted((3, 3), (1, 1, 1, 1, 1, 1))) == [(0, 1, 2), (3, 4, 5)]


def test_a_shallow_pipeline_runs_several_stages_in_a_row() -> None:
    made, common = iteration([(3, 3), (2, 2, 2)], [2, 2])
    assert common == (1, 1, 1, 1, 1, 1)
    assert made.shape == Shape(2, 3, 2, 2)
    assert made.failed == {Worker(0, 2)}
    assert made.text()["0.0"] == (
        "0F0.0 1F0.0 2F0.0 0F0.1 1F0.1 2F0.1 2B0.0 1B0.0 0B0.0 2B0.1 1B0.1 0B0.1"
        " 0REDUCE_GRAD 1REDUCE_GRAD 2REDUCE_GRAD 0STEP 1STEP 2STEP"
    )
    lowered = lower(made)
    assert check(lowered, about_to_run=True) == []
    sent = [word for word in lowered.words() if "SEND" in word and word.endswith(("@0.0", "@0.1"))]
    assert sent == ["2SEND_F0.0@0.1", "2SEND_F0.1@0.1", "3SEND_B0.0@0.0", "3SEND_B0.1@0.0"]
    assert all(len(made.hosts(stage)) == 2 for stage in range(6)), "each layer is reduced over both pipelines"


@st.composite
def unequal(draw: st.DrawFn) -> tuple[list[Split], list[int]]:
    layers = draw(st.integers(1, 12))
    splits = []
    for _ in range(draw(st.integers(1, 4))):
        cuts = sorted(draw(st.sets(st.integers(1, layers - 1), max_size=5))) if layers > 1 else []
        splits.append(tuple(b - a for a, b in pairwise([0, *cuts, layers])))
    return splits, [draw(st.integers(1, 7)) for _ in splits]


def priced(split: Split, numbers: list[list[float]], link: float) -> Profile:
    """Per stage the sums of per-layer F, I and W, and of reduce and step."""
    ends = [0, *accumulate(split)]
    columns = [[sum(column[a:b]) for a, b in pairwise(ends)] for column in numbers]
    return Profile(*columns[:3], reduce=columns[3], step=columns[4], latency=link)


@pytest.mark.search
@quick
@given(unequal(), st.data())
def test_random_pipelines_pass_check_take_their_time_and_beat_no_bound(
    case: tuple[list[Split], list[int]], data: st.DataObject
) -> None:
    splits, shares = case
    layers = sum(splits[0])
    draws = [data.draw(st.lists(st.integers(1, 4).map(float), min_size=layers, max_size=layers)) for _ in range(5)]
    link = data.draw(st.sampled_from([0.0, 0.5]))
    made, common = iteration(splits, shares)
    assert check(made) == check(lower(made), about_to_run=True) == []
    timeline = simulate(lower(made), priced(common, draws, link))
    workers = []
    for k, (split, share) in enumerate(zip(splits, shares, strict=True)):
        alone = computed(one_f_one_b(Shape(1, len(split), share)), priced(split, draws, link))
        workers += [(end, stages) for (end, _), stages in zip(alone, hosted(split, common), strict=True)]
        fine = priced(common, [*draws[:3], [0.0] * layers, [0.0] * layers], link)
        there = [end for end, _ in computed(made, fine)][len(workers) - len(split) : len(workers)]
        assert there == pytest.approx([end for end, _ in alone])
        seconds = [sum(times) for times in zip(*draws[:3], strict=True)]
        slowest = max(sum(seconds[a:b]) for a, b in pairwise([0, *accumulate(split)]))
        assert timeline.makespan >= share * slowest
        assert made.stages_of(Worker(k, 0))[0] == 0
    together = synchronised(workers, priced(common, draws, link), common)
    assert timeline.period == timeline.makespan == pytest.approx(together)


@pytest.mark.parametrize("stages", [1, 2, 3, 4, 6, 12])
def test_even_templates_take_the_template_s_time_in_the_schedule(stages: int) -> None:
    """12 equal layers; a shallower pipeline beside it that takes less does not change that."""
    made = {t.stages: t for t in templates([3.0] * 12, 12)}
    schedule, common = iteration([made[stages].split, made[12].split], [4 * stages, 1])
    profile = Profile(*[[float(layers) for layers in common]] * 3)
    assert simulate(lower(schedule), profile).period == made[stages].seconds == template_seconds([36 / stages] * stages)
