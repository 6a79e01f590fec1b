"""The Megatron schedule table: megatron-core's own tables and orders are read as our families, and written equal."""

from __future__ import annotations

import importlib
import json
from dataclasses import dataclass
from typing import Any

import pytest

from recycle import Schedule, ScheduleError, Shape, check
from recycle.ir import formats
from recycle.ir.families import interleaved, zb_h1
from recycle.ir.formats import megatron_table
from tests import DOCS

GRID = [
    (ranks, chunks, micro_batches, size)
    for ranks in (2, 3, 4)
    for chunks in (2, 3)
    for micro_batches in (4, 6, 8, 10)
    for size in (2, 3, 4, 6, 8, 10)
    if ranks <= size <= micro_batches and (micro_batches % size == 0 or micro_batches % size >= ranks)
]
"""(P, V, m, N) that Megatron runs: N in [P, m], and no last group of fewer than P."""


@dataclass
class RankOf:
    """A pipeline group as far as `get_pp_rank_microbatches` asks for one; it stands for the communicator as well."""

    ranks: int
    place: int
    virtual_pipeline_model_parallel_size: int | None

    @property
    def pp_group(self) -> RankOf:
        return self

    def size(self) -> int:
        return self.ranks

    def rank(self) -> int:
        return self.place


@dataclass
class Megatron:
    """megatron-core's table, and the order of chunks that it makes of it on each rank."""

    schedules: Any
    cuda_graphs: Any

    def table(self, chunks: int, micro_batches: int, size: int) -> list[tuple[int, int]]:
        return self.schedules.get_schedule_table(micro_batches, chunks, size)

    def orders(self, ranks: int, chunks: int, micro_batches: int, size: int) -> list[list[int]]:
        orders = []
        for rank in range(ranks):
            group = RankOf(ranks, rank, chunks if chunks > 1 else None)
            numbers = self.schedules.get_pp_rank_microbatches(micro_batches, chunks, size, p2p_communicator=group)
            table = self.table(chunks, micro_batches, size)
            orders.append(self.cuda_graphs.convert_schedule_table_to_order(numbers[2], chunks, table))
        return orders


@pytest.fixture(scope="module")
def megatron():
    pytest.importorskip("megatron.core")
    names = ("megatron.core.pipeline_parallel.schedules", "megatron.core.transformer.cuda_graphs")
    return Megatron(*map(importlib.import_module, names))


def file(**entries) -> bytes:
    return json.dumps({"format": "megatron-schedule-table", "version": 1, **entries}).encode()


def read(**entries) -> Schedule:
    return megatron_table.loads(file(**entries), "table.json")


def test_tables_and_orders_of_megatron_core_are_read_as_the_interleaved_family_and_written(megatron):
    assert len(GRID) == 58
    for ranks, chunks, micro_batches, size in GRID:
        table = megatron.table(chunks, micro_batches, size)
        orders = megatron.orders(ranks, chunks, micro_batches, size)
        schedule = interleaved(Shape(1, ranks, micro_batches, chunks), group_size=size)
        assert read(ranks=ranks, table=table) == read(ranks=ranks, orders=orders) == schedule
        written = json.loads(megatron_table.dumps(schedule))
        assert (written["orders"], [tuple(entry) for entry in written["table"]]) == (orders, table)
        assert check(schedule) == []


def test_the_line_on_the_format_page_writes_a_table_that_is_read(megatron, tmp_path, monkeypatch):
    page = (DOCS / "reference" / "file-format.md").read_text()
    (line,) = [line.strip() for line in page.splitlines() if line.startswith("    json.dump(")]
    monkeypatch.chdir(tmp_path)
    exec(line, {"json": json, "get_schedule_table": megatron.schedules.get_schedule_table, "open": open})
    assert formats.read("table.json") == interleaved(Shape(1, 4, 8, 2))


FULL = {"ranks": 2, "table": [[0, 0], [1, 0], [0, 1], [1, 1]]}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"[[0, 0], [1, 0]]", r"a table does not state the number of ranks: write \{.*\"ranks\": P"),
        (file(ranks=2), '"table" or "orders" is required'),
        (file(**FULL, chunks=3), "chunks is 3, but table has 2"),
        (file(ranks=2, table=[[0, 0], [1, 0], [0, 1]]), r"3 entries, but 2 micro-batches in 2 chunk\(s\) need 4"),
        (
            file(ranks=2, table=[[0, 0], [1, 0], [1, 1], [0, 1]]),
            r"table\[2\] is \[1, 1\], Megatron's table with groups of 2 micro-batches has \[0, 1\]",
        ),
        (file(ranks=1, table=FULL["table"]), "interleaves on two ranks or more, not 2 chunks on one"),
        (
            file(ranks=2, table=[(j, c) for g in ((0, 1), (2,)) for c in (0, 1) for j in g]),
            "group_size must be micro_batches = 3, or at least ranks = 2 with no smaller last group, got 2",
        ),
        (file(**FULL, orders=[[1, 1]]), "orders: 1 lists for 2 ranks"),
        (
            file(**FULL, orders=[[1, 1, 2, 2, -2, -2, -1, -1], [1, 1, 2, 2, -2, -2, -1, -1]]),
            r"orders\[1\]\[3\] is 2, Megatron's order has -2",
        ),
    ],
)
def test_a_table_that_megatron_would_not_make_is_refused_by_place(content, message):
    with pytest.raises(ScheduleError, match=rf"^t\.json: .*{message}"):
        megatron_table.loads(content, "t.json")


def changed(worker: str, program: str, **keywords) -> Schedule:
    """Interleaved 1F1B on two ranks of two chunks with one program replaced."""
    schedule = interleaved(Shape(1, 2, 2, 2))
    return Schedule.from_text(schedule.shape, {**schedule.text(), worker: program}, **keywords)


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        (interleaved(Shape(2, 2, 2, 2)), "2 pipelines: .* build the schedule with D = 1"),
        (changed("0.0", "0F0", placement={"0.0": [0, 3], "0.1": [1, 2]}), "this placement"),
        (changed("0.0", ""), r"the end on worker 0.0 \(position 0\): Megatron has 0F0.0"),
        (
            changed("0.1", "1F0 1F1 3F0 3F1 3B0 3B1 1B0 1B1"),
            r"3F0.1 on worker 0.1 \(position 3\): Megatron has 3B0.0",
        ),
        (
            changed("0.0", "0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1 0B1"),
            r"0B0.1 on worker 0.0 \(position 8\): Megatron has the end",
        ),
        (zb_h1(Shape(1, 2, 3)), r"0I0.0 on worker 0.0 \(position 2\): Megatron has 0B0.0"),
        (interleaved(Shape(1, 3, 2, 2), group_size=2), "groups of 2 micro-batches, by the first forwards"),
    ],
)
def test_an_order_that_megatron_does_not_run_is_refused_by_place(schedule, message):
    with pytest.raises(ScheduleError, match=f"^a Megatron schedule table cannot hold .*{message}"):
        megatron_table.dumps(schedule)
