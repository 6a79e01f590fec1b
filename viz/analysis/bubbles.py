"""Time of workers: inputs of instructions, causes of bubbles, statistics of a time range, and work for dead workers.

A value from another worker is listed with its producer and its transfer; the receive between them takes no time. The
inputs of a reduce or step from all workers are listed individually, latest first.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from recycle.ir.columns import Columns, Flags, Floats, Ints, Rows
from recycle.ir.dependencies import Cause
from recycle.ir.event_graph import event_edges
from recycle.ir.gaps import Gap, GapCause, Gaps
from recycle.ir.instruction import AsyncInstruction, Compute, HostCopy, OverlappedPair, is_kind
from recycle.ir.kinds import KIND_CLASSES
from recycle.ir.memory import activation_changes
from recycle.ir.simulate import TOLERANCE, Timeline
from recycle.ir.trace import away_from
from recycle.job.shape import Worker
from viz.numbers import PLAN_UNIT, TimeUnit, short

MAX_LISTED = 12
"""Inputs or outputs that are listed individually."""


class Input(NamedTuple):
    """An input of an instruction.

    Attributes:
        row: the producing instruction; for ORDER and LANE the previous one in the worker's program or on the lane.
        send: the send that brought the input from another worker, else -1.
        slack: seconds from the arrival to the start of the consumer.
    """

    row: int
    cause: Cause
    produced: float
    send: int
    arrived: float
    slack: float


class DependencyIndex:
    """Dependencies of one timeline; the first query lists the graph's edges."""

    def __init__(self, timeline: Timeline) -> None:
        self.timeline = timeline

    @cached_property
    def _edges(self) -> tuple[Ints, Ints, npt.NDArray[np.uint8]]:
        """Edges as (source, target, cause) in narrow types."""
        source, target, cause = event_edges(self.timeline.schedule.columns, self.timeline.dependencies)
        return source.astype(np.int32), target.astype(np.int32), cause.astype(np.uint8)

    def inputs(self, row: int, limit: int = MAX_LISTED) -> tuple[list[Input], int]:
        """Return (at most `limit` inputs of `row`, last arrival first; number of all inputs)."""
        timeline, rows = self.timeline, self.timeline.dependencies.rows
        sources, causes = self._neighbours(row, 0)
        is_join = sources >= rows
        for join in sources[is_join].tolist():
            members, _ = self._neighbours(join, 0)
            sources, causes = np.append(sources, members), np.append(causes, np.full(len(members), Cause.REDUCE))
        is_row = sources < rows
        sources, causes = sources[is_row], causes[is_row]
        # An edge of a value says more than one of the order.
        is_distinct = (causes != Cause.ORDER) | ~np.isin(sources, sources[causes != Cause.ORDER])
        sources, causes = sources[is_distinct], causes[is_distinct]
        latest = np.argsort(-timeline.end[sources], kind="stable")[:limit]
        return [self._input(row, int(sources[i]), Cause(int(causes[i]))) for i in latest.tolist()], len(sources)

    def _input(self, row: int, source: int, cause: Cause) -> Input:
        timeline, send = self.timeline, int(self.timeline.dependencies.sends[source])
        arrived = float(timeline.end[source])
        slack = max(0.0, float(timeline.start[row]) - arrived)
        if send < 0:
            return Input(source, cause, arrived, -1, arrived, slack)
        producers, causes = self._neighbours(send, 0)
        producer = next((int(m) for m, reason in zip(producers, causes, strict=True) if reason == Cause.DATA), send)
        return Input(producer, cause, float(timeline.end[producer]), send, arrived, slack)

    def outputs(self, row: int, limit: int = MAX_LISTED) -> list[int]:
        """Return the consumers of `row`'s results, on this worker and, through transfers, on others; by start."""
        rows, sends = self.timeline.dependencies.rows, self.timeline.dependencies.sends
        consumers: list[int] = []
        queue = [row]
        while queue:
            for target, reason in zip(*self._neighbours(queue.pop(), 1), strict=True):
                if reason in (Cause.ORDER, Cause.LANE) or target >= rows:
                    continue
                receives = np.flatnonzero(sends == target).tolist()
                queue += receives
                if not receives and sends[target] < 0:
                    consumers.append(int(target))
        return sorted(consumers, key=lambda consumer: (self.timeline.start[consumer], consumer))[:limit]

    def _neighbours(self, node: int, end: int) -> tuple[Rows, Rows]:
        matching = np.flatnonzero(self._edges[1 - end] == node)
        return self._edges[end][matching].astype(np.int64), self._edges[2][matching].astype(np.int64)

    def reason(self, row: int, unit: TimeUnit = PLAN_UNIT) -> str:
        """Explain the start of `row` by the last of its inputs to arrive; times in `unit`."""
        needs, _ = self.inputs(row, limit=1)
        if not needs:
            return "It has no inputs: it starts with the iteration."
        need, tolerance = needs[0], self.timeline.makespan * TOLERANCE
        text = "Waited for " if need.slack <= tolerance else "Needs "
        text += instruction_name(self.timeline, need.row)
        text += f" ({CAUSE_TEXTS[need.cause]}), ended {unit.text(need.produced)}"
        if need.send >= 0:
            text += f", arrived {unit.text(need.arrived)}"
        return text if need.slack <= tolerance else f"{text}, slack {unit.amount(need.slack)}"


