"""The rows of a schedule as single pieces of work, with every overlapped pair taken apart."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from recycle.ir.columns import Rows
from recycle.ir.instruction import (
    Backward,
    BackwardInput,
    BackwardWeight,
    Forward,
    Instruction,
    OverlappedPair,
    StageWide,
)
from recycle.ir.kinds import is_kind
from recycle.ir.schedule import Schedule


@dataclass(frozen=True)
class Work:
    """The rows as single pieces of work: an overlapped pair counts as its F and its B.

    Attributes:
        row: the row a piece belongs to.
        kind, stage, worker: as in the columns.
        micro_batch: global id `pipeline * m + index`.
        valid: stage and micro-batch lie inside the shape; other pieces have no part in the graph.
    """

    row: Rows
    kind: npt.NDArray[np.uint8]
    stage: Rows
    micro_batch: Rows
    worker: Rows
    valid: npt.NDArray[np.bool_]


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
    valid = (stage >= 0) & (stage < shape.stages) & (wide | inside)
    micro_batch = np.where(wide, -1, pipeline * shape.micro_batches + index)
    return Work(row, kind, stage, micro_batch, c.worker[row].astype(np.int64), valid)


def incomplete_count(schedule: Schedule) -> int:
    """How many pairs of stage and micro-batch lack their F, or their B and one of I and W."""
    pieces, shape = work(schedule), schedule.shape
    cell = pieces.stage * shape.global_micro_batches + pieces.micro_batch

    def there(cls: type[Instruction]) -> npt.NDArray[np.bool_]:
        flags = np.zeros(shape.stages * shape.global_micro_batches, dtype=np.bool_)
        flags[cell[pieces.valid & (pieces.kind == cls.kind)]] = True
        return flags

    whole = there(Forward) & (there(Backward) | (there(BackwardInput) & there(BackwardWeight)))
    return int(len(whole) - np.count_nonzero(whole))
