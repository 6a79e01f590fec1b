"""Gaps: golden causes, exact tiling, and each cause against a slow reading of its definition on random schedules."""

from __future__ import annotations

import random
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recycle import JobError, Profile, Schedule, Shape, Timeline, Worker, check, simulate
from recycle.ir.families import gpipe, one_f_one_b
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
from recycle.ir.values import Value, needs, produced
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


def test_with_the_limits_of_1f1b_memory_is_what_holds_its_forwards_back() -> None:
    timeline = simulate(one_f_one_b(Shape(1, 4, 8)), Profile.uniform(link=0.5))
    free = timeline.gaps().seconds
    held = timeline.gaps([4, 3, 2, 1]).seconds
    assert free[:, GapCause.ORDER].tolist() == held[:, GapCause.MEMORY].tolist() == [11, 6, 3, 0]
    assert not held[:, GapCause.ORDER].any()
    others = [GapCause.INPUT, GapCause.TRANSFER, GapCause.REDUCE, GapCause.NOTHING_LEFT]
    assert free[:, others].tolist() == held[:, others].tolist() == [[4, 2, 0, 0], [5.5, 3, 0, 2.5], [6, 3, 0, 5],
                                                                    [6.5, 3, 0, 7.5]]  # fmt: skip
    assert told(timeline, "0.0", [4, 3, 2, 1])[0] == (4, 13, "MEMORY", "0B0.0", "1B0.0", "0F0.4")


def test_a_limit_in_bytes_counts_what_the_stages_need_anyway() -> None:
    profile = Profile(activation=[10.0, 1.0], static=[100.0, 0.0])
    timeline = simulate(one_f_one_b(Shape(1, 2, 4)), profile)
    lost = {limit: timeline.gaps(byte_limit=limit).seconds[0].tolist() for limit in (120.0, 130.0)}
    assert lost == {120.0: [1, 0, 0, 2, 0, 0], 130.0: [1, 0, 0, 0, 2, 0]}


def test_a_forward_that_fits_in_the_gap_but_not_beside_what_follows_is_held_back_by_memory() -> None:
    """1F0.2 is there before 1F0.1; run first it would be held beside 1F0.0 and 1F0.1."""
    middle = "1F0 1F1 1B0 1F2 1B1 1B2"
    schedule = Schedule.from_text(
        Shape(1, 3, 3),
        {"0.0": "0F0 0F2 0F1 0B0 0B1 0B2", "0.1": middle, "0.2": middle.replace("1F", "2F").replace("1B", "2B")},
    )
    timeline = simulate(schedule)
    assert told(timeline, "0.1", [9, 2, 9])[1] == (2, 3, "MEMORY", "1F0.1", "0F0.1", "1F0.2")
    assert told(timeline, "0.1", [9, 3, 9])[1] == (2, 3, "ORDER", "1F0.1", "0F0.1", "1F0.2")


def test_weight_gradients_left_for_later_are_named_as_what_could_have_run() -> None:
    schedule = Schedule.from_text(Shape(1, 2, 2), {"0.0": "0F0 0F1 0I0 0I1 0W0 0W1", "0.1": "1F0 1I0 1W0 1F1 1I1 1W1"})
    assert told(simulate(schedule), "0.0") == [
        (2, 3, "INPUT", "0I0.0", "1I0.0", ""),
        (4, 6, "ORDER", "0I0.1", "1I0.1", "0W0.0"),
    ]


def test_a_cause_that_changes_inside_a_gap_cuts_it() -> None:
    """1F0.1 arrives while 1B0.0 is waited for, so that it could have run in the rest of the gap."""
    schedule = Schedule.from_text(
        Shape(1, 3, 2), {"0.0": "0F0 0F1 0B0 0B1", "0.1": "1F0 1B0 1F1 1B1", "0.2": "2F0 2B0 2F1 2B1"}
    )
    timeline = simulate(schedule, Profile.uniform(link=1.5))
    assert told(timeline, "0.1", [2, 2, 2])[2:4] == [
        (3.5, 4, "INPUT", "1B0.0", "2B0.0", ""),
        (4, 9.5, "ORDER", "1B0.0", "2B0.0", "1F0.1"),
    ]
    assert [row[2] for row in told(timeline, "0.1", [2, 1, 2])[2:4]] == ["INPUT", "MEMORY"]


