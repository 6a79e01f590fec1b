"""Clocks of the workers of an executed iteration: whether they agree, and their alignment on transfers and reduces.

A value is used after its send began, and no reduce ends before all its workers began it. Each such pair of moments
bounds the difference of two clocks. If the recorded times break a bound, the clock of each worker is set to the middle
of its bounds relative to the first one, as in NTP (RFC 5905, section 8). Limits: clocks are shifted, not stretched, and
clocks that break no bound stay as they are; alignment takes 0.2 s for 500 workers and 8 s for 1,500.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from recycle.ir.columns import Floats
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
    sends, slack = graph.sends[receives], _TOLERANCE * float(end.max(initial=0.0))
    lead, agreed = start[consumers] - start[sends], np.zeros(workers)
    if lead.min(initial=0.0) >= -slack:
        return Clocks(len(lead), agreed, max(0.0, float(lead.min(initial=np.inf))))
    out = graph.out_of_joins
    out = out[schedule.columns.kind[graph.target[out]] == ReduceGradients.kind]
    join, reduce = workers + graph.source[out] - graph.rows, graph.target[out]
    # The clock of `target` is at most `bound` ahead of the clock of `source`; a join has the clock of its moment.
    source = np.concatenate([worker[consumers], join, worker[reduce]])
    target = np.concatenate([worker[sends], worker[reduce], join])
    bound = np.concatenate([lead, -start[reduce], end[reduce]]) + slack
    nodes = workers + graph.nodes - graph.rows
    ahead = np.where(np.eye(nodes, dtype=np.bool_), 0.0, np.inf)
    np.minimum.at(ahead, (source, target), bound)
    for node in range(nodes):  # shortest paths (Floyd-Warshall)
        np.minimum(ahead, ahead[:, node, None] + ahead[node], out=ahead)
    ahead = ahead[:workers, :workers]
    both = np.isfinite(ahead + ahead.T)
    if ahead.diagonal().min() < 0 or (np.isfinite(ahead) != both).any():
        rows = int(consumers[lead.argmin()]), int(sends[lead.argmin()])
        user, send = (f"{schedule.instruction(row)} on {schedule.position(row)[0]}" for row in rows)
        return Clocks(len(lead), agreed, 0.0, f"{user} began {-lead.min():.6g} s before {send}")
    own, first = np.arange(workers), both.argmax(axis=0)
    shift = (ahead[first, own] - ahead[own, first]) / 2
    return Clocks(len(lead), shift, float((ahead + ahead.T)[both].max()) / 2)
