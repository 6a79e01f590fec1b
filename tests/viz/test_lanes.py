"""A LaneTable holds what ran or is planned, lane by lane, and `lanes.bin` keeps all of it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from recycle import Profile, Schedule, Shape, Timeline, Worker, simulate
from recycle.ir.families import one_f_one_b
from recycle.ir.instruction import KIND_CLASSES, StageWide
from recycle.ir.lower import lowered_graph
from recycle.runs import logs as runs
from tests.viz.components import decode
from viz.figures.boxes import boxes
from viz.lane_cache import COLUMNS, encode
from viz.lanes import NO_PIPELINE, Flag, LaneTable, Marks


def texts(table: LaneTable, operations: np.ndarray) -> list[str]:
    return [str(table.instruction(int(operation))) for operation in operations]


def test_a_timeline_becomes_lanes_sorted_by_start(broken_timeline: Timeline) -> None:
    table = LaneTable.from_timeline(broken_timeline, marks=Marks([0]))
    assert table.failed.tolist() == [False, False, False, True, False, False]
    assert table.lane.tolist() == [0] * 6 + [1] * 9 + [2] * 7 + [4] * 6 + [5] * 9
    for lane in range(table.lanes):
        assert (np.diff(table.start[table.offsets[lane] : table.offsets[lane + 1]]) >= 0).all()
    critical = np.flatnonzero(table.has(Flag.CRITICAL))
    assert table.end[critical].max() == table.span == 11.0
    assert texts(table, np.flatnonzero(table.has(Flag.VIOLATION))) == ["0F0.0"]


def test_lanes_of_a_repartitioned_model_name_the_layers_of_each_worker(moved: Schedule) -> None:
    assert LaneTable.from_timeline(simulate(moved)).labels == (
        "0.0 \u00b7 0\u20134",
        "0.1",
        "1.0 \u00b7 0\u20131",
        "1.1 \u00b7 2\u20134",
    )


def test_a_deadlock_is_timed_and_later_instructions_follow_back_to_back(
    broken_timeline: Timeline,
) -> None:
    shape = Shape(pipelines=1, ranks=2, micro_batches=2)
    stuck = Schedule.from_text(shape, {"0.0": "0F0.0 0B0.0 0F0.1 0B0.1", "0.1": "1F0.0 1F0.1 1B0.0 1B0.1"})
    table = LaneTable.until_deadlock(lowered_graph(stuck), Profile.uniform())
    work = [i for i in range(len(table)) if table.end[i] > table.start[i]]
    assert [(str(table.instruction(i)), table.start[i]) for i in work] == [
        ("0F0.0", 0.0), ("0B0.0", 2.0), ("0F0.1", 4.0), ("0B0.1", 5.0),
        ("1F0.0", 1.0), ("1F0.1", 2.0), ("1B0.0", 3.0), ("1B0.1", 5.0),
    ]  # fmt: skip
    assert table.halt == 2.0
    assert LaneTable.from_timeline(broken_timeline).halt is None


def test_a_process_in_another_role_is_labelled_with_it(tmp_path: Path) -> None:
    shape = Shape(pipelines=2, ranks=1, micro_batches=1)
    runs.append_iteration(runs.log_path(tmp_path, Worker(1, 0)), 0, 1, "0.0", [("0F0.0", 1.0, 2.0)])
    table = LaneTable.from_trace(runs.read_logs(tmp_path, shape), Profile.uniform())
    assert table.labels == ("0.0 (by 1.0)", "1.0")
    assert not table.has(Flag.REROUTED).any()


def test_every_column_comes_back(broken_timeline: Timeline) -> None:
    wide = simulate(one_f_one_b(Shape(pipelines=300, ranks=1, micro_batches=1)))
    for table in (LaneTable.from_timeline(broken_timeline), LaneTable.from_timeline(wide)):
        read = decode(encode(table))
        homed = table.pipeline != NO_PIPELINE
        for name in COLUMNS:
            assert read[name][homed].tolist() == getattr(table, name)[homed].tolist()
        assert (read["pipeline"][~homed] == np.iinfo(read["pipeline"].dtype).max).all()
        assert read["offsets"].tolist() == table.offsets.tolist()


def test_microseconds_are_kept_late_in_a_long_run(tmp_path: Path) -> None:
    shape = Shape(pipelines=1, ranks=1, micro_batches=1)
    rows = [("0F0.0", 864_000.0, 864_000.000_010), ("0B0.0", 864_000.000_010, 864_000.000_030)]
    runs.append_iteration(runs.log_path(tmp_path, Worker(0, 0)), 7, 0, "0.0", rows)
    read = decode(encode(LaneTable.from_trace(runs.read_logs(tmp_path, shape), Profile.uniform())))
    assert read["origin"] == 864_000.0
    assert read["end"] == pytest.approx([10e-6, 30e-6], abs=1e-9)


def test_the_browser_draws_the_same_boxes_as_the_other_renderers(broken_timeline: Timeline) -> None:
    table = LaneTable.from_timeline(broken_timeline)
    description = decode(encode(table))["description"]
    drawn = []
    for operation, kind in enumerate(table.kind.tolist()):
        begin, length = table.start[operation], table.end[operation] - table.start[operation]
        for paint, first, last, top, bottom in description["kinds"][kind]["parts"]:
            fill = description["paints"][paint]["fill"]
            drawn.append((fill, begin + first * length, begin + last * length, top, bottom))
    assert drawn == [(box.paint.fill, box.start, box.end, box.top, box.bottom) for box in boxes(table)]
    assert [kind["homed"] for kind in description["kinds"]] == [not issubclass(cls, StageWide) for cls in KIND_CLASSES]
