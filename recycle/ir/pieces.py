"""The rows of a schedule as single pieces of work, with every overlapped pair taken apart."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

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
from recycle.ir.kinds import is_kind
from recycle.ir.schedule import Schedule
from recycle.job.shape import Shape


@dataclass(frozen=True)
class Work:
    """The rows as single pieces of work: an overlapped pair counts as its F and its B.

    Attributes:
        row: the row a piece belongs to.
        kind, stage, worker: as in the columns.
        micro_batch: global id `pipeline * m + index`.
        bucket: as in the columns.
        valid: stage and micro-batch lie inside the shape, and the bucket is one of the schedule's; other pieces have no
            part in the graph.
    """

    row: Rows
    kind: npt.NDArray[np.uint8]
    stage: Rows
    micro_batch: Rows
    bucket: Rows
    worker: Rows
    valid: npt.NDArray[np.bool_]

    def of(self, *classes: type[Instruction]) -> Rows:
        """The valid pieces of these kinds, or of classes derived from these."""
        return np.flatnonzero(is_kind(self.kind, classes) & self.valid)

    def first(self, shape: Shape, pieces: Rows) -> Rows:
        """For each cell (stage * D * m + micro-batch) the first of some valid pieces that is of it, -1 for none."""
        found = np.full(shape.stages * shape.global_micro_batches, -1, dtype=np.int64)
        found[self.stage[pieces[::-1]] * shape.global_micro_batches + self.micro_batch[pieces[::-1]]] = pieces[::-1]
        return found


def work(schedule: Schedule) -> Work:
    """The schedule's rows with every overlapped pair taken apart."""
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
    pieces = Work(row, kind, stage, micro_batch, bucket, c.worker[row].astype(np.int64), valid)
    return replace(pieces, valid=valid & ~outside_buckets(pieces, schedule.buckets))


def outside_buckets(pieces: Work, buckets: int) -> npt.NDArray[np.bool_]:
    """The pieces whose bucket is none of `buckets`; REDUCE_BUCKET cannot sum the last one, which REDUCE_GRAD does."""
    outside: npt.NDArray[np.bool_] = pieces.bucket >= buckets - (pieces.kind == ReduceBucket.kind)
    outside |= is_kind(pieces.kind, Part) & (pieces.bucket < 0)
    return outside


def parts_of_weight(pieces: Work, shape: Shape, buckets: int) -> tuple[Rows, Rows]:
    """(fewest, most) parts of W that there are of any bucket, per cell (stage * D * m + micro-batch).

    Where there are none, both are views of a single 0, which take no memory however many cells the shape has.
    """
    at = pieces.of(WeightPart)
    if not len(at):
        none = np.broadcast_to(np.int64(0), shape.stages * shape.global_micro_batches)
        return none, none
    found, place = np.unique(
        pieces.stage[at] * shape.global_micro_batches + pieces.micro_batch[at], return_inverse=True
    )
    counts = np.bincount(place * buckets + pieces.bucket[at], minlength=len(found) * buckets)
    fewest, most = np.zeros((2, shape.stages * shape.global_micro_batches), dtype=np.int64)
    by_cell = counts.reshape(len(found), buckets)
    fewest[found], most[found] = by_cell.min(axis=1), by_cell.max(axis=1)
    return fewest, most


def counts_of(pieces: Work, shape: Shape, weights: Rows) -> dict[type[Instruction], Rows]:
    """For F, B, I and W: how often each cell has it.

    Args:
        weights: W's of each cell that are there in parts, to be counted with the others.
    """
    cell = pieces.stage * shape.global_micro_batches + pieces.micro_batch
    counts: dict[type[Instruction], Rows] = {
        cls: np.bincount(cell[pieces.of(cls)], minlength=len(weights))
        for cls in (Forward, Backward, BackwardInput, BackwardWeight)
    }
    counts[BackwardWeight] += weights
    return counts


def is_whole(schedule: Schedule, forward: Flags, backward: Flags, gradient: Flags, weight: Flags) -> Flags:
    """Of each pair of stage and micro-batch, given whether its F, B, I and W are there: whether all that it needs is.

    The one place that says so: F alone where the schedule is forward-only, else F, and B or both halves of it.
    """
    return forward if schedule.forward_only else forward & (backward | (gradient & weight))


def incomplete_count(schedule: Schedule) -> int:
    """How many pairs of stage and micro-batch lack something that they need (see `is_whole`)."""
    pieces, shape = work(schedule), schedule.shape
    parts = parts_of_weight(pieces, shape, schedule.buckets)[0]
    whole = is_whole(schedule, *(count > 0 for count in counts_of(pieces, shape, parts).values()))
    return int(len(whole) - np.count_nonzero(whole))
