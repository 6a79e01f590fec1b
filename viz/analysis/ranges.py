"""Statistics of a time range: the share of each kind of work and of each cause of bubble, over all live workers."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from recycle.ir.gaps import GapCause, Gaps
from recycle.ir.instruction import KIND_CLASSES, Beside, is_kind
from recycle.ir.simulate import Timeline
from recycle.ir.trace import away_from


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
