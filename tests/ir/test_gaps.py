"""Gaps: golden causes, exact tiling, and each cause against a slow reading of its definition on random schedules."""

from __future__ import annotations

import random
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recycle import Profile, Schedule, Shape, Timeline, Worker, simulate
from recycle.ir.dependencies import Value, needs, produced
from recycle.ir.families import one_f_one_b
from recycle.ir.gaps import Gap, GapCause
from recycle.ir.instruction import (
    Backward,
    BackwardInput,
    BackwardWeight,
    Compute,
    Forward,
    Instruction,
    OptimizerStep,
    OverlappedPair,
    ReduceGradients,
    Transfer,
)
from tests.ir.random_schedules import random_profile, random_schedule

bounded = settings(derandomize=True, max_examples=60, deadline=None, database=None)
seeds = st.integers(0, 10**6)

Told = tuple[float, float, str, str, str, str]


def told(timeline: Timeline, worker: str, limits: list[float] | None = None) -> list[Told]:
    """(start, end, cause, instruction that ends it, what that waits for, what could run) of a worker's gaps."""

    def name(row: int) -> str:
        return "" if row < 0 else str(timeline.schedule.instruction(row))

    return [
        (gap.start, gap.end, gap.cause.name, name(gap.row), name(gap.waits_for), name(gap.ready))
        for gap in timeline.gaps(limits)
        if str(gap.worker) == worker
    ]


def test_the_gaps_of_1f1b_say_what_is_made_late_what_is_under_way_and_what_could_have_run() -> None:
    timeline = simulate(one_f_one_b(Shape(1, 4, 4)), Profile.uniform(link=0.5))
    assert told(timeline, "0.3") == [
        (0, 4, "INPUT", "3F0.0", "2F0.0", ""),
        (4, 4.5, "TRANSFER", "3F0.0", "2SEND_F0.0@0.3", ""),
        (10.5, 11, "INPUT", "3F0.2", "2F0.2", ""),
        (11, 11.5, "TRANSFER", "3F0.2", "2SEND_F0.2@0.3", ""),
        (14.5, 15, "INPUT", "3F0.3", "2F0.3", ""),
        (15, 15.5, "TRANSFER", "3F0.3", "2SEND_F0.3@0.3", ""),
        (18.5, 26, "NOTHING_LEFT", "", "", ""),
    ]
    assert told(timeline, "0.2")[2] == (5, 8, "ORDER", "2B0.0", "3B0.0", "2F0.2")


@pytest.mark.filterwarnings("ignore::recycle.ScheduleWarning")
def test_nothing_to_time_has_no_gaps() -> None:
    assert len(simulate(Schedule.from_text(Shape(1, 1, 1), {}, failed=["0.0"])).gaps()) == 0
    assert len(simulate(one_f_one_b(Shape(2, 2, 2)), Profile(0.0, 0.0, 0.0)).gaps([9, 9])) == 0


def test_the_longest_gaps_of_a_cause_come_longest_first() -> None:
    longest = simulate(one_f_one_b(Shape(1, 4, 8))).gaps().longest(GapCause.ORDER, 2)
    assert [(str(gap.worker), gap.end - gap.start) for gap in longest] == [("0.0", 6), ("0.1", 4)]


@bounded
@given(seeds)
def test_gaps_and_instructions_of_a_worker_tile_the_makespan(seed: int) -> None:
    timeline, limits, byte_limit = drawn(seed)
    c, gaps = timeline.schedule.columns, timeline.gaps(limits, byte_limit)
    for w, worker in enumerate(timeline.schedule.shape.workers()):
        if worker in timeline.schedule.failed:
            assert not (gaps.worker == w).any()
            continue
        mine = np.flatnonzero(gaps.worker == w)
        rows = [row for row in range(int(c.offsets[w]), int(c.offsets[w + 1])) if not is_transfer(timeline, row)]
        spans = [(gaps.start[i], gaps.end[i]) for i in mine] + [(timeline.start[r], timeline.end[r]) for r in rows]
        spans = sorted(span for span in spans if span[1] > span[0])
        assert [begin for begin, _ in spans] + [timeline.makespan] == [0, *(end for _, end in spans)]
    assert gaps.seconds.sum(axis=1) == pytest.approx([bubble or 0.0 for bubble in timeline.bubble])


