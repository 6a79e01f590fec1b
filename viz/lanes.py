"""LaneTable: a planned or executed timeline as columns, for all renderers.

A planned table has its timeline's times; an executed one counts from its first start, and keeps that origin.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import IntFlag
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from recycle.ir.columns import Columns, Flags, Floats, Rows
from recycle.ir.event_graph import EventGraph, durations, earliest
from recycle.ir.instruction import AsyncInstruction, Instruction, OverlappedPair, is_kind
from recycle.ir.schedule import Schedule
from recycle.ir.simulate import Timeline
from recycle.ir.trace import Trace, away_from, executed_schedule
from recycle.job.profile import Profile
from recycle.job.shape import Shape, Worker

Unsigned = npt.NDArray[np.unsignedinteger[Any]]
NO_MICRO_BATCH = np.uint32(0xFFFFFFFF)
NO_PIPELINE = np.uint16(0xFFFF)


class Flag(IntFlag):
    """Bits of the `flags` column."""

    REROUTED = 1
    CRITICAL = 2
    VIOLATION = 4


class Marks(NamedTuple):
    """Rows of a lowered schedule that break a rule, and further rows of findings; drawn even if they take no time."""

    violations: Sequence[int] = ()
    involved: Sequence[int] = ()


NO_MARKS = Marks()


@dataclass(frozen=True, eq=False)
class LaneTable:
    """Operations by lane (CSR), sorted by start.

    Attributes:
        workers: worker of each lane, by its role in the plan.
        labels: text of each lane: its worker, the process if it has another name, and the units of a repartitioned
            model.
        offsets: operations of lane i are `offsets[i]` to `offsets[i + 1]`.
        start, end: time from the origin, float64.
        kind: number of the kind of instruction, uint8.
        micro_batch: index in its home pipeline, uint32; NO_MICRO_BATCH for reduce and step.
        stage: uint16.
        pipeline: home of the micro-batch, uint16; NO_PIPELINE for reduce and step.
        instruction_id: row in the source schedule or trace, uint32.
        instruction_of: instruction id -> the instruction.
        origin: time 0 in seconds since the start of the run; 0 for a plan.
        unit: "s" for times known to be seconds, "" for times in the profile's unit.
        speed: worker -> factor on its times, of slow and fast workers.
        weight_share: the weight half's share of a whole backward, for drawing both halves.
        paired: (pipeline, micro-batch) of the backward of overlapped pairs, for each operation, zeros elsewhere; None
            in a table without pairs.
        halt: time at which a deadlocked order stops; operations from then on never run. None if everything runs.
    """

    shape: Shape
    workers: tuple[Worker, ...]
    labels: tuple[str, ...]
    failed: Flags
    offsets: Rows
    start: Floats
    end: Floats
    kind: npt.NDArray[np.uint8]
    micro_batch: Unsigned
    stage: Unsigned
    pipeline: Unsigned
    flags: Unsigned
    instruction_id: Unsigned
    instruction_of: Callable[[int], Instruction]
    origin: float = 0.0
    unit: Literal["s", ""] = ""
    weight_share: float = 0.5
    halt: float | None = None
    speed: Mapping[str, float] = field(default_factory=dict)
    paired: tuple[Unsigned, Unsigned] | None = None

    def __len__(self) -> int:
        return len(self.start)

    @property
    def lanes(self) -> int:
        return len(self.workers)

    @property
    def lane(self) -> Rows:
        """Lane of each operation."""
        return np.repeat(np.arange(self.lanes), np.diff(self.offsets))

    @property
    def span(self) -> float:
        """Last end; time 0 is the first start."""
        return float(self.end.max()) if len(self) else 0.0

    @property
    def chunks(self) -> int:
        """Chunks of the model per worker; 1 for a repartitioned model, whose workers may host any number of stages."""
        return 1 if self.shape.cut else self.shape.chunks

    @property
    def chunk(self) -> Unsigned:
        """Chunk of each operation: stage s is in chunk s // P, however chunks are placed."""
        return self.stage // np.uint16(self.shape.ranks) if self.chunks > 1 else np.zeros_like(self.stage)

    def lane_of(self, operation: int) -> int:
        return int(np.searchsorted(self.offsets, operation, side="right")) - 1

    def operation_of(self, row: int) -> int:
        """Return the operation with an instruction id; -1 if it is not drawn."""
        return next(iter(np.flatnonzero(self.instruction_id == row).tolist()), -1)

    def instruction(self, operation: int) -> Instruction:
        return self.instruction_of(int(self.instruction_id[operation]))

    def has(self, flag: Flag) -> Flags:
        return np.asarray(self.flags & np.uint8(flag), dtype=np.bool_)

    @classmethod
    def from_timeline(
        cls,
        timeline: Timeline,
        unit: Literal["s", ""] = "",
        *,
        process_of: Mapping[Worker, Worker] = {},
        marks: Marks = NO_MARKS,
    ) -> LaneTable:
        """Build the lanes of a planned iteration.

        Args:
            process_of: role -> process with that role, where the names differ.
        """
        times = timeline.start, timeline.end
        table = cls._from_schedule(timeline.schedule, *times, timeline.profile, process_of, marks, unit=unit)
        return table.with_critical_path(timeline)

    def with_critical_path(self, timeline: Timeline) -> LaneTable:
        """Return the table, of a schedule with this timeline, with flags for its critical path only."""
        is_critical = np.zeros(len(timeline.start), dtype=np.uint8)
        is_critical[timeline.critical_path] = Flag.CRITICAL
        return replace(self, flags=self.flags & ~np.uint8(Flag.CRITICAL) | is_critical[self.instruction_id])

    def with_times_of(self, timeline: Timeline) -> LaneTable:
        """Return the table of the same schedule with other times; quick if the order of operations stays the same."""
        rows, columns = self.instruction_id, timeline.schedule.columns
        start, end, worker = timeline.start[rows], timeline.end[rows], columns.worker[rows]
        is_drawn = ~_transfers(columns) | (timeline.end > timeline.start)
        instants = rows[self.end <= self.start]
        is_drawn[instants] = True
        if np.count_nonzero(is_drawn) != len(rows) or not is_drawn[rows].all() or not _is_sorted(end, start, worker):
            marks = Marks(rows[self.has(Flag.VIOLATION)].tolist(), instants.tolist())
            return replace(LaneTable.from_timeline(timeline, self.unit, marks=marks), labels=self.labels)
        share, speed = weight_share(timeline.profile, timeline.schedule.shape), timeline.profile.speed
        table = replace(self, start=start, end=end, weight_share=share, speed=speed)
        return table.with_critical_path(timeline)

    @classmethod
    def until_deadlock(cls, graph: EventGraph, profile: Profile, marks: Marks = NO_MARKS) -> LaneTable:
        """Build the lanes of an order that deadlocks: timed until `halt`, then the programs' rests back to back."""
        columns, nodes = graph.schedule.columns, graph.dependencies.nodes
        rows = len(columns)
        seconds = np.zeros(nodes)
        seconds[:rows] = durations(graph.schedule, profile)
        start, _ = earliest(graph.order, graph.offsets, graph.sources, seconds, np.zeros(nodes))
        is_run = np.zeros(nodes, dtype=np.bool_)
        is_run[graph.order] = True
        start, seconds, is_run = start[:rows], seconds[:rows], is_run[:rows]
        halt = float((start + seconds)[is_run].max(initial=0.0))
        stuck_seconds = np.where(is_run | _transfers(columns), 0.0, seconds)
        total = np.concatenate([[0.0], np.cumsum(stuck_seconds)])
        never = halt + total[:-1] - total[columns.offsets[columns.worker]]
        start, end = np.where(is_run, start, never), np.where(is_run, start + seconds, never + stuck_seconds)
        return cls._from_schedule(graph.schedule, start, end, profile, {}, marks, halt=halt)

    @classmethod
    def _from_schedule(
        cls,
        schedule: Schedule,
        start: Floats,
        end: Floats,
        profile: Profile,
        process_of: Mapping[Worker, Worker],
        marks: Marks = NO_MARKS,
        **attributes: Any,
    ) -> LaneTable:
        shape, columns = schedule.shape, schedule.columns
        flags = away_from(columns, columns.worker // shape.ranks) * int(Flag.REROUTED)
        flags[list(marks.violations)] |= Flag.VIOLATION
        labels = []
        for worker in shape.workers():
            process = process_of.get(worker, worker)
            unit_ranges = [f"{begin}\N{EN DASH}{end - 1}" for begin, end in schedule.unit_runs(worker)]
            hosted = f" \N{MIDDLE DOT} {', '.join(unit_ranges)}" if unit_ranges else ""
            labels.append((str(worker) if process == worker else f"{worker} (by {process})") + hosted)
        # Receives, and sends over a free link, take no time and are not drawn without a finding.
        is_drawn = ~_transfers(columns) | (end > start)
        is_drawn[[*marks.violations, *marks.involved]] = True
        drawn = np.flatnonzero(is_drawn)
        keys = end[drawn], start[drawn], columns.worker[drawn]
        rows = drawn if _is_sorted(*keys) else drawn[np.lexsort(keys)]
        counts = np.bincount(columns.worker[rows], minlength=shape.worker_count)
        has_home, pairs = columns.pipeline[rows] >= 0, is_kind(columns.kind[rows], OverlappedPair)
        home, index = (np.where(pairs, column[rows], 0) for column in (columns.pipeline2, columns.index2))
        return cls(
            shape=shape,
            workers=tuple(shape.workers()),
            labels=tuple(labels),
            failed=np.array([worker in schedule.failed for worker in shape.workers()], dtype=np.bool_),
            offsets=np.concatenate([[0], np.cumsum(counts)]).astype(np.int64),
            start=start[rows],
            end=end[rows],
            kind=columns.kind[rows],
            micro_batch=np.where(has_home, columns.index[rows], NO_MICRO_BATCH).astype(np.uint32),
            stage=columns.stage[rows].astype(np.uint16),
            pipeline=np.where(has_home, columns.pipeline[rows], NO_PIPELINE).astype(np.uint16),
            flags=flags[rows].astype(np.uint8),
            instruction_id=rows.astype(np.uint32),
            instruction_of=schedule.instruction,
            weight_share=weight_share(profile, shape),
            speed=profile.speed,
            paired=(home.astype(np.uint16), index.astype(np.uint32)) if pairs.any() else None,
            **attributes,
        )

    @classmethod
    def from_trace(
        cls, trace: Trace, profile: Profile, failed: Collection[Worker] = (), timeline: Timeline | None = None
    ) -> LaneTable:
        """Build the lanes of an executed iteration or evaluation: all rows of `trace`, as `executed_timeline` has them.

        Args:
            failed: processes that are dead in it, or die in it.
            timeline: result of `executed_timeline`, whose clocks agree; None for an evaluation.
        """
        schedule, rows = executed_schedule(trace)
        origin = float(trace.start.min()) if len(trace) else 0.0
        pairs = np.unique(np.stack([trace.role, trace.process]), axis=1).T.tolist()
        process_of = {trace.shape.worker_at(role): trace.shape.worker_at(process) for role, process in pairs}
        start = trace.start[rows] - origin if timeline is None else timeline.start
        end = start + (trace.end - trace.start)[rows]
        table = cls._from_schedule(schedule, start, end, profile, process_of, origin=origin, unit="s")
        is_dead = [process_of.get(worker, worker) in failed for worker in table.workers]
        return replace(table, failed=table.failed | is_dead)


def weight_share(profile: Profile, shape: Shape) -> float:
    """Return the weight half's share of a whole backward over all stages; a half if backwards take no time."""
    halves = [sum(profile.per_stage(name, shape.stages)) for name in ("backward_input", "backward_weight")]
    return halves[1] / sum(halves) if sum(halves) else 0.5


@dataclass(frozen=True)
class Panel:
    """A timeline of a picture.

    Attributes:
        span: length of the time axis, if longer than the table, to compare panels.
        period: time from its start to the next iteration's in steady state, for a bracket.
    """

    title: str
    table: LaneTable
    span: float | None = None
    period: float | None = None


def with_common_span(panels: Sequence[Panel]) -> list[Panel]:
    """Give panels of the same unit a time axis of the same length."""
    longest: dict[str, float] = {}
    for panel in panels:
        longest[panel.table.unit] = max(longest.get(panel.table.unit, 0.0), panel.table.span)
    return [replace(panel, span=longest[panel.table.unit] or None) for panel in panels]


def _is_sorted(end: Floats, start: Floats, worker: npt.NDArray[Any]) -> bool:
    is_later = (start[1:] > start[:-1]) | (start[1:] == start[:-1]) & (end[1:] >= end[:-1])
    return bool(((worker[1:] > worker[:-1]) | (worker[1:] == worker[:-1]) & is_later).all())


def _transfers(columns: Columns) -> Flags:
    return is_kind(columns.kind, AsyncInstruction)
