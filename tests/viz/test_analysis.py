"""The answers behind the pictures, held to the simulator: waits, bubbles, ranges, memory, differences."""

from __future__ import annotations

import random
import struct
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recycle import Profile, Schedule, Shape, Timeline, simulate
from recycle.ir.dependencies import Cause
from recycle.ir.families import gpipe, one_f_one_b
from recycle.ir.gaps import GapCause
from recycle.ir.instruction import Transfer, is_kind
from tests.ir.random_schedules import random_profile, random_schedule
from viz.analysis.bubbles import Bubbles, Waits, name, range_statistics
from viz.analysis.differences import (
    first_late,
    match,
    shares,
    split,
)
from viz.analysis.memory import encode_held, held_by_all, memory_curve
from viz.lane_cache import CachedLanes, Explainer
from viz.lanes import LaneTable


def row_of(timeline: Timeline, text: str) -> int:
    return next(row for row, word in enumerate(timeline.schedule.words()) if word == text)


def test_a_value_from_another_worker_is_told_with_its_maker_and_its_carrier() -> None:
    timeline = simulate(one_f_one_b(Shape(1, 2, 2)), Profile.uniform(link=0.5))
    waits = Waits(timeline)
    (need, *others), total = waits.inputs(row_of(timeline, "0B0.0"))
    assert total == 3
    assert name(timeline, need.row) == "1B0.0 on 0.1"
    assert (need.made, need.arrived, need.slack) == (4.5, 5.0, 0.0)
    assert str(timeline.schedule.instruction(need.carrier)) == "1SEND_B0.0@0.0"
    assert [(name(timeline, other.row), other.cause) for other in others] == [
        ("0F0.1 on 0.0", Cause.ORDER),
        ("0F0.0 on 0.0", Cause.DATA),
    ]
    assert waits.reason(row_of(timeline, "0B0.0")) == "Waited for 1B0.0 on 0.1 (its value), ended 4.5, arrived 5"
    assert waits.reason(0) == "It needs nothing: it starts when the iteration does."


def test_a_reduce_waits_for_the_last_of_all_hosts() -> None:
    timeline = simulate(one_f_one_b(Shape(3, 2, 2)), Profile.uniform(step=0.5))
    reduce = row_of(timeline, "0REDUCE_GRAD")
    needs, total = Waits(timeline).inputs(reduce, most=2)
    assert len(needs) == 2
    assert total > 6
    assert all(need.cause in (Cause.REDUCE, Cause.ORDER) for need in needs)


@settings(derandomize=True, max_examples=30, deadline=None, database=None)
@given(st.integers(0, 10**6))
def test_inputs_and_outputs_are_each_others_reverse_and_the_decisive_input_has_no_slack(seed: int) -> None:
    rng = random.Random(seed)
    schedule = random_schedule(rng)
    timeline = simulate(schedule, random_profile(rng, schedule))
    waits, kind = Waits(timeline), timeline.schedule.columns.kind
    for row in rng.sample(range(len(kind)), min(6, len(kind))):
        if is_kind(kind[row], Transfer):
            continue
        for user in waits.outputs(row, 10**6):
            needs, _ = waits.inputs(user, 10**6)
            assert row in {need.row for need in needs}
        if timeline.start[row] > 0:
            (decided,), _ = waits.inputs(row, 1)
            assert decided.slack <= timeline.makespan * 1e-9


def test_the_bubble_under_a_point_says_what_it_waits_for() -> None:
    bubbles = Bubbles(simulate(one_f_one_b(Shape(1, 4, 4)), Profile.uniform(link=0.5)))
    told = {
        time: [bubbles.reason(gap) for gap in bubbles.between(3, time, time + 0.1)] for time in (2.0, 4.25, 5.0, 25.0)
    }
    assert told == {
        2.0: ["Idle for 4: 3F0.0 waits for 2F0.0 on 0.2, which ends at 4."],
        4.25: ["Idle for 0.5: 3F0.0 waits for 2SEND_F0.0@0.3 on 0.2, its value is made and not here yet."],
        5.0: [],  # it works then
        25.0: ["Idle for 7.5: its program has ended; the iteration ends at 26."],
    }
    own = [gap.start for gap in bubbles.gaps if gap.worker.rank == 3]
    assert [gap.start for gap in bubbles.between(3, 0.0, 26.0)] == own


