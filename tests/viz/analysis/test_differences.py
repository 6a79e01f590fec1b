"""Differences: matched by what instructions do, split exactly, and clocks that contradict each other refused."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recycle import Profile, RecycleError, Schedule, Shape, Timeline, simulate
from recycle.ir.families import one_f_one_b, zb_h1
from recycle.ir.gaps import GapCause
from recycle.ir.trace import executed_timeline
from tests.ir.random_schedules import random_profile, random_schedule
from viz.analysis.differences import (
    align,
    first_late,
    first_order_divergence,
    match,
    scaled,
    shares,
    split,
)
from viz.analysis.waits import name
from viz.run_files import load_run


def test_without_a_worker_its_micro_batches_are_matched_where_they_moved(
    healthy: Schedule, broken_timeline: Timeline
) -> None:
    whole = simulate(healthy)
    found = match(whole, broken_timeline)
    moved = {
        (name(whole, a), name(broken_timeline, b)): delta
        for a, b, delta, away in zip(found.first, found.second, found.delta, found.moved, strict=True)
        if away
    }
    assert moved[("1F1.0 on 1.1", "1F1.0 on 0.1")] == 1.0
    assert ("1B1.1 on 1.1", "1I1.1 on 2.1") in moved
    assert moved[("1B1.1 on 1.1", "1W1.1 on 2.1")] == 3.0  # of the whole backward the part that it stands for
    assert len(moved) == 6
    assert len(found.only_second) == 0
    assert {name(whole, row) for row in found.only_first} == {"1REDUCE_GRAD on 1.1", "1STEP on 1.1"}
    assert (np.diff(found.time) >= 0).all()


@settings(derandomize=True, max_examples=30, deadline=None, database=None)
@given(st.integers(0, 10**6))
def test_the_parts_of_a_makespan_add_up_to_it(seed: int) -> None:
    rng = random.Random(seed)
    schedule = random_schedule(rng)
    timeline = simulate(schedule, random_profile(rng, schedule))
    limits = [rng.uniform(1, 4) for _ in range(schedule.shape.ranks)]
    assert sum(split(timeline, limits).values()) == pytest.approx(timeline.makespan)


def test_extra_work_is_what_was_re_routed(healthy: Schedule, broken_timeline: Timeline) -> None:
    parts = shares(split(simulate(healthy)), split(broken_timeline))
    found = {share.title: share.difference for share in parts}
    assert found["extra work (re-routed)"] == pytest.approx(6.0 / 5)
    assert sum(found.values()) == pytest.approx(broken_timeline.makespan - simulate(healthy).makespan)


def test_a_slower_link_is_communication() -> None:
    schedule = one_f_one_b(Shape(1, 3, 4))
    quick, slow = simulate(schedule), simulate(schedule, Profile.uniform(link=0.5))
    found = {share.title: share.difference for share in shares(split(quick), split(slow))}
    assert found["communication"] == pytest.approx(
        float(slow.gaps().seconds[:, GapCause.TRANSFER].mean())
        - float(quick.gaps().seconds[:, GapCause.TRANSFER].mean())
    )
    assert found["communication"] > 0
    assert found["own work"] == 0


def test_the_first_other_instruction_of_a_worker_is_found() -> None:
    shape = Shape(1, 2, 3)
    found = first_order_divergence(simulate(one_f_one_b(shape)), simulate(zb_h1(shape)))
    assert found.first >= 0
    assert first_order_divergence(simulate(one_f_one_b(shape)), simulate(one_f_one_b(shape))) is None


def test_the_first_late_instruction_is_found_beyond_the_tolerance() -> None:
    schedule = one_f_one_b(Shape(1, 2, 4))
    usual, slow = simulate(schedule), simulate(schedule, Profile(forward=[1.0, 1.5]))
    found = match(usual, slow)
    first = first_late(usual, slow, found, 0.25)
    assert first.text == "1B0.0 on 0.1 starts 0.5 later in the second"
    assert first_late(usual, slow, found, 100.0) is None


def test_other_shapes_are_matched_by_stage_and_micro_batch() -> None:
    small, large = simulate(one_f_one_b(Shape(1, 2, 2))), simulate(one_f_one_b(Shape(2, 2, 5)))
    found = match(small, large)
    assert not found.moved.any()
    assert not len(found.only_first)
    for a, b in zip(found.first, found.second, strict=True):
        assert small.schedule.instruction(a) == large.schedule.instruction(b)


def test_plan_and_trace_are_aligned_and_the_method_is_said(make_run: Callable[..., Path], tmp_path: Path) -> None:
    run = load_run(make_run(tmp_path / "run"))
    plan = simulate(run.plan(run.plan_of(4)), run.profile)  # type: ignore[arg-type]
    ran = executed_timeline(run.trace.window(4, 4, 1), run.profile)
    scale, method = align(plan, ran)
    assert scale == pytest.approx(0.0173, rel=1e-6)
    assert "as long as it took on average" in method
    matches = match(scaled(plan, scale), ran)
    assert np.abs(matches.delta).max() < 1e-6
    assert align(plan, ran, 0.02)[0] == 0.02


def test_a_trace_of_clocks_that_do_not_agree_is_refused(make_run: Callable[..., Path], tmp_path: Path) -> None:
    run = load_run(make_run(tmp_path / "run"))
    window = run.trace.window(4, 4, 1)
    of_node = np.isin(window.process, [2, 3])  # worker 1.0's machine is 11.56 s ahead
    skewed = replace(window, start=window.start + 11.56 * of_node, end=window.end + 11.56 * of_node)
    plan = simulate(run.plan(run.plan_of(4)), run.profile)  # type: ignore[arg-type]
    with pytest.raises(RecycleError, match=r"clocks of this trace's workers are not aligned: .* began 11\."):
        align(plan, executed_timeline(skewed, run.profile))
