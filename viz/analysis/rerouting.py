"""Re-routed work: which peers run the micro-batches of dead workers."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from recycle.ir.columns import Rows
from recycle.ir.instruction import Compute, HostCopy, OverlappedPair, is_kind
from recycle.ir.simulate import Timeline
from recycle.ir.trace import away_from
from recycle.job.shape import Worker


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
    is_work = (
        is_kind(c.kind, (Compute, OverlappedPair)) & ~is_kind(c.kind, HostCopy) & away_from(c, c.worker // shape.ranks)
    )
    rows = np.flatnonzero(is_work)
    own_pipeline, rank = np.divmod(c.worker[rows].astype(np.int64), shape.ranks)
    home = np.where(c.pipeline[rows] == own_pipeline, c.pipeline2[rows], c.pipeline[rows]) * shape.ranks + rank
    pairs, group = np.unique(np.stack([home, c.worker[rows]]), axis=1, return_inverse=True)
    seconds = timeline.end - timeline.start
    result = []
    for place, (away, host) in enumerate(pairs.T.tolist()):
        own = rows[group.reshape(-1) == place]
        own = own[np.argsort(timeline.start[own], kind="stable")]
        spent, busy = float(seconds[own].sum()), timeline.busy[host] or 0.0
        micro_batches = sorted(set(c.index[own].tolist()))
        home_worker, host_worker = shape.worker_at(away), shape.worker_at(host)
        result.append(Rerouting(home_worker, host_worker, micro_batches, own, spent, spent / busy if busy else 0.0))
    return result