def instruction_name(timeline: Timeline, row: int) -> str:
    """Return the instruction of a row and its worker: `2F1.5 on 1.2`."""
    return f"{timeline.schedule.instruction(row)} on {timeline.schedule.position(row)[0]}"


CAUSE_TEXTS = {
    Cause.DATA: "its value",
    Cause.TRANSFER: "its transfer",
    Cause.REDUCE: "gradients or arrival of all hosts",
    Cause.STEP: "the reduce",
    Cause.ORDER: "before it in the program",
    Cause.LANE: "before it on the link",
}


IdlePart = GapCause | Literal["warm-up"]
"""A cause, or any cause before a worker's first instruction."""
WARM_UP: Literal["warm-up"] = "warm-up"
IDLE_TITLES: dict[IdlePart, str] = {
    WARM_UP: "warm-up",
    GapCause.INPUT: "waits for a value",
    GapCause.ORDER: "program order",
    GapCause.MEMORY: "memory limit",
    GapCause.TRANSFER: "waits for a transfer",
    GapCause.REDUCE: "waits for a reduce or step",
    GapCause.NOTHING_LEFT: "no work left",
}


class Bubbles:
    """The bubbles of one timeline; `limits` as in `Timeline.gaps`."""

    def __init__(self, timeline: Timeline, limits: Sequence[float] | None = None, chunks: int = 1) -> None:
        self.timeline, self.limits, self.chunks = timeline, limits, chunks
        self.gaps = timeline.gaps(limits)

    @cached_property
    def _added(self) -> Floats:
        return activation_changes(self.timeline.schedule, self.timeline.profile, in_bytes=False)[0]

    def _cost(self, gap: Gap) -> str:
        """What the ready instruction of a gap would hold if it ran there, of the limit."""
        added = float(self._added[gap.ready]) / self.chunks
        limit = f", limit {short(self.limits[gap.worker.rank] / self.chunks)}" if self.limits and added else ""
        return f"here +{short(added)} activation{limit}" if added else "here no more memory"

    def in_interval(self, worker: int, begin: float, end: float) -> list[Gap]:
        gaps = self.gaps
        return list(gaps.at(np.flatnonzero((gaps.worker == worker) & (gaps.end > begin) & (gaps.start < end))))

    def reason(self, gap: Gap, unit: TimeUnit = PLAN_UNIT) -> str:
        """Explain a bubble in a sentence; times in `unit`."""
        timeline, schedule = self.timeline, self.timeline.schedule
        idle = f"Idle for {unit.amount(gap.end - gap.start)}"
        if gap.cause == GapCause.NOTHING_LEFT:
            return f"{idle}: its program has ended; the iteration ends at {unit.text(gap.end)}."
        following = schedule.instruction(gap.row)
        if gap.cause == GapCause.MEMORY:
            held_back = f"{schedule.instruction(gap.ready)} ({self._cost(gap)})"
            return f"{idle}: the memory limit holds back {held_back}; next is {following}."
        if gap.cause == GapCause.ORDER and gap.ready == gap.row:
            return f"{idle}: {following} had all its inputs but had not started."
        if gap.cause == GapCause.ORDER:
            ready = f"{schedule.instruction(gap.ready)} could run ({self._cost(gap)})"
            return f"{idle}: {ready}, the program's order puts {following} first."
        if gap.waits_for < 0:
            return f"{idle} before {following}."
        awaited = instruction_name(timeline, gap.waits_for)
        if gap.cause == GapCause.TRANSFER:
            return f"{idle}: {following} waits for {awaited}: the value exists but has not arrived."
        if gap.cause == GapCause.REDUCE:
            comes_last = KIND_CLASSES[schedule.columns.kind[gap.row]].row.follows is not None
            is_commit = comes_last and schedule.optimizer == "barrier"
            awaited_text = "the barrier, last reached by" if is_commit else "the last of all hosts,"
            return f"{idle}: {following} waits for {awaited_text} {awaited}."
        end_text = unit.text(float(timeline.end[gap.waits_for]))
        return f"{idle}: {following} waits for {awaited}, which ends at {end_text}."


