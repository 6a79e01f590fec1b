"""The interpreter: reduces never deadlock, and halves of an overlapped pair run concurrently."""

import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from types import SimpleNamespace

import pytest
import torch

from recycle import MicroBatch, Schedule, Shape, Worker, check
from recycle.exec.model.stage import StateLayout
from recycle.exec.transport.base import sum_groups
from recycle.exec.worker.interpreter import Interpreter
from recycle.ir.instruction import Backward, Forward, OptimizerStep, ReduceGradients, parse_instruction
from tests.exec.accelerator.device import Device
from tests.exec.accelerator.stage import QueuedStage
from tests.exec.drive import build_pipeline, small_job


def schedule_of_shared_stages(draw: random.Random) -> Schedule:
    """Workers with random stages, some of them tied, that they reduce in random orders; otherwise valid."""
    workers, stages = draw.randint(2, 4), draw.randint(2, 4)
    shape = Shape(workers, 1, 1, stages)
    hosts = [draw.sample(range(workers), draw.randint(1, workers)) for _ in range(stages)]
    programs = {worker: [] for worker in shape.workers()}
    for k in range(workers):
        route = [Worker(draw.choice(live), 0) for live in hosts]
        for s, worker in enumerate(route):
            programs[worker].append(Forward(s, MicroBatch(k, 0)))
        for s, worker in reversed([*enumerate(route)]):
            programs[worker].append(Backward(s, MicroBatch(k, 0)))
    placement = {worker: [s for s in range(stages) if worker.pipeline in hosts[s]] for worker in programs}
    agreed = draw.sample(range(stages), stages)
    for worker, hosted in placement.items():
        order = sorted(hosted, key=agreed.index) if draw.random() < 0.7 else draw.sample(hosted, len(hosted))
        programs[worker] += [*map(ReduceGradients, order), *map(OptimizerStep, order)]
    ties = [draw.sample(range(stages), draw.randint(1, stages)) for _ in range(draw.randint(0, 2))]
    return Schedule.build(shape, programs, placement=placement, ties=ties)


def sums_of(schedule: Schedule, worker: Worker) -> list[int]:
    """The sums that a worker's interpreter requests from its transport, in order."""
    asked = []
    transport = SimpleNamespace(reduce=lambda group, *_: asked.append(group))
    layout = SimpleNamespace(reduce=lambda *given: StateLayout.reduce(None, *given))
    stages = {
        index: SimpleNamespace(index=index, gradient_bucket=lambda *_: [], tied_buffers=list, layout=layout)
        for index in schedule.stages_of(worker)
    }
    interpreter = Interpreter(stages, schedule.shape.stages, transport, lambda _: None, ties=schedule.ties)
    for instruction in schedule.program(worker):
        if isinstance(instruction, ReduceGradients):
            interpreter.reduce(instruction.stage)
    return asked


def all_sums_end(schedule: Schedule) -> bool:
    """Whether no worker waits forever if each sum ends as soon as all of its hosts have reached it."""
    asked = {worker: sums_of(schedule, worker) for worker in schedule.live}
    hosts = sum_groups(schedule)
    ended = True
    while ended:
        ended = False
        for group in {sums[0] for sums in asked.values() if sums}:
            if all(asked[worker][:1] == [group] for worker in hosts[group]):
                for worker in hosts[group]:
                    del asked[worker][0]
                ended = True
    return not any(asked.values())


@pytest.mark.slow
def test_reduces_of_valid_schedules_end():
    counts = {True: 0, False: 0}
    for seed in range(300):
        schedule = schedule_of_shared_stages(random.Random(seed))
        is_valid = not any(finding.severity == "error" for finding in check(schedule))
        counts[is_valid] += 1
        if is_valid:
            assert all_sums_end(schedule), f"seed {seed}: {schedule.text()}, ties {schedule.ties}"
    assert min(counts.values()) > 50


