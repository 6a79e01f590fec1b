"""Time of workers: inputs of an instruction with slack, causes of bubbles in words, and statistics of a time range.

A value from another worker is listed with its producer and its transfer; the receive between them takes no time. The
inputs of a reduce or step from all workers are listed individually, latest first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from recycle.ir.columns import Ints, Rows
from recycle.ir.dependencies import Cause
from recycle.ir.event_graph import event_edges
from recycle.ir.gaps import Gap, GapCause, Gaps
from recycle.ir.instruction import Beside, is_kind
from recycle.ir.kinds import KIND_CLASSES
from recycle.ir.simulate import TOLERANCE, Timeline
from recycle.ir.trace import away_from
from viz.numbers import PLAN_UNIT, TimeUnit

MOST = 12
"""Inputs or outputs that are listed individually."""


class Input(NamedTuple):
    """An input of an instruction.

    Attributes:
        row: the producing instruction; for ORDER and LANE the previous one in the worker's program or on the lane.
        carrier: the send that brought the input from another worker, else -1.
        slack: seconds from the arrival to the start of the consumer.
    """

    row: int
    cause: Cause
    made: float
    carrier: int
    arrived: float
    slack: float


class Waits:
    """Dependencies of one timeline; the first query lists the graph's edges."""

    def __init__(self, timeline: Timeline) -> None:
        self.timeline = timeline

    @cached_property
    def _edges(self) -> tuple[Ints, Ints, npt.NDArray[np.uint8]]:
        """Edges as (source, target, cause) in narrow types.

        Every query scans them: a few milliseconds for a million instructions, without a second copy in another order.
        """
        source, target, cause = event_edges(self.timeline.schedule.columns, self.timeline.dependencies)
        return source.astype(np.int32), target.astype(np.int32), cause.astype(np.uint8)

    def _receive_of(self, row: int) -> int:
        receives = np.flatnonzero(self.timeline.dependencies.sends == row)
        return int(receives[0]) if len(receives) else -1

    def inputs(self, row: int, most: int = MOST) -> tuple[list[Input], int]:
        """Return (at most `most` inputs of `row`, last arrival first; number of all inputs)."""
        timeline, rows = self.timeline, self.timeline.dependencies.rows
        sources, causes = self._neighbours(row, 0)
        through = sources >= rows
        for join in sources[through].tolist():
            more, _ = self._neighbours(join, 0)
            sources, causes = np.append(sources, more), np.append(causes, np.full(len(more), Cause.REDUCE))
        kept = sources < rows
        sources, causes = sources[kept], causes[kept]
        alone = (causes != Cause.ORDER) | ~np.isin(sources, sources[causes != Cause.ORDER])  # a value's edge says more
        sources, causes = sources[alone], causes[alone]
        latest = np.argsort(-timeline.end[sources], kind="stable")[:most]
        return [self._input(row, int(sources[i]), Cause(int(causes[i]))) for i in latest.tolist()], len(sources)

    def _input(self, row: int, source: int, cause: Cause) -> Input:
        timeline, send = self.timeline, int(self.timeline.dependencies.sends[source])
        arrived = float(timeline.end[source])
        slack = max(0.0, float(timeline.start[row]) - arrived)
        if send < 0:
            return Input(source, cause, arrived, -1, arrived, slack)
        makers, causes = self._neighbours(send, 0)
        made_by = next((int(m) for m, why in zip(makers, causes, strict=True) if why == Cause.DATA), send)
        return Input(made_by, cause, float(timeline.end[made_by]), send, arrived, slack)

    def outputs(self, row: int, most: int = MOST) -> list[int]:
        """Return the consumers of `row`'s results, on this worker and, through transfers, on others; by start."""
        timeline, rows = self.timeline, self.timeline.dependencies.rows
        found: list[int] = []
        queue = [row]
        while queue:
            for target, why in zip(*self._neighbours(queue.pop(), 1), strict=True):
                receive = self._receive_of(target) if target < rows else -1
                if why in (Cause.ORDER, Cause.LANE) or target >= rows or target == receive:
                    continue
                if receive >= 0:
                    queue.append(receive)
                elif timeline.dependencies.sends[target] < 0:
                    found.append(int(target))
        return sorted(found, key=lambda user: (timeline.start[user], user))[:most]

    def _neighbours(self, node: int, end: int) -> tuple[Rows, Rows]:
        mine = np.flatnonzero(self._edges[1 - end] == node)
        return self._edges[end][mine].astype(np.int64), self._edges[2][mine].astype(np.int64)

    def reason(self, row: int, unit: TimeUnit = PLAN_UNIT) -> str:
        """Explain the start of `row` by the last of its inputs to arrive; times in `unit`."""
        needs, _ = self.inputs(row, most=1)
        if not needs:
            return "It needs nothing: it starts when the iteration does."
        need, near = needs[0], self.timeline.makespan * TOLERANCE
        text = "Waited for " if need.slack <= near else "Needs "
        text += f"{name(self.timeline, need.row)} ({WHY[need.cause]}), ended {unit.text(need.made)}"
        if need.carrier >= 0:
            text += f", arrived {unit.text(need.arrived)}"
        return text if need.slack <= near else f"{text}, slack {unit.amount(need.slack)}"


def name(timeline: Timeline, row: int) -> str:
    """Return the instruction of a row and its worker: `2F1.5 on 1.2`."""
    return f"{timeline.schedule.instruction(row)} on {timeline.schedule.position(row)[0]}"


