"""The answers behind the pictures, held to the simulator: waits, bubbles, ranges, memory, differences."""

from __future__ import annotations

import random
import struct
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from recycle import Profile, Schedule, Shape, Timeline, simulate
from recycle.ir.dependencies import Cause
from recycle.ir.families import gpipe, one_f_one_b
from recycle.ir.gaps import GapCause
from recycle.ir.instruction import Transfer, is_kind
from recycle.ir.memory import activation_changes
from tests.ir.random_schedules import random_profile, random_schedule
from viz.analysis.bubbles import Bubbles, DependencyIndex, instruction_name, range_statistics
from viz.analysis.differences import (
    first_start_difference,
    match,
    split,
)
from viz.analysis.memory import encode_held, held_by_all, memory_curve
from viz.lane_cache import TimedLanes, TimelineContext
from viz.lanes import LaneTable


def row_of(timeline: Timeline, text: str) -> int:
    return next(row for row, word in enumerate(timeline.schedule.words()) if word == text)


def test_an_input_from_another_worker_has_its_producer_and_its_send() -> None:
    timeline = simulate(one_f_one_b(Shape(1, 2, 2)), Profile.uniform(link=0.5))
    index = DependencyIndex(timeline)
    (need, *others), total = index.inputs(row_of(timeline, "0B0.0"))
    assert total == 3
    assert (instruction_name(timeline, need.row), str(timeline.schedule.instruction(need.send))) == (
        "1B0.0 on 0.1",
        "1SEND_B0.0@0.0",
    )
    assert (need.produced, need.arrived, need.slack) == (4.5, 5.0, 0.0)
    assert [other.cause for other in others] == [Cause.ORDER, Cause.DATA]
    assert index.reason(row_of(timeline, "0B0.0")) == "Waited for 1B0.0 on 0.1 (its value), ended 4.5, arrived 5"
    assert index.reason(0) == "It has no inputs: it starts with the iteration."


@settings(max_examples=30)
@given(st.integers(0, 10**6))
def test_outputs_reverse_inputs_and_the_last_input_has_no_slack(seed: int) -> None:
    rng = random.Random(seed)
    schedule = random_schedule(rng)
    timeline = simulate(schedule, random_profile(rng, schedule))
    waits, kind = DependencyIndex(timeline), timeline.schedule.columns.kind
    for row in rng.sample(range(len(kind)), min(6, len(kind))):
        if is_kind(kind[row], Transfer):
            continue
        for user in waits.outputs(row, 10**6):
            needs, _ = waits.inputs(user, 10**6)
            assert row in {need.row for need in needs}
        if timeline.start[row] > 0:
            (decided,), _ = waits.inputs(row, 1)
            assert decided.slack <= timeline.makespan * 1e-9


def test_a_bubble_names_the_awaited_instruction() -> None:
    bubbles = Bubbles(simulate(one_f_one_b(Shape(1, 4, 4)), Profile.uniform(link=0.5)))
    reasons = {
        time: [bubbles.reason(gap) for gap in bubbles.in_interval(3, time, time + 0.1)]
        for time in (2.0, 4.25, 5.0, 25.0)
    }
    assert reasons == {
        2.0: ["Idle for 4: 3F0.0 waits for 2F0.0 on 0.2, which ends at 4."],
        4.25: ["Idle for 0.5: 3F0.0 waits for 2SEND_F0.0@0.3 on 0.2: the value exists but has not arrived."],
        5.0: [],  # it works then
        25.0: ["Idle for 7.5: its program has ended; the iteration ends at 26."],
    }
    own = [gap.start for gap in bubbles.gaps if gap.worker.rank == 3]
    assert [gap.start for gap in bubbles.in_interval(3, 0.0, 26.0)] == own


def test_memory_limits_and_the_barrier_are_named_as_causes() -> None:
    limited = Bubbles(simulate(one_f_one_b(Shape(1, 2, 6))), [2, 1])
    reasons = [limited.reason(gap) for gap in limited.gaps.longest(GapCause.MEMORY, 20)]
    assert reasons
    assert all("memory limit holds back 0F0." in text for text in reasons)
    barrier = replace(gpipe(Shape(1, 3, 2)), optimizer="barrier")
    bubbles = Bubbles(simulate(barrier, Profile.uniform(step=1.0)))
    assert any("STEP waits for the barrier" in bubbles.reason(gap) for gap in bubbles.gaps.longest(GapCause.REDUCE, 9))