LATE = 20.0
PROGRAM = ["0F0", "(0F1;0B0)", "(0F2;0B1)", "0F3", "0B2", "(0F4;0B3)", "0B4"]
"""Pairs whose backwards run on either stream, with forwards and backwards that run alone."""
PARTS = [["F0"], ["B0", "F1"], ["B1", "F2"], ["F3"], ["B2"], ["B3", "F4"], ["B4"]]


class Streamed(Device):
    """A device with a second stream to compute on."""

    def __init__(self):
        super().__init__(eager=True)
        self.main, self.side = self.compute, self.draw()

    @contextmanager
    def on_other_stream(self, tensors) -> Iterator[None]:
        before = self.main.launch(lambda: None)
        self.side.launch(before.wait)
        self.compute = self.side
        try:
            yield
        finally:
            self.compute = self.main

    def join(self):
        done = self.side.launch(lambda: None)
        self.main.launch(done.wait)


class Nowhere:
    """The transport of a worker that is alone."""

    def begin(self, *_):
        return


class Meeting:
    """A stage that records its forwards and backwards; those in `meet` wait for each other."""

    index, _is_first, _is_last = 0, True, True

    def __init__(self, meet: set[str]):
        self._meet, self._barrier = meet, threading.Barrier(2, timeout=LATE)
        self.ran = []
        self.running = 0
        self.most = 0

    def __getattr__(self, name: str):
        return lambda *_: None

    def forward(self, micro_batch: MicroBatch, _):
        self._run(f"F{micro_batch.index}")

    def backward(self, micro_batch: MicroBatch, _):
        self._run(f"B{micro_batch.index}")

    def _run(self, name: str):
        self.running += 1
        self.most = max(self.most, self.running)
        if name in self._meet:
            self._barrier.wait()
        self.ran.append(name)
        self.running -= 1


def interpreted(stage, device: Streamed, with_streams: bool) -> Interpreter:
    """Run an iteration of a program of one stage on the device."""
    instructions = [parse_instruction(text, one_pipeline=True) for text in PROGRAM]
    stages = {0: QueuedStage(stage, device)}
    interpreter = Interpreter(stages, 1, Nowhere(), lambda _: None, streams=device if with_streams else None)
    interpreter.begin(instructions, 0)
    for instruction in instructions:
        interpreter.execute(instruction)
    device.synchronize()
    return interpreter


def test_halves_of_a_pair_run_concurrently():
    stage = Meeting({"F1", "B0", "F2", "B1", "F4", "B3"})  # each waits for the other half of its pair
    interpreter = interpreted(stage, Streamed(), with_streams=True)
    assert stage.most == 2
    assert len(interpreter.executed) == 10
    # Pairs run one after another, and other instructions run alone.
    order = iter(stage.ran)
    parts = [sorted(islice(order, len(part))) for part in PARTS]
    assert parts == PARTS


def test_backward_runs_on_the_stream_of_its_forward():
    device = Streamed()
    where = {}

    class Noted(Meeting):
        def _run(self, name: str):
            where[name] = device.side.is_current

    interpreted(Noted(set()), device, with_streams=True)
    assert all(where[f"F{j}"] == where[f"B{j}"] for j in range(5))
    assert all(where[forward] != where[backward] for forward, backward in (("F1", "B0"), ("F2", "B1"), ("F4", "B3")))


@pytest.mark.parametrize("accumulation", ["exact", "fast"])
def test_two_streams_have_the_bits_of_one(accumulation):
    results = []
    for with_streams in (False, True):
        (stage,) = build_pipeline(small_job(1, 1, 5, model={"layers": 1}, train={"accumulation": accumulation}))
        interpreted(stage, Streamed(), with_streams)
        assert stage.held_micro_batches() == 0
        results.append((stage.loss_sum(), [buffer.clone() for buffer in stage.gradient_buffers()]))
    (loss, sums), (other_loss, others) = results
    assert loss == other_loss
    assert all(map(torch.equal, sums, others))
