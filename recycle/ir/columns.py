"""The programs of a schedule as numpy arrays, and the orders between rows without a data dependency."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from operator import index
from typing import Any

import numpy as np
import numpy.typing as npt

from recycle.errors import ScheduleError, errors_as
from recycle.ir.instruction import (
    AsyncInstruction,
    HostCopy,
    Instruction,
    OverlappedPair,
    Send,
    Transfer,
    is_kind,
)
from recycle.ir.kinds import Codes, Flags as Flags
from recycle.job.shape import Shape, Worker

MOST_INSTRUCTIONS = 2**22
"""Maximum instructions of a schedule file: checking that many takes 3 GB. Large jobs have a few hundred thousand."""
Ints = npt.NDArray[np.int32]
Rows = npt.NDArray[np.int64]
"""Rows of columns, nodes of graphs, or offsets."""
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Columns:
    """One row per instruction, grouped by worker index in program order.

    Attributes:
        kind: index of the kind in `KIND_CLASSES`, uint8.
        stage: stage of the instruction.
        pipeline, index: the micro-batch `pipeline.index`; -1 for kinds without one.
        peer: worker index at the other end of a transfer, else -1.
        stage2, pipeline2, index2: the backward of an overlapped pair (the first three hold the forward), else -1.
        bucket: gradient bucket, else -1.
        offsets: rows of worker w are `offsets[w]` to `offsets[w + 1]`, int64.
    """

    kind: Codes
    stage: Ints
    pipeline: Ints
    index: Ints
    peer: Ints
    stage2: Ints
    pipeline2: Ints
    index2: Ints
    bucket: Ints
    offsets: Rows

    FIELDS = ("kind", "stage", "pipeline", "index", "peer", "stage2", "pipeline2", "index2", "bucket")

    def __len__(self) -> int:
        return len(self.kind)

    @cached_property
    def worker(self) -> Ints:
        """Worker index of each row."""
        sizes = np.diff(self.offsets)
        return np.repeat(np.arange(len(sizes), dtype=np.int32), sizes)

    @classmethod
    def from_arrays(cls, offsets: Rows, **columns: npt.NDArray[Any]) -> Columns:
        """Build columns from arrays; omitted columns are -1."""
        rows = int(offsets[-1])
        full: dict[str, Any] = {"kind": np.asarray(columns["kind"], np.uint8)}
        for name in cls.FIELDS[1:]:
            column = np.asarray(columns[name], np.int32) if name in columns else _nothing(rows)
            full[name] = _nothing(rows) if is_nothing(column) else column
        return cls(offsets=np.asarray(offsets, dtype=np.int64), **full)

    def __eq__(self, other: object) -> bool:
        """Return whether the programs are equal."""
        if not isinstance(other, Columns):
            return NotImplemented
        names = (*self.FIELDS, "offsets")
        return all(np.array_equal(getattr(self, name), getattr(other, name)) for name in names)

    def take(self, rows: Rows, offsets: Rows | None = None) -> Columns:
        """Return these rows in this order; worker w gets those from `offsets[w]` on, or if None its own."""
        if offsets is None:
            offsets = offsets_of(self.worker[rows], len(self.offsets) - 1)
        taken = {name: getattr(self, name) for name in self.FIELDS}
        return Columns.from_arrays(offsets, **{name: c[rows] for name, c in taken.items() if not is_nothing(c)})


def is_nothing(column: Ints) -> bool:
    """Return whether a column is -1 in every row; usually O(1)."""
    return len(column) > 0 and bool(column[0] == -1) and (column.strides == (0,) or bool((column == -1).all()))


def _nothing(rows: int) -> Ints:
    return np.broadcast_to(np.int32(-1), rows)


def require_few(instructions: int, where: str = "", most: int = MOST_INSTRUCTIONS) -> None:
    """Raise ScheduleError, prefixed by `where`, for more than `most` instructions."""
    if instructions > most:
        raise ScheduleError(
            f"{where}too large: {instructions:,} instructions, a file may hold {most:,}: write fewer"
            " micro-batches or pipelines, which repeat each other"
        )


def offsets_of(groups: npt.NDArray[Any], count: int) -> Rows:
    """Return the offsets of `count` groups, given the sorted group of each row."""
    return np.concatenate([[0], np.cumsum(np.bincount(groups, minlength=count))])


def occurrences(keys: npt.NDArray[Any]) -> Rows:
    """Return how often the key of each entry occurs before the entry."""
    order = np.argsort(keys, kind="stable")
    ordered, numbers = keys[order], np.arange(len(keys))
    counts = np.empty(len(keys), dtype=np.int64)
    counts[order] = numbers - np.maximum.accumulate(np.where(np.diff(ordered, prepend=-1) != 0, numbers, 0))
    return counts


def columns_of(shape: Shape, programs: Mapping[Worker, Iterable[Instruction]]) -> Columns:
    """Convert instruction objects to columns.

    Raises ScheduleError for what is not a valid instruction, a peer outside the shape, or a number beyond 32 bits.
    """
    rows: list[tuple[int, ...]] = []
    offsets = [0]
    for worker in shape.workers():
        program = programs.get(worker, ())
        if not isinstance(program, Iterable):
            raise ScheduleError(f"programs: worker {worker}: {program!r} is not a list of instructions")
        for position, instruction in enumerate(program):
            try:
                rows.append(_row(shape, worker, instruction))
            except (TypeError, ValueError, AttributeError):
                raise ScheduleError(
                    f"worker {worker}, position {position}: {_repr(instruction)} is not an instruction; one is,"
                    f" for example, Forward(stage=0, micro_batch=MicroBatch(0, 0)); Schedule.from_text takes text"
                ) from None
        offsets.append(len(rows))
    try:
        table = np.array(rows, dtype=np.int32).reshape(len(rows), len(Columns.FIELDS))
    except OverflowError:
        raise ScheduleError("an instruction has a stage or micro-batch number beyond 32 bits") from None
    named = {name: table[:, i] for i, name in enumerate(Columns.FIELDS)}
    return Columns.from_arrays(np.array(offsets, dtype=np.int64), **named)


def _row(shape: Shape, worker: Worker, instruction: Instruction) -> tuple[int, ...]:
    kind = int(instruction.kind)
    if isinstance(instruction, OverlappedPair):
        forward, backward = instruction.forward, instruction.backward
        of_forward = (index(forward.stage), *map(index, forward.micro_batch))
        return (kind, *of_forward, -1, index(backward.stage), *map(index, backward.micro_batch), -1)
    pipeline, place = getattr(instruction, "micro_batch", (-1, -1))
    peer, bucket = -1, index(getattr(instruction, "bucket", -1))
    if isinstance(instruction, Transfer):
        with errors_as(ScheduleError):
            shape.require(instruction.peer, f"worker {worker}: {instruction}")
        peer = shape.worker_index(instruction.peer)
    stage: int = index(instruction.stage)  # type: ignore[attr-defined]
    return (kind, stage, index(pipeline), index(place), peer, -1, -1, -1, bucket)


def _repr(value: object) -> str:
    if not isinstance(value, Instruction):
        return repr(value)
    operands = ", ".join(f"{field.name}={getattr(value, field.name)!r}" for field in fields(value))
    return f"{type(value).__name__}({operands})"


def consecutive(chains: tuple[Rows, Rows]) -> tuple[Rows, Rows]:
    """Return edges from each row of a chain to the next; `chains` is (chain, row), sorted by chain, then order."""
    chain, rows = chains
    same = chain[1:] == chain[:-1]
    return rows[:-1][same], rows[1:][same]


def chain_ends(chains: tuple[Rows, Rows]) -> tuple[Rows, Rows]:
    """Return (first row, last row) of each chain; `chains` as in `consecutive`."""
    chain, rows = chains
    return rows[np.diff(chain, prepend=-1) != 0], rows[np.diff(chain, append=-1) != 0]


def program_chains(columns: Columns, selected: Flags) -> tuple[Rows, Rows]:
    """Return (worker, row) of the selected rows, in program order."""
    rows = np.flatnonzero(selected)
    return columns.worker[rows].astype(np.int64), rows


def compute_chains(columns: Columns) -> tuple[Rows, Rows]:
    """Return (worker, row) of each compute, reduce and step, which a worker runs serially in program order."""
    return program_chains(columns, ~is_kind(columns.kind, AsyncInstruction))


def rows_before(columns: Columns, selected: Flags) -> Rows:
    """Return the last selected row before each row in its program, -1 without one."""
    at = np.where(selected, np.arange(len(columns)), -1)
    before = np.append(-1, np.maximum.accumulate(at)[:-1]) if len(at) else at
    return np.where(before >= columns.offsets[columns.worker], before, -1)


def compute_order(columns: Columns) -> tuple[Rows, Rows]:
    """Return edges from each compute, reduce or step to the next one of its worker."""
    return consecutive(compute_chains(columns))


def lane_chains(columns: Columns) -> tuple[Rows, Rows]:
    """Return (lane, row) of each send and copy to or from the host.

    The sends of a directed worker pair are serial, and so are the copies of a worker in one direction.
    """
    rows = np.flatnonzero(is_kind(columns.kind, (Send, HostCopy)))
    peer = columns.peer[rows]
    other_end = np.where(peer < 0, np.int64(2**31) + columns.kind[rows], peer)
    lane = columns.worker[rows].astype(np.int64) << 32 | other_end
    order = np.argsort(lane, kind="stable")
    return lane[order], rows[order]