class RangeStatistics(NamedTuple):
    """Activities of the live workers in a time range; work and bubbles add up to all of their time.

    Attributes:
        operations: instructions, transfers excluded, that overlap the range.
        work: kind -> seconds.
        rerouted: seconds of `work` spent on micro-batches of other pipelines.
        idle: part -> (seconds, its longest gap).
    """

    begin: float
    end: float
    workers: int
    operations: int
    work: dict[int, float]
    rerouted: float
    idle: dict[IdlePart, tuple[float, Gap]]

    def share(self, seconds: float) -> float:
        total = (self.end - self.begin) * self.workers
        return seconds / total if total else 0.0


def range_statistics(timeline: Timeline, gaps: Gaps, begin: float, end: float) -> RangeStatistics:
    schedule, c = timeline.schedule, timeline.schedule.columns
    begin, end = max(0.0, min(begin, end)), min(timeline.makespan, max(begin, end))
    end = max(begin, end)
    is_live = np.array([worker not in schedule.failed for worker in schedule.shape.workers()])
    inside = np.clip(timeline.end, begin, end) - np.clip(timeline.start, begin, end)
    inside = np.where(is_live[c.worker], inside, 0.0)
    is_transfer = is_kind(c.kind, AsyncInstruction)
    seconds = np.bincount(c.kind[~is_transfer], weights=inside[~is_transfer], minlength=len(KIND_CLASSES))
    lost = np.clip(gaps.end, begin, end) - np.clip(gaps.start, begin, end)
    lost = np.where(is_live[gaps.worker], lost, 0.0)
    is_warm_up = _before_first(c)[gaps.row] & (gaps.row >= 0)
    idle: dict[IdlePart, tuple[float, Gap]] = {}
    for part in IDLE_TITLES:
        places = np.flatnonzero((is_warm_up if part == WARM_UP else (gaps.cause == part) & ~is_warm_up) & (lost > 0))
        if len(places):
            (longest,) = gaps.at(places[[int(lost[places].argmax())]])
            idle[part] = float(lost[places].sum()), longest
    is_rerouted = away_from(c, c.worker // schedule.shape.ranks)
    return RangeStatistics(
        begin,
        end,
        int(is_live.sum()),
        int(((inside > 0) & ~is_transfer).sum()),
        {kind: float(seconds[kind]) for kind in range(len(KIND_CLASSES)) if seconds[kind] > 0},
        float(inside[is_rerouted & ~is_transfer].sum()),
        idle,
    )


def _before_first(c: Columns) -> Flags:
    """Whether each row is the first instruction of its worker, transfers excluded."""
    rows = np.flatnonzero(~is_kind(c.kind, AsyncInstruction))
    is_first = np.zeros(len(c), dtype=np.bool_)
    is_first[rows[np.unique(c.worker[rows], return_index=True)[1]]] = True
    return is_first


class Rerouting(NamedTuple):
    """What a worker runs for another pipeline's worker of its position.

    Attributes:
        rows: of the timeline, by start.
        share: of the work of the host.
    """

    home: Worker
    host: Worker
    micro_batches: list[int]
    rows: Rows
    seconds: float
    share: float


def reroutings(timeline: Timeline) -> list[Rerouting]:
    """Return the re-routed work by home worker and host."""
    c, shape = timeline.schedule.columns, timeline.schedule.shape
    is_work = is_kind(c.kind, (Compute, OverlappedPair)) & ~is_kind(c.kind, HostCopy)
    is_work &= away_from(c, c.worker // shape.ranks)
    rows = np.flatnonzero(is_work)
    own_pipeline, rank = np.divmod(c.worker[rows].astype(np.int64), shape.ranks)
    home = np.where(c.pipeline[rows] == own_pipeline, c.pipeline2[rows], c.pipeline[rows]) * shape.ranks + rank
    seconds, result = timeline.end - timeline.start, []
    for away, host in sorted(set(zip(home.tolist(), c.worker[rows].tolist(), strict=True))):
        own = rows[(home == away) & (c.worker[rows] == host)]
        own = own[np.argsort(timeline.start[own], kind="stable")]
        spent, busy = float(seconds[own].sum()), timeline.busy[host] or 0.0
        micro_batches, home_worker = sorted(set(c.index[own].tolist())), shape.worker_at(away)
        result.append(
            Rerouting(home_worker, shape.worker_at(host), micro_batches, own, spent, spent / busy if busy else 0.0)
        )
    return result
