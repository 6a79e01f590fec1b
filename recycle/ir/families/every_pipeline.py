"""A fault-free family writes the programs of one pipeline; the others are copies, tiled as columns.

So building costs what one pipeline costs: D copies of numbers, no instruction objects.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from recycle.ir.columns import Columns, Ints, Rows
from recycle.ir.instruction import Backward, Forward, Instruction
from recycle.ir.schedule import Optimizer, Schedule
from recycle.shape import Shape, Worker


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
    return tiled(one, shape)


def placed(forward_at: Rows, backward_at: Rows, forward_stage: Rows, backward_stage: Rows, index: Rows) -> Columns:
    """The programs of one pipeline whose ranks each run n forwards and, in the same order of micro-batches, n
    backwards.

    Args:
        forward_at, backward_at: (P, n), places in each rank's program; together 0 to 2 n - 1.
        forward_stage, backward_stage: (P, n) or what broadcasts to it.
        index: (n,), micro-batch of the i-th forward and of the i-th backward.
    """
    ranks, n = forward_at.shape
    kind, stage, micro_batch = (np.empty((ranks, 2 * n), dtype=np.int32) for _ in range(3))
    pieces = ((forward_at, Forward.kind, forward_stage), (backward_at, Backward.kind, backward_stage))
    for at, number, stages in pieces:
        for column, values in ((kind, np.int32(number)), (stage, stages), (micro_batch, index)):
            np.put_along_axis(column, at, np.broadcast_to(values, at.shape).astype(np.int32), axis=1)
    return Columns.from_arrays(
        2 * n * np.arange(ranks + 1),
        kind=kind.ravel(),
        stage=stage.ravel(),
        pipeline=np.zeros(kind.size, dtype=np.int32),
        index=micro_batch.ravel(),
    )


def tiled(one: Schedule, shape: Shape) -> Schedule:
    """The schedule of one pipeline in every pipeline of `shape`, each on micro-batches of its own."""
    copies, rows = shape.pipelines, len(one.columns)
    home = np.repeat(np.arange(copies, dtype=np.int32), rows)

    def at_home(pipeline: Ints) -> Ints:
        everywhere = np.tile(pipeline, copies)
        return np.where(everywhere < 0, everywhere, home)

    full = {name: np.tile(getattr(one.columns, name), copies) for name in Columns.FIELDS}
    full |= {name: at_home(getattr(one.columns, name)) for name in ("pipeline", "pipeline2")}
    ends = one.columns.offsets[1:] + rows * np.arange(copies)[:, None]
    columns = Columns.from_arrays(np.concatenate([[0], ends.ravel()]), **full)
    return replace(one, shape=shape, columns=columns, placement=one.placement * copies)
