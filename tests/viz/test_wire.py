"""`lanes.bin` keeps every column, tells how to draw them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from recycle import Shape, Timeline, Worker, simulate
from recycle.ir.families import one_f_one_b
from recycle.ir.instruction import KIND_CLASSES, StageWide
from recycle.runs import logs as runs
from tests.viz.lanes_bin import decode
from viz.figures.boxes import boxes
from viz.figures.palette import PAINTS
from viz.lanes import NO_PIPELINE, LaneTable
from viz.wire import COLUMNS, encode


def test_every_column_comes_back(broken_timeline: Timeline) -> None:
    table = LaneTable.from_timeline(broken_timeline)
    content = encode(table)
    read = decode(content)
    homed = table.pipeline != NO_PIPELINE
    for name in COLUMNS:
        column = getattr(table, name)
        assert read[name][homed].tolist() == column[homed].tolist()
    assert (read["pipeline"][~homed] == 255).all()
    assert read["offsets"].tolist() == table.offsets.tolist()
    assert read["origin"] == 0.0


def test_an_operation_takes_thirteen_bytes_while_its_numbers_are_small(broken_timeline: Timeline) -> None:
    table = LaneTable.from_timeline(broken_timeline)
    content = encode(table)
    described = int.from_bytes(content[12:16], "little")
    rounded = sum(-(-len(table) * size // 4) * 4 for size in (4, 4, 1, 1, 1, 1, 1))
    assert len(content) == 24 + 4 * 7 + rounded + described


def test_numbers_beyond_a_byte_are_kept() -> None:
    table = LaneTable.from_timeline(simulate(one_f_one_b(Shape(pipelines=300, ranks=1, micro_batches=1))))
    read = decode(encode(table))
    assert read["pipeline"].dtype == np.uint16
    assert sorted(set(read["pipeline"])) == [*range(300), 65535]


def test_microseconds_are_kept_late_in_a_long_run(tmp_path: Path) -> None:
    shape = Shape(pipelines=1, ranks=1, micro_batches=1)
    rows = [("0F0.0", 864_000.0, 864_000.000_010), ("0B0.0", 864_000.000_010, 864_000.000_030)]
    runs.append_iteration(runs.log_path(tmp_path, Worker(0, 0)), 7, 0, "0.0", rows)
    read = decode(encode(LaneTable.from_trace(runs.read_logs(tmp_path, shape))))
    assert read["origin"] == 864_000.0
    assert read["end"] == pytest.approx([10e-6, 30e-6], abs=1e-9)


def test_the_description_draws_the_same_boxes_as_the_other_renderers(broken_timeline: Timeline) -> None:
    table = LaneTable.from_timeline(broken_timeline)
    description = decode(encode(table))["description"]
    drawn = []
    for operation, kind in enumerate(table.kind.tolist()):
        begin, long = table.start[operation], table.end[operation] - table.start[operation]
        for paint, first, last, top, bottom in description["kinds"][kind]["parts"]:
            drawn.append((description["paints"][paint]["fill"], begin + first * long, begin + last * long, top, bottom))
    assert drawn == [(box.paint.fill, box.start, box.end, box.top, box.bottom) for box in boxes(table)]
    assert description["failed"] == [3]
    busy = [PAINTS[paint].key for paint in description["busy"]]
    assert busy == ["forward", "input", "weight", "optimizer", "redundant"]
    homed = [not issubclass(cls, StageWide) for cls in KIND_CLASSES]
    assert [kind["homed"] for kind in description["kinds"]] == homed