@settings(max_examples=30)
@given(st.integers(0, 10**6))
def test_work_bubbles_and_peaks_add_up_to_the_timelines(seed: int) -> None:
    rng = random.Random(seed)
    schedule = random_schedule(rng)
    timeline = simulate(schedule, random_profile(rng, schedule))
    begin, end = sorted((rng.uniform(-1, timeline.makespan), rng.uniform(0, timeline.makespan + 1)))
    part = range_statistics(timeline, timeline.gaps(), begin, end)
    assert sum(part.work.values()) + sum(seconds for seconds, _ in part.idle.values()) == pytest.approx(
        (part.end - part.begin) * part.workers
    )
    whole = range_statistics(timeline, timeline.gaps(), 0, timeline.makespan)
    assert sum(whole.work.values()) == pytest.approx(sum(busy for busy in timeline.busy if busy is not None))
    limits = [rng.uniform(1, 4) for _ in range(schedule.shape.ranks)]
    assert sum(split(timeline, limits).values()) == pytest.approx(timeline.makespan)
    changes = activation_changes(timeline.schedule, timeline.profile, in_bytes=False)
    for w, peak in enumerate(timeline.peak_activations):
        if peak is not None:
            assert memory_curve(timeline, w, changes).peak[0] == pytest.approx(peak)


def cached(schedule: Schedule, profile: Profile | None = None, limits: tuple[float, ...] | None = None) -> TimedLanes:
    timeline = simulate(schedule, profile or Profile.uniform(link=0.25))
    return TimedLanes(LaneTable.from_timeline(timeline), TimelineContext(timeline, limits=limits))


def test_each_operation_has_the_memory_of_its_workers_curve(broken: Schedule) -> None:
    entry = cached(broken, limits=(3.0, 2.0))
    table = entry.table
    limits, *values = held_by_all(entry, entry.context)
    assert limits[[0, 1, 2, 4, 5]].tolist() == [3, 2, 3, 3, 2]
    assert np.isnan(limits[3])  # has failed
    shown = entry.context.timeline
    changes = activation_changes(shown.schedule, shown.profile, in_bytes=False)
    for lane in (0, 1, 2, 4, 5):
        curve = memory_curve(shown, lane, changes)
        rows = slice(table.offsets[lane], table.offsets[lane + 1])
        for times, held in zip((table.start, table.end), values, strict=True):
            at = np.searchsorted(curve.time, times[rows], side="right") - 1
            assert held[rows].tolist() == curve.held[at].tolist()


def test_bytes_are_shown_where_the_profile_knows_them() -> None:
    profile = replace(Profile.uniform(), activation=5e8, static=[3e9, 2e9, 1e9, 1e9], capacity=6e9)
    lanes = cached(one_f_one_b(Shape(1, 4, 8)), profile)
    limits, from_start, _ = held_by_all(lanes, lanes.context)
    assert limits.tolist() == [6e9] * 4
    peaks = [from_start[a:b].max() for a, b in zip(lanes.table.offsets, lanes.table.offsets[1:], strict=False)]
    assert peaks == [3e9 + 4 * 5e8, 2e9 + 3 * 5e8, 1e9 + 2 * 5e8, 1e9 + 5e8]
    assert peaks == lanes.context.timeline.peak_bytes
    assert struct.unpack_from("<II", encode_held(lanes, lanes.context)) == (4, 1)


def test_re_routed_micro_batches_are_matched_on_their_new_worker(healthy: Schedule, broken_timeline: Timeline) -> None:
    whole = simulate(healthy)
    matches = match(whole, broken_timeline)
    moved = {
        (instruction_name(whole, a), instruction_name(broken_timeline, b)): delta
        for a, b, delta, away in zip(matches.first, matches.second, matches.delta, matches.moved, strict=True)
        if away
    }
    assert moved[("1F1.0 on 1.1", "1F1.0 on 0.1")] == 1.0
    assert ("1B1.1 on 1.1", "1I1.1 on 2.1") in moved
    assert moved[("1B1.1 on 1.1", "1W1.1 on 2.1")] == 3.0  # of the whole backward the part that it stands for
    assert len(moved) == 6
    assert len(matches.only_second) == 0
    assert {instruction_name(whole, row) for row in matches.only_first} == {"1REDUCE_GRAD on 1.1", "1STEP on 1.1"}
    assert (np.diff(matches.time) >= 0).all()


def test_the_first_late_instruction_is_found_beyond_the_tolerance() -> None:
    schedule = one_f_one_b(Shape(1, 2, 4))
    usual, slow = simulate(schedule), simulate(schedule, Profile(forward=[1.0, 1.5]))
    matches = match(usual, slow)
    first = first_start_difference(usual, slow, matches, 0.25)
    assert first.text == "1B0.0 on 0.1 starts 0.5 later in the second"
    assert first_start_difference(usual, slow, matches, 100.0) is None


def test_other_shapes_are_matched_by_stage_and_micro_batch() -> None:
    small, large = simulate(one_f_one_b(Shape(1, 2, 2))), simulate(one_f_one_b(Shape(2, 2, 5)))
    matches = match(small, large)
    assert not matches.moved.any()
    assert not len(matches.only_first)
    for a, b in zip(matches.first, matches.second, strict=True):
        assert small.schedule.instruction(a) == large.schedule.instruction(b)