WHY = {
    Cause.DATA: "its value",
    Cause.TRANSFER: "its transfer",
    Cause.REDUCE: "gradients or arrival of all hosts",
    Cause.STEP: "the reduce",
    Cause.ORDER: "before it in the program",
    Cause.LANE: "before it on the link",
}


TITLES = {
    GapCause.INPUT: "waits for a value",
    GapCause.TRANSFER: "waits for a transfer",
    GapCause.REDUCE: "waits for a reduce or step",
    GapCause.MEMORY: "memory limit",
    GapCause.ORDER: "program order",
    GapCause.NOTHING_LEFT: "no work left",
}


class Bubbles:
    """The bubbles of one timeline; `limits` as in `Timeline.gaps`."""

    def __init__(self, timeline: Timeline, limits: Sequence[float] | None = None) -> None:
        self.timeline = timeline
        self.gaps: Gaps = timeline.gaps(limits)
        workers = self.gaps.schedule.shape.worker_count
        self._offsets = np.searchsorted(self.gaps.worker, np.arange(workers + 1))

    def between(self, worker: int, begin: float, end: float) -> list[Gap]:
        """Return the bubbles of a worker (by index) that overlap an interval."""
        low, high = self._offsets[worker], self._offsets[worker + 1]
        first = np.searchsorted(self.gaps.end[low:high], begin, side="right")
        last = np.searchsorted(self.gaps.start[low:high], end, side="left")
        return list(self.gaps.at(np.arange(low + first, low + last)))

    def reason(self, gap: Gap, unit: TimeUnit = PLAN_UNIT) -> str:
        """Explain a bubble in a sentence; times in `unit`."""
        timeline, schedule = self.timeline, self.timeline.schedule
        idle = f"Idle for {unit.amount(gap.end - gap.start)}"
        if gap.cause == GapCause.NOTHING_LEFT:
            return f"{idle}: its program has ended; the iteration ends at {unit.text(gap.end)}."
        following = schedule.instruction(gap.row)
        if gap.cause == GapCause.MEMORY:
            return f"{idle}: the memory limit holds back {schedule.instruction(gap.ready)}; next is {following}."
        if gap.cause == GapCause.ORDER and gap.ready == gap.row:
            return f"{idle}: {following} had all it needs and was not begun yet."
        if gap.cause == GapCause.ORDER:
            return f"{idle}: {schedule.instruction(gap.ready)} could run, the program's order puts {following} first."
        if gap.waits_for < 0:
            return f"{idle} before {following}."
        awaited = name(timeline, gap.waits_for)
        if gap.cause == GapCause.TRANSFER:
            return f"{idle}: {following} waits for {awaited}, its value is made and not here yet."
        if gap.cause == GapCause.REDUCE:
            comes_last = KIND_CLASSES[schedule.columns.kind[gap.row]].row.follows is not None
            is_commit = comes_last and schedule.optimizer == "barrier"
            what = "the barrier, where the last is" if is_commit else "the last of all hosts,"
            return f"{idle}: {following} waits for {what} {awaited}."
        ended = unit.text(float(timeline.end[gap.waits_for]))
        return f"{idle}: {following} waits for {awaited}, which ends at {ended}."


@dataclass(frozen=True)
class RangeStatistics:
    """Activities of the live workers in a time range; work and bubbles add up to all of their time.

    Attributes:
        operations: instructions, transfers excluded, that overlap the range.
        work: kind -> seconds.
        rerouted: seconds of `work` spent on micro-batches of other pipelines.
    """

    begin: float
    end: float
    workers: int
    operations: int
    work: dict[int, float]
    rerouted: float
    bubbles: dict[GapCause, float]

    @property
    def total(self) -> float:
        """Worker-seconds of the range."""
        return (self.end - self.begin) * self.workers

    def share(self, seconds: float) -> float:
        return seconds / self.total if self.total else 0.0


def range_statistics(timeline: Timeline, gaps: Gaps, begin: float, end: float) -> RangeStatistics:
    """Return statistics of [begin, end], clipped to the iteration, over the live workers."""
    schedule, c = timeline.schedule, timeline.schedule.columns
    begin, end = max(0.0, min(begin, end)), min(timeline.makespan, max(begin, end))
    end = max(begin, end)
    live = np.array([worker not in schedule.failed for worker in schedule.shape.workers()])
    inside = np.clip(timeline.end, begin, end) - np.clip(timeline.start, begin, end)
    inside = np.where(live[c.worker], inside, 0.0)
    is_transfer = is_kind(c.kind, Beside)
    seconds = np.bincount(c.kind[~is_transfer], weights=inside[~is_transfer], minlength=len(KIND_CLASSES))
    lost = np.clip(gaps.end, begin, end) - np.clip(gaps.start, begin, end)
    lost = np.where(live[gaps.worker], lost, 0.0)
    causes = np.bincount(gaps.cause, weights=lost, minlength=len(GapCause))
    away = away_from(c, c.worker // schedule.shape.ranks)
    return RangeStatistics(
        begin,
        end,
        int(live.sum()),
        int(((inside > 0) & ~is_transfer).sum()),
        {kind: float(seconds[kind]) for kind in range(len(KIND_CLASSES)) if seconds[kind] > 0},
        float(inside[away & ~is_transfer].sum()),
        {cause: float(causes[cause]) for cause in GapCause if causes[cause] > 0},
    )