def test_a_reduce_waits_for_the_last_peer_and_a_barrier_for_the_last_reduce() -> None:
    schedule = Schedule.from_text(
        Shape(2, 1, 2), {"0.0": "0F0.0 0B0.0", "1.0": "0F1.0 0B1.0 0F1.1 0B1.1 0F0.1 0B0.1"}, optimizer="barrier"
    )
    assert told(simulate(schedule), "0.0") == [(3, 9, "REDUCE", "0REDUCE_GRAD", "0B0.1", "")]
    tail = simulate(gpipe(Shape(1, 2, 1), "barrier"), Profile(reduce=[1.0, 4.0], step=1.0))
    assert told(tail, "0.0") == [
        (1, 4, "INPUT", "0B0.0", "1B0.0", ""),
        (7, 8, "REDUCE", "0STEP", "1REDUCE_GRAD", ""),
    ]
    assert told(tail, "0.1") == [(0, 1, "INPUT", "1F0.0", "0F0.0", "")]


def test_a_worker_without_instructions_has_nothing_left_and_a_failed_one_no_gap() -> None:
    schedule = Schedule.from_text(Shape(3, 1, 1), {"0.0": "0F0.0 0B0.0 0F1.0 0B1.0 0F2.0 0B2.0"}, failed=["1.0"])
    bare = Schedule.from_text(Shape(3, 1, 1), {"0.0": f"{schedule.text()['0.0']} 0REDUCE_GRAD 0STEP"}, failed=["1.0"])
    assert told(simulate(bare), "2.0") == [(0, 9, "NOTHING_LEFT", "", "", "")]
    assert told(simulate(bare), "1.0") == []


@pytest.mark.filterwarnings("ignore::recycle.ScheduleWarning")
def test_nothing_to_time_has_no_gaps() -> None:
    assert len(simulate(Schedule.from_text(Shape(1, 1, 1), {}, failed=["0.0"])).gaps()) == 0
    assert len(simulate(one_f_one_b(Shape(2, 2, 2)), Profile(0.0, 0.0, 0.0)).gaps([9, 9])) == 0


def test_limits_of_another_number_of_ranks_are_refused() -> None:
    with pytest.raises(JobError, match="limits: lists 2 ranks, the schedule has 4"):
        simulate(one_f_one_b(Shape(1, 4, 4))).gaps([1, 2])


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


@pytest.mark.slow
@bounded
@given(seeds)
def test_what_could_run_in_a_gap_keeps_the_schedule_valid_when_moved_there(seed: int) -> None:
    rng = random.Random(seed)
    schedule = random_schedule(rng)
    timeline = simulate(schedule, random_profile(rng, schedule))
    peaks = np.array([peak or 0.0 for peak in timeline.peak_activations]).reshape(-1, schedule.shape.ranks).max(axis=0)
    limits = [max(1.0, peak) for peak in peaks.tolist()]
    for gap in timeline.gaps(limits):
        if gap.cause not in (GapCause.ORDER, GapCause.MEMORY):
            continue
        program = list(schedule.program(gap.worker))
        before, moved = timeline.schedule.instruction(gap.row), timeline.schedule.instruction(gap.ready)
        place = program.index(before) if before in program else len(program)
        program.remove(moved)
        program.insert(place, moved)
        programs = {worker: schedule.program(worker) for worker in schedule.live} | {gap.worker: tuple(program)}
        changed = Schedule.build(
            schedule.shape,
            programs,
            placement=schedule.placement,
            failed=schedule.failed,
            optimizer=schedule.optimizer,
        )
        expected = [] if gap.cause == GapCause.ORDER else ["activation-limit"]
        assert [f.rule for f in check(changed, limits=limits, profile=timeline.profile)] == expected


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