def test_a_memory_limit_is_named_as_the_cause() -> None:
    timeline = simulate(one_f_one_b(Shape(1, 2, 6)))
    reasons = {bubbles.reason(gap) for bubbles in [Bubbles(timeline, [2, 1])] for gap in bubbles.gaps.longest(None, 20)}
    limited = [text for text in reasons if "memory limit" in text]
    assert limited
    assert all("holds back 0F0." in text for text in limited)


def test_a_step_behind_the_barrier_names_it() -> None:
    from dataclasses import replace

    schedule = replace(gpipe(Shape(1, 3, 2)), optimizer="barrier")
    timeline = simulate(schedule, Profile.uniform(step=1.0))
    bubbles = Bubbles(timeline)
    reasons = [bubbles.reason(gap) for gap in bubbles.gaps.longest(GapCause.REDUCE, 9)]
    assert any("STEP waits for the barrier" in text for text in reasons)


@settings(derandomize=True, max_examples=30, deadline=None, database=None)
@given(st.integers(0, 10**6))
def test_work_and_bubbles_fill_every_range(seed: int) -> None:
    rng = random.Random(seed)
    schedule = random_schedule(rng)
    timeline = simulate(schedule, random_profile(rng, schedule))
    begin, end = sorted((rng.uniform(-1, timeline.makespan), rng.uniform(0, timeline.makespan + 1)))
    found = range_statistics(timeline, timeline.gaps(), begin, end)
    assert sum(found.work.values()) + sum(found.bubbles.values()) == pytest.approx(found.total)
    whole = range_statistics(timeline, timeline.gaps(), 0, timeline.makespan)
    assert sum(whole.work.values()) == pytest.approx(sum(busy for busy in timeline.busy if busy is not None))


def test_re_routed_work_is_counted_and_the_dead_are_not(broken_timeline: Timeline) -> None:
    found = range_statistics(broken_timeline, broken_timeline.gaps(), 0, broken_timeline.makespan)
    assert found.workers == 5
    assert found.rerouted == 6.0


@settings(derandomize=True, max_examples=30, deadline=None, database=None)
@given(st.integers(0, 10**6))
def test_the_peak_is_the_simulators(seed: int) -> None:
    rng = random.Random(seed)
    schedule = random_schedule(rng)
    timeline = simulate(schedule, random_profile(rng, schedule))
    for w, peak in enumerate(timeline.peak_activations):
        if peak is not None:
            assert memory_curve(timeline, w).peak[0] == pytest.approx(peak)


def shown(schedule: Schedule, profile: Profile | None = None, limits: tuple[float, ...] | None = None) -> CachedLanes:
    timeline = simulate(schedule, profile or Profile.uniform(link=0.25))
    return CachedLanes(LaneTable.from_timeline(timeline), b"", Explainer(timeline, limits=limits))


def test_each_operation_has_what_its_workers_curve_says(broken: Schedule) -> None:
    lanes = shown(broken, limits=(3.0, 2.0))
    explainer, table = lanes.explainer, lanes.table
    limits, from_start, from_end = held_by_all(lanes, explainer)
    assert limits[[0, 1, 2, 4, 5]].tolist() == [3, 2, 3, 3, 2]
    assert np.isnan(limits[3])  # has failed
    for lane in (0, 1, 2, 4, 5):
        curve = memory_curve(explainer.timeline, lane)
        for operation in range(table.offsets[lane], table.offsets[lane + 1]):
            for moment, found in ((table.start, from_start), (table.end, from_end)):
                at = np.searchsorted(curve.time, moment[operation], side="right") - 1
                assert found[operation] == curve.held[at]
        assert from_start[table.offsets[lane] : table.offsets[lane + 1]].max() == curve.peak[0]


def test_bytes_are_shown_where_the_profile_knows_them() -> None:
    profile = replace(Profile.uniform(), activation=5e8, static=[3e9, 2e9, 1e9, 1e9], capacity=6e9)
    lanes = shown(one_f_one_b(Shape(1, 4, 8)), profile)
    limits, from_start, _ = held_by_all(lanes, lanes.explainer)
    assert limits.tolist() == [6e9] * 4
    peaks = [from_start[a:b].max() for a, b in zip(lanes.table.offsets, lanes.table.offsets[1:], strict=False)]
    assert peaks == [3e9 + 4 * 5e8, 2e9 + 3 * 5e8, 1e9 + 2 * 5e8, 1e9 + 5e8]
    assert peaks == lanes.explainer.timeline.peak_bytes
    assert struct.unpack_from("<II", encode_held(lanes, lanes.explainer)) == (4, 1)


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
