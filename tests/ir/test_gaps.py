"""Gaps tile the makespan and have the cause that the definition states; slack; executed iterations."""

import random
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from recycle import Profile, Shape, Timeline, Worker, lower, simulate
from recycle.ir.dependencies import Value, needs, produced
from recycle.ir.event_graph import earliest, event_graph
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
    is_kind,
)
from recycle.ir.simulate import slack
from recycle.ir.trace import executed_timeline
from recycle.runs import logs
from tests.ir.random_schedules import random_profile, random_schedule

bounded = settings(max_examples=60)
seeds = st.integers(0, 10**6)


@bounded
@given(seeds)
def test_gaps_and_instructions_of_a_worker_tile_the_makespan(seed):
    timeline, limits, byte_limit = drawn(seed)
    c, gaps = timeline.schedule.columns, timeline.gaps(limits, byte_limit)
    for w, worker in enumerate(timeline.schedule.shape.workers()):
        if worker in timeline.schedule.failed:
            assert not (gaps.worker == w).any()
            continue
        own = np.flatnonzero(gaps.worker == w)
        rows = [row for row in range(int(c.offsets[w]), int(c.offsets[w + 1])) if not is_transfer(timeline, row)]
        spans = [(gaps.start[i], gaps.end[i]) for i in own] + [(timeline.start[r], timeline.end[r]) for r in rows]
        spans = sorted(span for span in spans if span[1] > span[0])
        assert [begin for begin, _ in spans] + [timeline.makespan] == [0, *(end for _, end in spans)]
    assert gaps.seconds.sum(axis=1) == pytest.approx([bubble or 0.0 for bubble in timeline.bubble])


@bounded
@given(seeds)
def test_every_gap_has_the_cause_of_its_definition(seed):
    timeline, limits, byte_limit = drawn(seed)
    schedule = timeline.schedule
    arrivals = arrivals_of(timeline)
    made_at = {value: min(time for (_, v), time in arrivals.items() if v == value) for _, value in arrivals}
    for gap in timeline.gaps(limits, byte_limit):
        if gap.cause == GapCause.NOTHING_LEFT or gap.end - gap.start < 1e-6:
            continue
        now = (gap.start + gap.end) / 2
        ends = schedule.instruction(gap.row)
        fitting, exceeding = [], []
        for row, candidate in computes_after(timeline, gap):
            if all(arrivals[gap.worker, value] <= now for value in needs(candidate, schedule.shape.stages)):
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
            is_made = all(made_at[value] <= now for value in wanted)
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
    return (instruction.forward, instruction.backward) if is_pair else (instruction,)


def arrivals_of(timeline: Timeline) -> dict[tuple[Worker, Value], float]:
    """Return when each value is on each worker that produces or receives it."""
    schedule = timeline.schedule
    arrivals = {}
    for row in range(len(timeline.end)):
        worker, end = schedule.position(row)[0], float(timeline.end[row])
        for instruction in pieces(schedule.instruction(row)):
            if isinstance(instruction, Compute):
                arrivals.update({(worker, value): end for value in produced(instruction)})
            elif str(instruction).find("RECV") > 0:
                (value,) = needs(instruction, schedule.shape.stages)
                arrivals[worker, value] = end
    return arrivals


def computes_after(timeline: Timeline, gap: Gap) -> Iterator[tuple[int, Instruction]]:
    """Yield the computes of the gap's worker after the gap."""
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


@settings(max_examples=40)
@given(st.integers(0, 10**6))
def test_a_delay_within_the_slack_costs_nothing_and_more_costs_the_excess(seed):
    rng = random.Random(seed)
    schedule = random_schedule(rng)
    timeline = simulate(schedule, random_profile(rng, schedule))
    free = slack(timeline)
    graph = event_graph(timeline.schedule)
    seconds = np.zeros(graph.dependencies.nodes)
    seconds[: len(free)] = timeline.end - timeline.start
    for row in rng.sample(range(len(free)), min(5, len(free))):
        for later, expected in ((free[row], 0.0), (free[row] + 1.0, 1.0)):
            release = np.zeros(len(seconds))
            release[row] = timeline.start[row] + later
            start, _ = earliest(graph.order, graph.offsets, graph.sources, seconds, release)
            assert np.isclose((start + seconds).max() - timeline.end.max(), expected, atol=1e-9)


SHAPE = Shape(pipelines=2, ranks=3, micro_batches=3)
PROFILE = Profile.uniform(link=0.25)


@pytest.fixture
def record(tmp_path):
    """Writes a timeline as an executor would, receives announced when the worker comes to them, and reads it back."""

    def write(timeline, shift):
        schedule = timeline.schedule
        for w, worker in enumerate(SHAPE.workers()):
            late, now, ran = 100.0 + shift.get(str(worker), 0.0), 0.0, []
            for row in range(int(schedule.columns.offsets[w]), int(schedule.columns.offsets[w + 1])):
                instruction = schedule.instruction(row)
                start, end = timeline.start[row], timeline.end[row]
                if "RECV" in str(instruction):
                    start = end = now
                if "SEND" in str(instruction):
                    end = start
                ran.append((instruction, late + start, late + end))
                now = max(now, end)
            logs.append_iteration(logs.log_path(tmp_path, worker), 0, 0, worker, ran)
        return logs.read_logs(tmp_path, SHAPE).window(0, 0)

    return write


def test_an_iteration_that_ran_as_planned_has_the_planned_times_and_gaps(record):
    planned = simulate(lower(one_f_one_b(SHAPE)), PROFILE)
    ran = executed_timeline(record(planned, {}), PROFILE)
    assert ran.schedule == planned.schedule
    assert ran.makespan == pytest.approx(planned.makespan)
    waiting = planned.gaps().seconds
    executed = ran.gaps().seconds
    assert executed == pytest.approx(waiting)
    assert (ran.clocks.differed, ran.clocks.uncertainty) == (False, pytest.approx(0.25))


@pytest.mark.parametrize("seed", range(4))
def test_clocks_that_differ_are_aligned_to_the_shortest_transfer(record, seed):
    rng, planned = random.Random(seed), simulate(lower(one_f_one_b(SHAPE)), PROFILE)
    shift = {str(worker): rng.uniform(-50.0, 50.0) for worker in SHAPE.workers()}
    ran = executed_timeline(record(planned, shift), PROFILE)
    clocks = ran.clocks
    assert (clocks.differed, clocks.conflict) == (True, "")
    shifts = np.array(list(shift.values())) + clocks.shift
    assert np.ptp(shifts) < 0.25 < clocks.uncertainty
    work = ~is_kind(planned.schedule.columns.kind, Transfer)
    assert ran.start[work] == pytest.approx(planned.start[work], abs=0.25)
    assert ran.makespan == pytest.approx(planned.makespan, abs=0.25)


def test_times_that_no_shift_makes_possible_are_a_conflict(record):
    trace = record(simulate(lower(one_f_one_b(SHAPE)), PROFILE), {})
    row = next(row for row in range(len(trace)) if str(trace.instruction(row)) == "2F1.2")
    start = trace.start.copy()
    start[row] -= 5.0
    clocks = executed_timeline(replace(trace, start=start), PROFILE).clocks
    assert clocks.conflict.startswith("2F1.2 on 1.2 began 4.75 s before 1SEND_F1.2")
    assert not clocks.shift.any()