@bounded
@given(seeds)
def test_the_cause_of_every_gap_is_what_its_definition_says(seed: int) -> None:
    timeline, limits, byte_limit = drawn(seed)
    schedule = timeline.schedule
    there = values_there(timeline)
    made = {value: min(time for (_, v), time in there.items() if v == value) for _, value in there}
    for gap in timeline.gaps(limits, byte_limit):
        if gap.cause == GapCause.NOTHING_LEFT or gap.end - gap.start < 1e-6:
            continue
        now = (gap.start + gap.end) / 2
        ends = schedule.instruction(gap.row)
        fitting, exceeding = [], []
        for row, candidate in computes_after(timeline, gap):
            if all(there[gap.worker, value] <= now for value in needs(candidate, schedule.shape.stages)):
                fits = moved_fits(timeline, gap, row, limits, byte_limit)
                (fitting if fits else exceeding).append(row)
        if fitting:
            assert (gap.cause, gap.ready in fitting) == (GapCause.ORDER, True)
        elif exceeding:
            assert (gap.cause, gap.ready in exceeding) == (GapCause.MEMORY, True)
        elif isinstance(ends, ReduceGradients | OptimizerStep):
            assert (gap.cause, gap.ready) == (GapCause.REDUCE, -1)
        else:
            wanted = needs(ends, schedule.shape.stages)
            is_made = all(made[value] <= now for value in wanted)
            assert gap.cause == (GapCause.TRANSFER if is_made else GapCause.INPUT)
            waited_for = schedule.instruction(gap.waits_for)
            assert isinstance(waited_for, Transfer) == is_made
            if is_made:
                assert timeline.end[gap.waits_for] == pytest.approx(timeline.start[gap.row])


def drawn(seed: int) -> tuple[Timeline, list[float] | None, float | None]:
    """A timeline with no limit, or with one that its order just keeps to."""
    rng = random.Random(seed)
    schedule = random_schedule(rng)
    timeline = simulate(schedule, random_profile(rng, schedule), serialised=rng.random() < 0.2)
    peaks = np.array([peak or 0.0 for peak in timeline.peak_activations]).reshape(-1, schedule.shape.ranks).max(axis=0)
    limits = [peak + rng.choice([0, 0, 1]) for peak in peaks.tolist()] if rng.random() < 0.6 else None
    byte_limit = max(peak or 0.0 for peak in timeline.peak_bytes) if rng.random() < 0.4 else None
    return timeline, limits, byte_limit


def is_transfer(timeline: Timeline, row: int) -> bool:
    return isinstance(timeline.schedule.instruction(row), Transfer)


def pieces(instruction: Instruction) -> tuple[Instruction, ...]:
    is_pair = isinstance(instruction, OverlappedPair)
    return (instruction.forward, instruction.backward) if is_pair else (instruction,)  # type: ignore[attr-defined]


def values_there(timeline: Timeline) -> dict[tuple[Worker, Value], float]:
    """When each value is on each worker that makes or receives it."""
    schedule = timeline.schedule
    there = {}
    for row in range(len(timeline.end)):
        worker, end = schedule.position(row)[0], float(timeline.end[row])
        for instruction in pieces(schedule.instruction(row)):
            if isinstance(instruction, Compute):
                there.update({(worker, value): end for value in produced(instruction)})
            elif str(instruction).find("RECV") > 0:
                (value,) = needs(instruction, schedule.shape.stages)
                there[worker, value] = end
    return there


def computes_after(timeline: Timeline, gap: Gap) -> Iterator[tuple[int, Instruction]]:
    """The computes of the gap's worker that stand behind the gap."""
    w = timeline.schedule.shape.worker_index(gap.worker)
    for row in range(gap.row, int(timeline.schedule.columns.offsets[w + 1])):
        instruction = timeline.schedule.instruction(row)
        if isinstance(instruction, Compute | OverlappedPair):
            yield row, instruction


def moved_fits(timeline: Timeline, gap: Gap, row: int, limits: list[float] | None, byte_limit: float | None) -> bool:
    """Whether the gap's worker keeps to the limits when `row` moves into the gap; what does not grow always does."""
    schedule, profile, stages = timeline.schedule, timeline.profile, timeline.schedule.shape.stages
    if not isinstance(pieces(schedule.instruction(row))[0], Forward):
        return True
    w = schedule.shape.worker_index(gap.worker)
    order = [*range(int(schedule.columns.offsets[w]), int(schedule.columns.offsets[w + 1]))]
    order.remove(row)
    order.insert(order.index(gap.row), row)
    ones, bytes_of = [1.0] * stages, profile.per_stage("activation", stages)
    fixed = sum(profile.per_stage("static", stages)[s] for s in schedule.stages_of(gap.worker))
    program = [schedule.instruction(r) for r in order]
    fits = limits is None or peak(program, profile, ones) <= limits[gap.worker.rank] + 1e-6
    return fits and (byte_limit is None or fixed + peak(program, profile, bytes_of) <= byte_limit + 1e-6)


def peak(program: list[Instruction], profile: Profile, weights: list[float]) -> float:
    """Most that a program holds at once."""
    held = most = 0.0
    for instruction in program:
        parts = [piece for piece in pieces(instruction) if isinstance(piece, Compute)]
        held += sum(weights[piece.stage] for piece in parts if isinstance(piece, Forward))
        most = max(most, held)
        share = {Backward: 1.0, BackwardInput: 1 - profile.weight_stash, BackwardWeight: profile.weight_stash}
        held -= sum(share.get(type(piece), 0.0) * weights[piece.stage] for piece in parts)
    return most
