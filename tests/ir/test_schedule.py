"""Schedule: builders refuse programs and options outside the shape, equality ignores metadata."""

from __future__ import annotations

from typing import Any

import pytest

from recycle import MicroBatch, Schedule, ScheduleError, Shape, Worker, lower
from recycle.ir.families import one_f_one_b
from recycle.ir.instruction import Forward, SendActivation
from recycle.ir.schedule import loop_placement


def test_chunks_go_around_the_ranks_unless_placed() -> None:
    assert loop_placement(Shape(2, 2, 1, chunks=2)) == ((0, 2), (1, 3), (0, 2), (1, 3))
    schedule = Schedule.from_text(Shape(2, 2, 1, chunks=2), {}, placement={"0.1": [1, 2, 3]}, failed=["1.0"])
    assert schedule.hosts(2) == [Worker(0, 0), Worker(0, 1)]
    assert schedule.live == [Worker(0, 0), Worker(0, 1), Worker(1, 1)]
    assert schedule.failure_vector() == (1, 0)


def test_equality_is_the_order_not_the_metadata() -> None:
    schedule = one_f_one_b(Shape(1, 2, 2))
    assert schedule.with_metadata(note="x") == schedule
    assert schedule != one_f_one_b(Shape(1, 2, 2), "barrier")
    assert schedule != lower(schedule)
    assert schedule != 3
    with pytest.raises(TypeError, match="unhashable"):
        hash(schedule)


WORKER, F = Worker(0, 0), Forward(0, MicroBatch(0, 0))


@pytest.mark.parametrize(
    ("programs", "options", "message"),
    [
        ({"x": []}, {}, "'x' is not a worker"),
        ({"0.5": []}, {}, r"programs: worker 0\.5 is outside the grid"),
        ({"0.0": [], "00.0": []}, {}, r"programs: worker 0\.0 is listed twice"),
        ({"0.0": ["0F0.0"]}, {}, r"worker 0\.0, position 0: '0F0\.0' is not an instruction; .*from_text takes"),
        ({"0.0": [F, Forward(0, 0)]}, {}, r"position 1: Forward\(stage=0, micro_batch=0\) is not an instruction"),
        ({WORKER: [Forward(2**40, MicroBatch(0, 0))]}, {}, "beyond 32 bits"),
        ({WORKER: [SendActivation(0, MicroBatch(0, 0), Worker(0, 9))]}, {}, r"worker 0\.9 is outside the grid"),
        ({"0.0": 5}, {}, r"programs: worker 0\.0: 5 is not a list of instructions"),
        (None, {}, r"programs: None is not a mapping from workers: write \{'0\.0': \.\.\.\}"),
        ({}, {"placement": {"0.0": [5]}}, r"placement: worker 0\.0: 5 is not a stage \(0 to 1\)"),
        ({}, {"placement": {"0.0": [0.5]}}, r"placement: worker 0\.0: 0\.5 is not a stage"),
        ({}, {"placement": {"0.0": 0}}, r"placement: worker 0\.0: 0 is not a list of stages: write \[0\]"),
        ({}, {"placement": {"0.0": [1, 1]}}, r"placement: worker 0\.0 hosts a stage twice"),
        ({}, {"placement": ((0,),)}, "placement: lists 1 workers, the shape has 2"),
        ({}, {"placement": 3}, "placement: 3 is not a mapping from workers"),
        ({}, {"ties": 3}, r"ties: 3 is not a list of groups of stages: write for example \[\[0, 3\]\]"),
        ({}, {"failed": ["7.0"]}, r"failed workers: worker 7\.0 is outside"),
        ({}, {"failed": "0.0"}, r"failed workers: '0\.0' is not a list of workers: write for example \['0\.1'\]"),
        ({}, {"optimizer": "never"}, "must be 'staggered' or 'barrier'"),
        ({}, {"buckets": 0}, "buckets must be a whole number"),
        ({}, {"gathers": 1}, "gathers must be true or false"),
        ({}, {"metadata": [1]}, r"metadata: \[1\] is not a mapping"),
    ],
)
def test_invalid_programs_and_options_are_refused_by_name(programs: Any, options: Any, message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        Schedule.build(Shape(1, 2, 1), programs, **options)
