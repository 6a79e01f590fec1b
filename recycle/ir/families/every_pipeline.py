"""Copying the programs of one pipeline to all pipelines, as columns."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from recycle.errors import ScheduleError
from recycle.ir.columns import Columns, columns_of, is_nothing, occurrences
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
    """Build the schedule in which every pipeline runs the same programs on its own micro-batches.

    Args:
        programs: compute instructions of pipeline 0, one program per rank.
        stages: stages of each rank; None for chunk c of rank r on stage c * P + r.
    """
    columns = columns_of(shape, {Worker(0, rank): program for rank, program in enumerate(programs)})
    return _tiled(shape, columns, optimizer, metadata, stages)


def in_turn(
    shape: Shape,
    orders: Iterable[npt.ArrayLike],
    work: Sequence[tuple[type[Compute], Sequence[int]]],
    **options: Any,
) -> Schedule:
    """Build the schedule in which every rank takes the micro-batches of each kind of work in order.

    Args:
        orders: numbers of kinds of work, in the program order of each rank.
        work: class and stage per rank of each number.
        options: optimizer, metadata and stages, as in `every_pipeline`.
    """
    programs = [np.asarray(order, np.int64) for order in orders]
    number, rank = np.concatenate(programs), np.repeat(np.arange(shape.ranks), list(map(len, programs)))
    columns = Columns.from_arrays(
        np.cumsum([0, *map(len, programs)]),
        kind=np.array([cls.kind for cls, _ in work])[number],
        stage=np.array([stages for _, stages in work])[number, rank],
        pipeline=np.zeros(len(number), dtype=np.int32),
        index=occurrences(rank * len(work) + number),
    )
    return _tiled(shape, columns, **options)


def vee_stages(shape: Shape, family: str) -> list[tuple[int, int]]:
    """Return the stages of chunks 0 and 1 of each rank on the V. Raises ScheduleError unless chunks = 2."""
    if shape.chunks != 2:
        raise ScheduleError(f"{family}: needs chunks = 2 (rank r hosts stages r and 2 P - 1 - r), got {shape.chunks}")
    return [(rank, shape.stages - 1 - rank) for rank in range(shape.ranks)]


def _tiled(
    shape: Shape,
    columns: Columns,
    optimizer: Optimizer,
    metadata: dict[str, Any],
    stages: Sequence[Sequence[int]] | None = None,
) -> Schedule:
    copies, offsets = shape.pipelines, columns.offsets[: shape.ranks + 1]
    rows = int(offsets[-1])
    home = np.repeat(np.arange(copies, dtype=np.int32), rows)
    tiled = {
        name: np.tile(getattr(columns, name), copies)
        for name in Columns.FIELDS
        if not is_nothing(getattr(columns, name))
    }
    for name in ("pipeline", "pipeline2"):
        if name in tiled:
            tiled[name] = np.where(tiled[name] < 0, -1, home)
    ends = offsets[1:] + rows * np.arange(copies)[:, None]
    all_columns = Columns.from_arrays(np.append(0, ends), **tiled)
    placement = None if stages is None else tuple(map(tuple, stages)) * copies
    return Schedule.from_columns(shape, all_columns, placement=placement, optimizer=optimizer, metadata=metadata)
