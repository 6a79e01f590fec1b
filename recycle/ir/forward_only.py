"""The forwards of a schedule alone: what evaluates the model with the workers and stages of a training schedule.

Every forward stays on the worker that runs it in training. So micro-batches of a dead worker are re-routed as in
training, and every activation goes over a lane that training has too. The order is made anew, since that of training
makes room for backwards: each worker runs what has come to it, the deepest stage first, as if every forward took one
unit of time (list scheduling; Graham 1969). What is under way between workers stays few, and nothing is held.

Limits: the order does not know what forwards really take.
"""

from __future__ import annotations

import heapq
from dataclasses import replace

import numpy as np

from recycle.ir.columns import Columns, Rows, offsets_of
from recycle.ir.instruction import Forward, OverlappedPair, is_kind
from recycle.ir.schedule import Schedule


def forward_only(schedule: Schedule) -> Schedule:
    """The compute-only schedule of the forwards of `schedule`, those in overlapped pairs too."""
    c = schedule.columns
    rows = np.flatnonzero(is_kind(c.kind, (Forward, OverlappedPair)))
    rows = rows[np.lexsort((rows, _begins(schedule, rows), c.worker[rows]))]
    offsets = offsets_of(c.worker[rows], schedule.shape.worker_count)
    kept = {name: getattr(c, name)[rows] for name in ("stage", "pipeline", "index")}
    columns = Columns.from_arrays(offsets, kind=np.full(len(rows), Forward.kind), **kept)
    return replace(
        schedule, columns=columns, optimizer="staggered", ties=(), buckets=1, gathers=False, forward_only=True
    )


def _begins(schedule: Schedule, rows: Rows) -> Rows:
    """When each of these forwards begins; one that nothing leads to, in a broken schedule, behind all others."""
    c = schedule.columns
    worker, stage = c.worker[rows].tolist(), c.stage[rows].tolist()
    micro_batch = list(zip(c.pipeline[rows].tolist(), c.index[rows].tolist(), strict=True))
    following: dict[tuple[int, tuple[int, int]], list[int]] = {}
    for place in range(len(rows)):
        following.setdefault((stage[place], micro_batch[place]), []).append(place)
    ready: list[list[tuple[int, int]]] = [[] for _ in range(schedule.shape.worker_count)]
    for place in range(len(rows)):
        if stage[place] == 0:
            heapq.heappush(ready[worker[place]], (0, place))
    begins, now = np.full(len(rows), len(rows) + 1, dtype=np.int64), 0
    while any(ready):
        ran = [heapq.heappop(waiting)[1] for waiting in ready if waiting]
        begins[ran] = now
        for place in ran:
            for after in following.pop((stage[place] + 1, micro_batch[place]), ()):
                heapq.heappush(ready[worker[after]], (-stage[after], after))
        now += 1
    return begins
