"""Reduces in buckets: where the sum of each bucket of a stage's gradients may begin, in a compute-only order.

A bucket is whole when the last W of the stage has computed its weights. So of the last instructions of a stage on a
worker, those W's behind which the worker computes nothing else for the stage and nothing between them, each is cut into
its parts for the buckets, and these run bucket by bucket: all parts for bucket 0, then those for bucket 1, and so on.
While the later parts run, the earlier buckets are summed. A B at the end is taken for its I and W. The gradients are
the same bits: each weight is still added to in the order of the micro-batches.

Limits: where an overlapped pair comes last nothing is cut, and the buckets begin behind it.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from recycle.ir.columns import Columns, Rows, compute_chains
from recycle.ir.dependencies import find
from recycle.ir.instruction import Backward, BackwardInput, BackwardWeight, ReduceBucket, WeightPart
from recycle.ir.kinds import ValueKind, is_kind, kinds_where
from recycle.ir.pieces import work
from recycle.ir.schedule import Schedule


def cut_last_weights(schedule: Schedule) -> tuple[Schedule, Rows]:
    """The schedule with the last W's of each stage in parts, and for each of its rows the one that it came from."""
    c, buckets = schedule.columns, schedule.buckets
    chain = compute_chains(c)[1]
    place = np.full(len(c), -1, dtype=np.int64)
    place[chain] = np.arange(len(chain))
    kept = np.ones(len(c), dtype=np.bool_)
    cut = []
    for last in _last_gradients(schedule).tolist():
        if c.kind[last] not in (Backward.kind, BackwardWeight.kind):
            continue
        run = 1
        if c.kind[last] == BackwardWeight.kind:
            before = chain[: place[last] + 1][::-1]
            alike = (c.kind[before] == BackwardWeight.kind) & (c.stage[before] == c.stage[last])
            alike &= c.worker[before] == c.worker[last]
            run = len(alike) if alike.all() else int(alike.argmin())
        rows = chain[place[last] + 1 - run : place[last] + 1]
        kept[rows] = False
        cut.append(rows)
    came_from, first, kind, bucket = [np.flatnonzero(kept)], [np.flatnonzero(kept)], [c.kind[kept]], [c.bucket[kept]]
    for rows in cut:
        parts = np.tile(rows, buckets)
        numbers = np.repeat(np.arange(buckets), len(rows))
        if c.kind[rows[0]] == Backward.kind:
            parts, numbers = np.append(rows, parts), np.append(-1, numbers)
        came_from.append(parts)
        first.append(np.full(len(parts), rows[0]))
        kind.append(np.where(numbers < 0, BackwardInput.kind, WeightPart.kind).astype(np.uint8))
        bucket.append(numbers.astype(np.int32))
    order = np.argsort(np.concatenate(first), kind="stable")
    rows = np.concatenate(came_from)[order]
    columns = {name: getattr(c, name)[rows] for name in Columns.FIELDS}
    columns |= {"kind": np.concatenate(kind)[order], "bucket": np.concatenate(bucket)[order]}
    sizes = np.bincount(c.worker[rows], minlength=schedule.shape.worker_count)
    offsets = np.concatenate([[0], np.cumsum(sizes)])
    return replace(schedule, columns=Columns.from_arrays(offsets, **columns)), rows


def _last_gradients(schedule: Schedule) -> Rows:
    """The last row of each worker and stage that adds to the stage's gradients."""
    pieces = work(schedule)
    at = np.flatnonzero(is_kind(pieces.kind, _adding()) & pieces.valid)
    host = pieces.worker[at] * schedule.shape.stages + pieces.stage[at]
    order = np.lexsort((pieces.row[at], host))
    last = np.diff(host[order], append=-1) != 0
    return np.sort(pieces.row[at][order][last])


def bucket_starts(schedule: Schedule) -> tuple[Rows, Rows, Rows, Rows]:
    """(worker, row that it comes before, stage, bucket) of each REDUCE_BUCKET, by worker, then by its place there.

    A worker begins the sum of a bucket right behind what adds to it last, or at its program's end where it computes
    nothing for the stage. All workers begin their sums in one order, the last stage first, as each must, so that none
    waits in one sum for a peer who waits in another.
    """
    shape, count, stages = schedule.shape, schedule.buckets - 1, schedule.shape.stages
    live = [w for w, worker in enumerate(shape.workers()) if worker not in schedule.failed]
    worker = np.array([w for w in live for _ in schedule.placement[w]], dtype=np.int64)
    stage = np.array([s for w in live for s in sorted(schedule.placement[w], reverse=True)], dtype=np.int64)
    pieces, offsets = work(schedule), schedule.columns.offsets
    at = np.flatnonzero(is_kind(pieces.kind, _adding()) & pieces.valid)
    host = find(worker * stages + stage, pieces.worker[at] * stages + pieces.stage[at])
    at, host = at[host >= 0], host[host >= 0]
    is_part = pieces.kind[at] == WeightPart.kind
    behind = np.zeros((len(stage), schedule.buckets), dtype=np.int64)
    np.maximum.at(behind, (host[is_part], pieces.bucket[at[is_part]]), pieces.row[at[is_part]] + 1)
    np.maximum.at(behind, host[~is_part], pieces.row[at[~is_part], None] + 1)
    place = np.where(behind > 0, behind, offsets[worker + 1, None])[:, :count].ravel()
    worker = np.repeat(worker, count)
    # Rows of later workers have larger numbers, so one running maximum serves all.
    return worker, np.maximum.accumulate(place), np.repeat(stage, count), np.tile(np.arange(count), len(stage))


def buckets_of(columns: Columns) -> int:
    """In how many buckets each stage is reduced, as written in lowered programs."""
    return int((columns.bucket + 1 + (columns.kind == ReduceBucket.kind)).max(initial=1))


def _adding() -> tuple[type, ...]:
    return kinds_where(lambda row: ValueKind.WEIGHT_GRADIENT in row.produces)
