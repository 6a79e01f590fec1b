"""Reduces are collective: what `check` passes comes to its end where every sum waits for all of its hosts."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any, cast

import pytest

from recycle import Schedule, Shape, check, lower
from recycle.exec.model.stage import ReplicatedState
from recycle.exec.transport.base import sum_groups
from recycle.exec.worker.interpreter import Interpreter
from recycle.ir.instruction import Backward, Forward, Instruction, OptimizerStep, ReduceGradients
from recycle.job.shape import MicroBatch, Worker


def schedule_of_shared_stages(draw: random.Random) -> Schedule:
    """Workers that host any stages each, some of them tied, and reduce them in any order; else valid."""
    workers, stages = draw.randint(2, 4), draw.randint(2, 4)
    shape = Shape(workers, 1, 1, stages)
    hosts = [draw.sample(range(workers), draw.randint(1, workers)) for _ in range(stages)]
    programs: dict[Worker, list[Instruction]] = {worker: [] for worker in shape.workers()}
    for k in range(workers):
        route = [Worker(draw.choice(live), 0) for live in hosts]
        for s, worker in enumerate(route):
            programs[worker].append(Forward(s, MicroBatch(k, 0)))
        for s, worker in reversed([*enumerate(route)]):
            programs[worker].append(Backward(s, MicroBatch(k, 0)))
    placement = {worker: [s for s in range(stages) if worker.pipeline in hosts[s]] for worker in programs}
    agreed = draw.sample(range(stages), stages)
    for worker, mine in placement.items():
        order = sorted(mine, key=agreed.index) if draw.random() < 0.7 else draw.sample(mine, len(mine))
        programs[worker] += [*map(ReduceGradients, order), *map(OptimizerStep, order)]
    ties = [draw.sample(range(stages), draw.randint(1, stages)) for _ in range(draw.randint(0, 2))]
    return Schedule.build(shape, programs, placement=placement, ties=ties)


def sums_of(schedule: Schedule, worker: Worker) -> list[int]:
    """The sums that the interpreter of a worker asks its transport for, in their order."""
    asked: list[int] = []
    transport = SimpleNamespace(reduce=lambda group, *_: asked.append(group))
    state = cast(Any, ReplicatedState)
    layout = SimpleNamespace(reduce=lambda *given: state.reduce(None, *given))
    stages: dict[int, Any] = {
        index: SimpleNamespace(index=index, gradient_bucket=lambda *_: [], tied_buffers=list, layout=layout)
        for index in schedule.stages_of(worker)
    }
    interpreter = Interpreter(stages, schedule.shape.stages, cast(Any, transport), lambda _: None, ties=schedule.ties)
    for instruction in schedule.program(worker):
        if isinstance(instruction, ReduceGradients):
            interpreter.reduce(instruction.stage)
    return asked


def come_to_their_end(schedule: Schedule) -> bool:
    """Whether no worker waits for ever when each sum ends as soon as all of its hosts have come to it."""
    asked = {worker: sums_of(schedule, worker) for worker in schedule.live}
    hosts = sum_groups(schedule)
    ended = True
    while ended:
        ended = False
        for group in {left[0] for left in asked.values() if left}:
            if all(asked[worker][:1] == [group] for worker in hosts[group]):
                for worker in hosts[group]:
                    del asked[worker][0]
                ended = True
    return not any(asked.values())


@pytest.mark.slow
def test_reduces_of_valid_schedules_end_with_stages_tied_or_not():
    counts = {True: 0, False: 0}
    for seed in range(600):
        schedule = schedule_of_shared_stages(random.Random(seed))
        is_valid = not any(finding.severity == "error" for finding in check(schedule))
        counts[is_valid] += 1
        if is_valid:
            assert come_to_their_end(schedule), f"seed {seed}: {schedule.text()}, ties {schedule.ties}"
    assert min(counts.values()) > 100


def test_a_worker_of_one_tied_stage_and_a_worker_of_two_do_not_wait_for_each_other():
    text = {"0.0": "0F0.0 0F1.0 1F0.0 1B0.0 1F1.0 1B1.0 0B0.0 0B1.0", "1.0": ""}
    schedule = Schedule.from_text(Shape(2, 1, 1, 2), text, placement={"1.0": [0]}, ties=[[0, 1]])
    assert check(schedule) == []
    assert come_to_their_end(lower(schedule))
