"""Clocks of the workers of an executed iteration: whether they agree, and their alignment on transfers and reduces.

A value is used after its send began, and no reduce ends before all its workers began it. Each such pair of moments
bounds the difference of two clocks. If the recorded times break a bound, the clock of each worker is set to the middle
of its bounds relative to the first one, as in NTP (RFC 5905, section 8). Limits: clocks are shifted, not stretched, and
clocks that break no bound stay as they are.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from recycle.ir.columns import Floats, Rows
from recycle.ir.dependencies import Dependencies
from recycle.ir.instruction import ReduceGradients
from recycle.ir.schedule import Schedule

_TOLERANCE = 1e-9
"""Share of the makespan by which bounds may be broken, for rounding."""


class Clocks(NamedTuple):
    """How far the clocks of workers agree.

    Attributes:
        transfers: number of values that another worker used.
        shift: seconds added to the times of each worker.
        uncertainty: seconds by which two clocks may differ without a trace.
        conflict: a value used before its send under any shift; "" without one.
    """

    transfers: int
    shift: Floats
    uncertainty: float
    conflict: str = ""

    @property
    def differed(self) -> bool:
        """Whether the recorded times contradict one clock."""
        return bool(self.conflict or self.shift.any())

    def __str__(self) -> str:
        if self.conflict:
            return f"the workers' clocks contradict each other: {self.conflict}; record the trace with one clock"
        if not self.transfers:
            return "there are no transfers, so the workers' clocks cannot be checked"
        uncertainty = f"{1000 * self.uncertainty:.3g} ms"
        if self.differed:
            largest = 1000 * float(np.ptp(self.shift))
            return f"the workers' clocks differed by up to {largest:.6g} ms and are aligned to ± {uncertainty}"
        return f"{self.transfers:,} transfers fit one clock; differences of up to {uncertainty} would not show"


def clocks_of(schedule: Schedule, graph: Dependencies, start: Floats, end: Floats) -> Clocks:
    """Compare the clocks of the workers by the recorded times of the rows, in seconds; align them if they differ."""
    worker, workers = schedule.columns.worker, schedule.shape.worker_count
    receives, consumers = graph.received
    sends, slack = graph.sends[receives], _TOLERANCE * float(np.ptp(end)) if len(end) else 0.0
    lead, shift = start[consumers] - start[sends], np.zeros(workers)
    if lead.min(initial=0.0) >= -slack:
        return Clocks(len(lead), shift, max(0.0, float(lead.min())) if len(lead) else 0.0)
    out = graph.out_of_joins
    out = out[schedule.columns.kind[graph.target[out]] == ReduceGradients.kind]
    join, reduce = workers + graph.source[out] - graph.rows, graph.target[out]
    # The clock of `target` is at most `bound` ahead of the clock of `source`; a join has the clock of its moment.
    source = np.concatenate([worker[consumers], join, worker[reduce]])
    target = np.concatenate([worker[sends], worker[reduce], join])
    bound = np.concatenate([lead, -start[reduce], end[reduce]]) + slack
    nodes = workers + graph.nodes - graph.rows
    pair = source * nodes + target
    order = np.lexsort((bound, pair))
    tightest = order[np.diff(pair[order], prepend=-1) > 0]
    source, target, bound = source[tightest], target[tightest], bound[tightest]
    left, uncertainty = np.unique(worker), 0.0
    while len(left):
        sides = (source, target), (target, source)
        most, least = (_distances(int(left[0]), *ends, bound, nodes)[left] for ends in sides)
        known = np.isfinite(most) & np.isfinite(least)
        if not known[0] or (np.isfinite(most) != np.isfinite(least)).any():
            worst, row, other = -float(lead.min()), int(sends[lead.argmin()]), int(consumers[lead.argmin()])
            user, send = (f"{schedule.instruction(each)} on {schedule.position(each)[0]}" for each in (other, row))
            return Clocks(len(lead), np.zeros(workers), 0.0, f"{user} began {worst:.6g} s before {send}")
        shift[left[known]] = (most - least)[known] / 2
        uncertainty = max(uncertainty, float((most + least)[known].max()) / 2)
        left = left[~known]
    return Clocks(len(lead), shift, uncertainty)


def _distances(origin: int, source: Rows, target: Rows, bound: Floats, nodes: int) -> Floats:
    """Return the shortest distance of each node from `origin` (Bellman-Ford); NaN everywhere if cycles are negative."""
    far = np.full(nodes, np.inf)
    far[origin] = 0.0
    for _ in range(nodes):
        before = far.copy()
        np.minimum.at(far, target, before[source] + bound)
        if np.array_equal(far, before):
            return far
    return np.full(nodes, np.nan)
