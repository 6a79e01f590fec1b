"""Inputs and outputs of an instruction with their slack, and which input it waited for.

A value from another worker is listed with what makes it and what carries it; the receive between them takes no time of
its own. What a reduce or step needs of all workers is listed one by one, the latest first.
"""

from __future__ import annotations

from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from recycle.ir.columns import Ints, Rows
from recycle.ir.dependencies import Cause
from recycle.ir.event_graph import event_edges
from recycle.ir.simulate import TOLERANCE, Timeline
from viz.numbers import PLAN_UNIT, TimeUnit

MOST = 12
"""Inputs or outputs that are listed one by one."""


class Input(NamedTuple):
    """One thing that an instruction needs.

    Attributes:
        row: the instruction that makes it; for ORDER and LANE the one before in the worker's program or on the lane.
        cause: why it is needed.
        made: when that ended.
        carrier: the send that brought it from another worker, else -1.
        arrived: when it was here.
        slack: seconds between its arrival and the start of whoever needs it.
    """

    row: int
    cause: Cause
    made: float
    carrier: int
    arrived: float
    slack: float


class Waits:
    """Answers for one timeline; the graph's edges are listed with the first question."""

    def __init__(self, timeline: Timeline) -> None:
        self.timeline = timeline

    @cached_property
    def _edges(self) -> tuple[Ints, Ints, npt.NDArray[np.uint8]]:
        """(source, target, cause) of each edge, narrow: they are searched whole for every answer, a few milliseconds
        for a million instructions, which then need no second copy in another order."""
        source, target, cause = event_edges(self.timeline.schedule.columns, self.timeline.dependencies)
        return source.astype(np.int32), target.astype(np.int32), cause.astype(np.uint8)

    def _receive_of(self, row: int) -> int:
        receives = np.flatnonzero(self.timeline.dependencies.sends == row)
        return int(receives[0]) if len(receives) else -1

    def inputs(self, row: int, most: int = MOST) -> tuple[list[Input], int]:
        """(what `row` needs, the last to arrive first and at most `most` of it; how much it needs in all)."""
        timeline, rows = self.timeline, self.timeline.dependencies.rows
        sources, causes = self._neighbours(row, 0)
        through = sources >= rows
        for join in sources[through].tolist():
            more, _ = self._neighbours(join, 0)
            sources, causes = np.append(sources, more), np.append(causes, np.full(len(more), Cause.REDUCE))
        kept = sources < rows
        sources, causes = sources[kept], causes[kept]
        alone = (causes != Cause.ORDER) | ~np.isin(sources, sources[causes != Cause.ORDER])  # its value says more
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
        """Who uses what `row` makes, on this worker and, through transfers, on others; the first to start first."""
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
        """(nodes, causes) at the other ends of the edges of `node`; `end` is 0 for their sources, 1 for targets."""
        mine = np.flatnonzero(self._edges[1 - end] == node)
        return self._edges[end][mine].astype(np.int64), self._edges[2][mine].astype(np.int64)

    def reason(self, row: int, unit: TimeUnit = PLAN_UNIT) -> str:
        """Why `row` starts when it does: the last of what it needs to arrive; its times in `unit`."""
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
    """The instruction of a row and its worker: `2F1.5 on 1.2`."""
    return f"{timeline.schedule.instruction(row)} on {timeline.schedule.position(row)[0]}"


WHY = {
    Cause.DATA: "its value",
    Cause.TRANSFER: "its transfer",
    Cause.REDUCE: "gradients or arrival of all hosts",
    Cause.STEP: "the reduce",
    Cause.ORDER: "before it in the program",
    Cause.LANE: "before it on the link",
}
