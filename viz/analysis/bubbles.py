"""Bubbles in words: the gap at a point of a lane, the next one, the longest, and what each waits for."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from recycle.ir.gaps import Gap, GapCause, Gaps
from recycle.ir.kinds import KIND_CLASSES
from recycle.ir.simulate import Timeline
from viz.analysis.waits import name

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

    def at(self, worker: int, time: float) -> Gap | None:
        """The bubble of a worker (index) at a time; None when it works then, or has failed."""
        begin, end = self._offsets[worker], self._offsets[worker + 1]
        place = int(begin + np.searchsorted(self.gaps.start[begin:end], time, side="right")) - 1
        return self._gap(place) if begin <= place and time < self.gaps.end[place] else None

    def next(self, worker: int, time: float) -> Gap | None:
        """The first bubble of a worker that begins after `time`."""
        begin, end = self._offsets[worker], self._offsets[worker + 1]
        place = int(begin + np.searchsorted(self.gaps.start[begin:end], time, side="right"))
        return self._gap(place) if place < end else None

    def longest(self, most: int, cause: GapCause | None = None) -> list[Gap]:
        """The longest bubbles, of one cause or of all but the end of programs; longest first."""
        chosen = np.flatnonzero(self.gaps.cause != GapCause.NOTHING_LEFT if cause is None else self.gaps.cause == cause)
        length = self.gaps.end[chosen] - self.gaps.start[chosen]
        order = np.argsort(-length, kind="stable")[:most]
        return [self._gap(int(chosen[i])) for i in order]

    def _gap(self, place: int) -> Gap:
        gaps = self.gaps
        return Gap(
            gaps.schedule.shape.worker_at(int(gaps.worker[place])),
            float(gaps.start[place]),
            float(gaps.end[place]),
            GapCause(int(gaps.cause[place])),
            int(gaps.row[place]),
            int(gaps.waits_for[place]),
            int(gaps.ready[place]),
        )

    def reason(self, gap: Gap) -> str:
        """Why the worker does nothing, in a sentence."""
        return reason(self.timeline, gap)


def reason(timeline: Timeline, gap: Gap) -> str:
    """Why a worker does nothing in `gap`, in a sentence."""
    schedule = timeline.schedule
    length = f"{gap.end - gap.start:.6g}"
    if gap.cause == GapCause.NOTHING_LEFT:
        return f"Idle for {length}: its program has ended; the iteration ends at {gap.end:.6g}."
    following = schedule.instruction(gap.row)
    if gap.cause == GapCause.MEMORY:
        return f"Idle for {length}: the memory limit holds back {schedule.instruction(gap.ready)}; next is {following}."
    if gap.cause == GapCause.ORDER and gap.ready == gap.row:
        return f"Idle for {length}: {following} had all it needs and was not begun yet."
    if gap.cause == GapCause.ORDER:
        return (
            f"Idle for {length}: {schedule.instruction(gap.ready)} could run, the program's order puts"
            f" {following} first."
        )
    if gap.waits_for < 0:
        return f"Idle for {length} before {following}."
    awaited = name(timeline, gap.waits_for)
    if gap.cause == GapCause.TRANSFER:
        return f"Idle for {length}: {following} waits for {awaited}, its value is made and not here yet."
    if gap.cause == GapCause.REDUCE:
        comes_last = KIND_CLASSES[schedule.columns.kind[gap.row]].row.follows is not None
        is_commit = comes_last and schedule.optimizer == "barrier"
        what = "the barrier, where the last is" if is_commit else "the last of all hosts,"
        return f"Idle for {length}: {following} waits for {what} {awaited}."
    return f"Idle for {length}: {following} waits for {awaited}, which ends at {timeline.end[gap.waits_for]:.6g}."
