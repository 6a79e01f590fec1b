"""How the time of workers is spent: bubbles in words, the gap at a point of a lane and what each waits for; and the
share of each kind of work and cause of bubble in a range of time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from recycle.ir.gaps import Gap, GapCause, Gaps
from recycle.ir.instruction import Beside, is_kind
from recycle.ir.kinds import KIND_CLASSES
from recycle.ir.simulate import Timeline
from recycle.ir.trace import away_from
from viz.analysis.waits import name
from viz.numbers import PLAN_UNIT, TimeUnit

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
        """The bubbles of a worker (index) that lie between two times, whole or in part."""
        low, high = self._offsets[worker], self._offsets[worker + 1]
        first = np.searchsorted(self.gaps.end[low:high], begin, side="right")
        last = np.searchsorted(self.gaps.start[low:high], end, side="left")
        return list(self.gaps.at(np.arange(low + first, low + last)))

    def reason(self, gap: Gap, unit: TimeUnit = PLAN_UNIT) -> str:
        """Why the worker does nothing, in a sentence; its times in `unit`."""
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
    """What happens between two times on the live workers; work and bubbles together are all of their time.

    Attributes:
        begin, end: of the range.
        workers: how many live workers there are.
        operations: instructions other than transfers that run in it, whole or in part.
        work: kind -> seconds.
        rerouted: seconds of that spent on micro-batches of other pipelines.
        bubbles: cause -> seconds.
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
    """Statistics of [begin, end], cut to the iteration, over the live workers."""
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
