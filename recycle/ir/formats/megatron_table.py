"""Megatron's interleaved schedule as data: its schedule table, and the chunk order of each rank.

    {"format": "megatron-schedule-table", "version": 1, "ranks": 2, "chunks": 2, "micro_batches": 2,
     "table": [[0, 0], [1, 0], [0, 1], [1, 1]],
     "orders": [[1, 1, 2, 2, -2, -2, -1, -1], [1, 1, 2, -2, 2, -2, -1, -1]]}

`table` is the result of megatron-core's `get_schedule_table(micro_batches, chunks, group_size)`, `orders` of
`convert_schedule_table_to_order` per rank: a forward of chunk c is c + 1, a backward -(c + 1); the n-th of either is
micro-batch n (megatron-core 0.16.1, pipeline_parallel/schedules.py and transformer/cuda_graphs.py). Reading needs
`ranks` and one of the two. Only the families that Megatron runs are accepted: `interleaved` (groups of at least P
micro-batches, several ranks) and `1f1b` (one chunk) with D = 1.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from typing import Annotated

import msgspec
import numpy as np

from recycle.errors import ScheduleError, errors_as
from recycle.files import decoded
from recycle.ir.columns import MOST_INSTRUCTIONS, require_few
from recycle.ir.families.loop import interleaved, one_f_one_b, units
from recycle.ir.formats.schedule_input import OrderOnly, first_difference
from recycle.ir.instruction import KIND_CLASSES, Compute, Forward, OverlappedPair, WaitSend, is_kind
from recycle.ir.schedule import Schedule, loop_placement
from recycle.job.shape import Shape

FORMAT, VERSION = "megatron-schedule-table", 1
_FORMAT = OrderOnly("a Megatron schedule table", "every rank runs")

_Number = Annotated[int, msgspec.Meta(ge=0, lt=10**9)]
_Size = Annotated[int, msgspec.Meta(ge=1, lt=10**9)]
Table = list[tuple[int, int]]
"""(micro-batch, chunk) of each forward of a rank."""


class _File(msgspec.Struct, forbid_unknown_fields=True):
    format: str
    version: int
    ranks: _Size
    chunks: _Size | None = None
    micro_batches: _Size | None = None
    table: list[tuple[_Number, _Number]] | None = None
    orders: list[list[int]] | None = None


def recognises(content: bytes) -> bool:
    """Return whether a file with this beginning names this format or is a bare table, which `loads` refuses."""
    return f'"{FORMAT}"'.encode() in content[:4096] or _is_table_alone(content)


def _is_table_alone(content: bytes) -> bool:
    return re.match(rb"\s*\[\s*[\[(]", content) is not None


def loads(content: bytes, name: str = "table", most: int = MOST_INSTRUCTIONS) -> Schedule:
    """Parse the table or orders as a compute-only schedule; `name` begins every error message.

    Raises ScheduleError for an incomplete table or an order that Megatron would not run.
    """
    if _is_table_alone(content):
        raise ScheduleError(
            f'{name}: a table does not state the number of ranks: write {{"format": "{FORMAT}",'
            f' "version": {VERSION}, "ranks": P, "table": [[micro_batch, chunk], ...]}}'
        )
    with errors_as(ScheduleError, name):
        require_few(content.count(b",") // 2, "", most)  # half of a table's commas separate entries
        return _read(decoded(content, _File, ScheduleError), most)


def _read(file: _File, most: int) -> Schedule:
    if (file.format, file.version) != (FORMAT, VERSION):
        raise ScheduleError(
            f'is "{file.format}" version {file.version}; this recycle reads "{FORMAT}" version {VERSION}'
        )
    if file.orders is not None and len(file.orders) != file.ranks:
        raise ScheduleError(f"orders: {len(file.orders)} lists for {file.ranks} ranks")
    source, table = "table", file.table
    if table is None:
        if file.orders is None:
            raise ScheduleError('"table" or "orders" is required')
        source, table = "orders[0], its forwards", _table_of(file.orders[0])
    if not table:
        raise ScheduleError(f"{source}: is empty")
    micro_batches, chunks = (max(numbers) + 1 for numbers in zip(*table, strict=True))
    for key, declared, actual in (
        ("micro_batches", file.micro_batches, micro_batches),
        ("chunks", file.chunks, chunks),
    ):
        if declared not in (None, actual):
            raise ScheduleError(f"{key} is {declared}, but {source} has {actual}")
    if len(table) != micro_batches * chunks:
        needed = f"{micro_batches} micro-batches in {chunks} chunk(s) need {micro_batches * chunks}"
        raise ScheduleError(f"{source}: {len(table)} entries, but {needed}")
    require_few(2 * file.ranks * len(table), f"{source}: on {file.ranks} ranks ", most)
    size = _group_size(table)
    expected = [[j, chunk] for chunk, j in units(micro_batches, chunks, size)]
    _require_same(source, [*map(list, table)], expected, f"Megatron's table with groups of {size} micro-batches")
    schedule = _run_by_megatron(Shape(1, file.ranks, micro_batches, chunks), size)
    for rank, (order, right) in enumerate(zip(file.orders or (), _orders(schedule), strict=False)):
        _require_same(f"orders[{rank}]", order, right, "Megatron's order")
    return schedule


def _require_same(name: str, actual: Sequence[object], expected: Sequence[object], source: str) -> None:
    if (difference := first_difference(actual, expected)) is not None:
        place, value, expected_value = difference
        raise ScheduleError(f"{name}[{place}] is {value}, {source} has {expected_value}")


def dumps(schedule: Schedule) -> str:
    """Return the file's text and log omissions; ScheduleError for an order that Megatron would not run."""
    shape = schedule.shape
    _FORMAT.require_one_pipeline(schedule)
    if schedule.placement != loop_placement(shape):
        raise _FORMAT.refusal("this placement", "chunk c of rank r is stage c * P + r")
    table = _table_of(_orders(schedule)[0])
    size = _group_size(table) if table else shape.ranks
    try:
        right = _run_by_megatron(shape, size)
    except ScheduleError as error:
        raise _FORMAT.refusal(
            f"groups of {size} micro-batches, by the first forwards of worker 0.0", str(error)
        ) from None
    work = [cls for cls in KIND_CLASSES if issubclass(cls, (Compute, OverlappedPair)) and not issubclass(cls, WaitSend)]
    _FORMAT.require_programs(schedule, right, "Megatron has", tuple(work))
    lowered = ["transfers, reduces and steps, which Megatron places itself"] if schedule.is_lowered else []
    _FORMAT.warn(schedule, *lowered)
    head = {"format": FORMAT, "version": VERSION, "ranks": shape.ranks, "chunks": shape.chunks}
    head |= {"micro_batches": shape.micro_batches}
    lines = [f"  {json.dumps(key)}: {json.dumps(value)}," for key, value in (*head.items(), ("table", table))]
    orders = ",\n".join(f"    {json.dumps(order)}" for order in _orders(schedule))
    return "{\n" + "\n".join(lines) + '\n  "orders": [\n' + orders + "\n  ]\n}\n"


def _run_by_megatron(shape: Shape, size: int) -> Schedule:
    if shape.chunks == 1:
        return one_f_one_b(shape)
    if shape.ranks == 1:
        raise ScheduleError(f"Megatron interleaves on two ranks or more, not {shape.chunks} chunks on one")
    if size < shape.ranks:
        raise ScheduleError(f"Megatron requires groups of at least as many micro-batches as ranks, {shape.ranks}")
    return interleaved(shape, group_size=size)


def _group_size(table: Table) -> int:
    return max(1, next((place for place, (_, chunk) in enumerate(table) if chunk), len(table)))


def _table_of(order: Sequence[int]) -> Table:
    count: Counter[int] = Counter()
    table = []
    for entry in order:
        if entry > 0:
            table.append((count[entry], entry - 1))
            count[entry] += 1
    return table


def _orders(schedule: Schedule) -> list[list[int]]:
    c = schedule.columns
    entries = np.where(c.kind == Forward.kind, 1, -1) * (c.stage // schedule.shape.ranks + 1)
    computes = is_kind(c.kind, Compute) & ~is_kind(c.kind, WaitSend)
    return [entries[begin:end][computes[begin:end]].tolist() for begin, end in pairwise(c.offsets.tolist())]
