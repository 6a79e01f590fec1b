"""The rows of a schedule as single operations, with overlapped pairs split into F and B."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from recycle.ir.columns import Flags, Rows
from recycle.ir.instruction import (
    Backward,
    BackwardInput,
    BackwardWeight,
    Forward,
    Instruction,
    OverlappedPair,
    Part,
    ReduceBucket,
    StageWide,
    WeightPart,
)
from recycle.ir.kinds import KIND_CLASSES, Codes, is_kind, kinds_of
from recycle.ir.schedule import Schedule
from recycle.job.shape import Shape


@dataclass(frozen=True)
class Operations:
    """Single operations, in columns; an overlapped pair counts as its F and its B.

    Attributes:
        shape: size of the job.
        row: row of the operation.
        kind, stage, worker, bucket: as in the columns.
        micro_batch: global id `pipeline * m + index`.
        valid: whether stage, micro-batch and bucket exist in the schedule; others are not part of the graph.
    """

    shape: Shape
    row: Rows
    kind: Codes
    stage: Rows
    micro_batch: Rows
    bucket: Rows
    worker: Rows
    valid: Flags

    @property
    def cells(self) -> int:
        """Number of cells (stage, micro-batch)."""
        return self.shape.stages * self.shape.global_micro_batches

    @cached_property
    def cell(self) -> Rows:
        """Stage and micro-batch of each operation as one number; meaningful for valid operations only."""
        return self.stage * self.shape.global_micro_batches + self.micro_batch

    @cached_property
    def worker_cell(self) -> Rows:
        """Worker, stage and micro-batch of each operation as one number."""
        return self.worker * self.cells + self.cell

    @cached_property
    def host(self) -> Rows:
        """Worker and stage of each operation as one number."""
        return self.worker * self.shape.stages + self.stage

    def select(self, *classes: type[Instruction]) -> Rows:
        """Return the valid operations of these kinds or their subclasses."""
        chosen = [self._of_kind[kind] for kind in kinds_of(classes)]
        if len(chosen) == 1:
            return chosen[0]
        return np.sort(np.concatenate([np.empty(0, dtype=np.int64), *chosen]), kind="stable")

    @cached_property
    def _of_kind(self) -> list[Rows]:
        rows = np.flatnonzero(self.valid)
        kind = self.kind[rows]
        ends = np.cumsum(np.bincount(kind, minlength=len(KIND_CLASSES)))
        return np.split(rows[np.argsort(kind, kind="stable")], ends[:-1])

    def first(self, chosen: Rows) -> Rows:
        """Return the first of `chosen` for each cell, -1 without one."""
        first_of_cell, latest = np.full(self.cells, -1, dtype=np.int64), chosen[::-1]
        first_of_cell[self.cell[latest]] = latest
        return first_of_cell


def operations_of(schedule: Schedule) -> Operations:
    """Split the rows of a schedule into single operations."""
    c, shape = schedule.columns, schedule.shape
    is_pair = c.kind == OverlappedPair.kind
    pair = np.flatnonzero(is_pair)
    row = np.concatenate([np.arange(len(c)), pair])
    kind = np.concatenate([np.where(is_pair, Forward.kind, c.kind), np.full(len(pair), Backward.kind)])
    stage = np.concatenate([c.stage, c.stage2[pair]]).astype(np.int64)
    pipeline = np.concatenate([c.pipeline, c.pipeline2[pair]]).astype(np.int64)
    index = np.concatenate([c.index, c.index2[pair]]).astype(np.int64)
    kind = kind.astype(np.uint8)
    wide = is_kind(kind, StageWide)
    inside = (pipeline >= 0) & (pipeline < shape.pipelines) & (index >= 0) & (index < shape.micro_batches)
    bucket = c.bucket[row].astype(np.int64)
    valid = (stage >= 0) & (stage < shape.stages) & (wide | inside)
    micro_batch = np.where(wide, -1, pipeline * shape.micro_batches + index)
    ops = Operations(shape, row, kind, stage, micro_batch, bucket, c.worker[row].astype(np.int64), valid)
    return replace(ops, valid=valid & ~outside_buckets(ops, schedule.buckets))


def outside_buckets(ops: Operations, buckets: int) -> Flags:
    """Return the operations with an invalid bucket. REDUCE_GRAD, not REDUCE_BUCKET, sums the last bucket."""
    outside: Flags = ops.bucket >= buckets - (ops.kind == ReduceBucket.kind)
    outside |= is_kind(ops.kind, Part) & (ops.bucket < 0)
    return outside


def parts_of_weight(ops: Operations, buckets: int) -> tuple[Rows, Rows]:
    """Return (fewest, most) parts of W over the buckets, per cell."""
    at = ops.select(WeightPart)
    cells, place = np.unique(ops.cell[at], return_inverse=True)
    by_cell = np.bincount(place * buckets + ops.bucket[at], minlength=len(cells) * buckets).reshape(-1, buckets)
    fewest, most = np.zeros((2, ops.cells), dtype=np.int64)
    fewest[cells], most[cells] = by_cell.min(axis=1), by_cell.max(axis=1)
    return fewest, most


def counts_of(ops: Operations, weights: Rows) -> dict[type[Instruction], Rows]:
    """Count F, B, I and W of each cell, including `weights`, the number of W's in parts."""
    counts: dict[type[Instruction], Rows] = {
        cls: np.bincount(ops.cell[ops.select(cls)], minlength=ops.cells)
        for cls in (Forward, Backward, BackwardInput, BackwardWeight)
    }
    counts[BackwardWeight] += weights
    return counts


def is_whole(schedule: Schedule, forward: Flags, backward: Flags, gradient: Flags, weight: Flags) -> Flags:
    """Return whether each (stage, micro-batch) is complete, given which of F, B, I and W exist.

    Complete is F in a forward-only schedule, otherwise F and either B or both I and W.
    """
    return forward if schedule.forward_only else forward & (backward | (gradient & weight))


def incomplete_count(schedule: Schedule) -> int:
    """Count the pairs of stage and micro-batch that are incomplete (see `is_whole`)."""
    ops = operations_of(schedule)
    parts = parts_of_weight(ops, schedule.buckets)[0]
    whole = is_whole(schedule, *(count > 0 for count in counts_of(ops, parts).values()))
    return int(len(whole) - np.count_nonzero(whole))
