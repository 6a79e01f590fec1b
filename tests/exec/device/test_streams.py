"""The halves of an overlapped pair run at the same time on a device with two streams, and to the same bits."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Any, cast

import pytest
import torch

from recycle.exec.model.megatron_stage import MegatronStage
from recycle.exec.model.stage import Stage
from recycle.exec.worker.interpreter import Interpreter
from recycle.ir.instruction import parse_instruction
from recycle.job.shape import MicroBatch
from tests.exec.accelerator.device import Device
from tests.exec.accelerator.stage import QueuedStage
from tests.exec.drive import build_pipeline, small_job

LATE = 20.0
PROGRAM = ["0F0", "(0F1;0B0)", "(0F2;0B1)", "0F3", "0B2", "(0F4;0B3)", "0B4"]
"""Pairs whose backwards ran on either stream; a forward beside whose backward stands alone, and the reverse."""


PARTS = [["F0"], ["B0", "F1"], ["B1", "F2"], ["F3"], ["B2"], ["B3", "F4"], ["B4"]]


class Streamed(Device):
    """A device with a second stream to compute on."""

    def __init__(self) -> None:
        super().__init__(eager=True)
        self.main, self.side = self.compute, self.stream("beside")

    @contextmanager
    def on_other_stream(self, tensors: object) -> Iterator[None]:
        before = self.main.launch(lambda: None)
        self.side.launch(before.wait)
        self.compute = self.side
        try:
            yield
        finally:
            self.compute = self.main

    def join(self) -> None:
        done = self.side.launch(lambda: None)
        self.main.launch(done.wait)


class Nowhere:
    """The transport of a worker that is alone."""

    def begin(self, *_: object) -> None:
        return


class Meeting:
    """A stage whose forwards and backwards note when they run; those that `meet` wait for one another."""

    index, _is_first, _is_last = 0, True, True

    def __init__(self, meet: set[str]) -> None:
        self._meet, self._barrier = meet, threading.Barrier(2, timeout=LATE)
        self.ran: list[str] = []
        self.running = 0
        self.most = 0

    def __getattr__(self, name: str) -> Any:
        return lambda *_: None

    def forward(self, micro_batch: MicroBatch, _: object) -> None:
        self._run(f"F{micro_batch.index}")

    def backward(self, micro_batch: MicroBatch, _: object) -> None:
        self._run(f"B{micro_batch.index}")

    def _run(self, name: str) -> None:
        self.running += 1
        self.most = max(self.most, self.running)
        if name in self._meet:
            self._barrier.wait()
        self.ran.append(name)
        self.running -= 1


def interpreted(stage: Any, device: Streamed, with_streams: bool, program: list[str] = PROGRAM) -> Interpreter:
    """An iteration of a program that a stage alone runs on the device."""
    instructions = [parse_instruction(text, one_pipeline=True) for text in program]
    stages = {0: cast(Stage, QueuedStage(stage, device))}
    interpreter = Interpreter(stages, 1, cast(Any, Nowhere()), lambda _: None, streams=device if with_streams else None)
    interpreter.begin(instructions, 0)
    for instruction in instructions:
        interpreter.execute(instruction)
    device.synchronize()
    return interpreter


def test_the_halves_of_a_pair_run_at_the_same_time() -> None:
    stage = Meeting({"F1", "B0", "F2", "B1", "F4", "B3"})  # each waits for the other half of its pair
    interpreter = interpreted(stage, Streamed(), with_streams=True)
    assert stage.most == 2
    assert len(interpreter.executed) == 10
    # Pairs come after one another, and what is no pair runs alone.
    order = iter(stage.ran)
    parts = [sorted(islice(order, len(part))) for part in PARTS]
    assert parts == PARTS


def test_a_backward_runs_on_the_stream_of_its_forward() -> None:
    device = Streamed()
    where: dict[str, bool] = {}

    class Noted(Meeting):
        def _run(self, name: str) -> None:
            where[name] = device.side.is_current

    interpreted(Noted(set()), device, with_streams=True)
    assert all(where[f"F{j}"] == where[f"B{j}"] for j in range(5))
    assert all(where[forward] != where[backward] for forward, backward in (("F1", "B0"), ("F2", "B1"), ("F4", "B3")))


@pytest.mark.parametrize("accumulation", ["exact", "fast"])
def test_losses_and_gradients_have_the_bits_of_one_stream(accumulation: str) -> None:
    found = []
    for with_streams in (False, True):
        (stage,) = build_pipeline(small_job(1, 1, 5, model={"layers": 1}, train={"accumulation": accumulation}))
        assert isinstance(stage, MegatronStage)
        interpreted(stage, Streamed(), with_streams)
        assert stage.held_micro_batches() == 0
        found.append((stage.loss_sum(), [buffer.clone() for buffer in stage.gradient_buffers()]))
    (loss, sums), (other_loss, others) = found
    assert loss == other_loss
    assert all(map(torch.equal, sums, others))
