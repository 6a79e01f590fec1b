"""Buckets in the picture: parts of W's are work, and their sums a strip below it that keeps nobody busy."""

from __future__ import annotations

from dataclasses import replace

import pytest

from recycle import Profile, Shape, simulate
from recycle.ir.families import zb_h1
from recycle.ir.instruction import ReduceBucket, WeightPart
from viz.figures.boxes import STRIP_BOTTOM, STRIP_TOP, WORK_BOTTOM, WORK_TOP, boxes
from viz.lanes import LaneTable

SCHEDULE = replace(zb_h1(Shape(2, 3, 4)), buckets=3)
TIMELINE = simulate(SCHEDULE, Profile(reduce=2.0, step=0.5))


def test_sums_of_buckets_are_strips_below_the_parts_that_hide_them() -> None:
    table = LaneTable.from_timeline(TIMELINE)
    drawn = {table.instruction(box.operation): box for box in boxes(table) if box.lane == 0}
    sums = [box for instruction, box in drawn.items() if isinstance(instruction, ReduceBucket)]
    parts = [box for instruction, box in drawn.items() if isinstance(instruction, WeightPart)]
    assert len(sums) == 2
    assert len(parts) == 3
    assert {(box.top, box.bottom) for box in sums} == {(STRIP_TOP, STRIP_BOTTOM)}
    assert {(box.top, box.bottom) for box in parts} == {(WORK_TOP, WORK_BOTTOM)}
    assert any(one.start < part.end and part.start < one.end for one in sums for part in parts)


def test_work_and_gaps_still_cover_the_makespan_of_every_worker() -> None:
    lost = TIMELINE.gaps().seconds.sum(axis=1)
    for worker, busy in enumerate(TIMELINE.busy):
        assert busy + lost[worker] == pytest.approx(TIMELINE.makespan)
