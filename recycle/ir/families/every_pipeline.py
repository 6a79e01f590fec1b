"""A fault-free family writes the programs of one pipeline; the others are copies, tiled as columns.

So building costs what one pipeline costs: D copies of numbers, no instruction objects.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from recycle.ir.columns import Columns, Ints, Rows, is_nothing
from recycle.ir.instruction import Compute, Instruction
from recycle.ir.schedule import Optimizer, Schedule
from recycle.job.shape import Shape, Worker


def every_pipeline(
    shape: Shape,
    programs: Iterable[Iterable[Instruction]],
    *,
    optimizer: Optimizer,
    metadata: dict[str, Any],
    stages: Sequence[Sequence[int]] | None = None,
) -> Schedule:
    """The schedule of `shape` in which every pipeline runs the same programs on micro-batches of its own.

    Args:
        programs: compute instructions of pipeline 0, one program per rank.
        stages: the stages that each rank hosts, when not chunk c of rank r on stage c * P + r.
    """
    placement = None if stages is None else tuple(tuple(hosted) for hosted in stages)
    one = Schedule.build(
        replace(shape, pipelines=1),
        {Worker(0, rank): program for rank, program in enumerate(programs)},
        placement=placement,
        optimizer=optimizer,
        metadata=metadata,
    )
    return _tiled(one, shape)


def placed(
    shape: Shape,
    index: Rows,
    *pieces: tuple[type[Compute], Rows, Rows],
    optimizer: Optimizer,
    metadata: dict[str, Any],
) -> Schedule:
    """The schedule in whose pipelines the ranks each run n instructions of every kind, in one order of micro-batches.

    Args:
        index: (n,), micro-batch of the i-th instruction of each kind.
        pieces: of each kind, (P, n) places in the programs of the ranks, together 0 to n times the kinds - 1; and
            stages, (P, n) or what broadcasts to it.
    """
    ranks, n = pieces[0][1].shape
    size = len(pieces) * n
    kind, stage, micro_batch = (np.empty((ranks, size), dtype=np.int32) for _ in range(3))
    for cls, at, stages in pieces:
        for column, values in ((kind, np.int32(cls.kind)), (stage, stages), (micro_batch, index)):
            np.put_along_axis(column, at, np.broadcast_to(values, at.shape).astype(np.int32), axis=1)
    columns = Columns.from_arrays(
        size * np.arange(ranks + 1),
        kind=kind.ravel(),
        stage=stage.ravel(),
        pipeline=np.zeros(kind.size, dtype=np.int32),
        index=micro_batch.ravel(),
    )
    one = Schedule.from_columns(replace(shape, pipelines=1), columns, optimizer=optimizer, metadata=metadata)
    return _tiled(one, shape)


def _tiled(one: Schedule, shape: Shape) -> Schedule:
    copies, rows = shape.pipelines, len(one.columns)
    home = np.repeat(np.arange(copies, dtype=np.int32), rows)

    def at_home(pipeline: Ints) -> Ints:
        everywhere = np.tile(pipeline, copies)
        return np.where(everywhere < 0, everywhere, home)

    said = [name for name in Columns.FIELDS if not is_nothing(getattr(one.columns, name))]
    full = {name: np.tile(getattr(one.columns, name), copies) for name in said}
    full |= {name: at_home(getattr(one.columns, name)) for name in ("pipeline", "pipeline2") if name in said}
    ends = one.columns.offsets[1:] + rows * np.arange(copies)[:, None]
    columns = Columns.from_arrays(np.concatenate([[0], ends.ravel()]), **full)
    return replace(one, shape=shape, columns=columns, placement=one.placement * copies)
