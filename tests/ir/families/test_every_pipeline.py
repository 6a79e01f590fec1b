"""Tiling: every pipeline runs what one runs, on its own micro-batches."""

import time

import numpy as np
import pytest

from recycle import MicroBatch, Schedule, Shape, Worker
from recycle.ir.families import FAMILIES
from recycle.ir.families.every_pipeline import every_pipeline
from recycle.ir.instruction import Backward, Forward, OverlappedPair
from tests.ir.families.chunks import chunks_of

SEARCHED = {"v-half", "v-min"}
"""Families whose order is searched for, which takes longer."""
FIRST, SECOND = MicroBatch(0, 0), MicroBatch(0, 1)


def test_copies_differ_in_their_home_pipeline_only() -> None:
    pair = OverlappedPair(Forward(0, SECOND), Backward(0, FIRST))
    programs = [[Forward(0, FIRST), pair, Backward(0, SECOND)]]
    schedule = every_pipeline(Shape(3, 1, 2), programs, optimizer="barrier", metadata={"family": "pair"})
    assert schedule.text() == {f"{k}.0": f"0F{k}.0 (0F{k}.1;0B{k}.0) 0B{k}.1" for k in range(3)}
    assert (schedule.optimizer, schedule.metadata) == ("barrier", {"family": "pair"})


def test_columns_and_placement_are_those_of_a_schedule_built_worker_by_worker() -> None:
    shape = Shape(2, 2, 2, 2)
    stages = [(0, 3), (2, 1)]
    one = [[Work(s, j) for Work in (Forward, Backward) for s in hosted for j in (FIRST, SECOND)] for hosted in stages]
    tiled = every_pipeline(shape, one, optimizer="staggered", metadata={}, stages=stages)
    whole = Schedule.build(
        shape,
        {
            Worker(k, r): [type(i)(i.stage, MicroBatch(k, i.micro_batch.index)) for i in one[r]]
            for k in range(2)
            for r in range(2)
        },
        placement=tuple(stages * 2),
    )
    assert tiled == whole


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_a_large_job_is_built_in_a_moment(family: str) -> None:
    shape = Shape(24, 64, 128, chunks_of(family))
    began = time.process_time()
    schedule = FAMILIES[family](shape)
    assert time.process_time() - began < (4 if family in SEARCHED else 1)
    forwards = np.isin(schedule.columns.kind, (Forward.kind, OverlappedPair.kind)).sum()
    assert forwards == shape.stages * shape.global_micro_batches
