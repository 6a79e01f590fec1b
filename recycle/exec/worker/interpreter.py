"""The interpreter: a worker runs its program; instruction class -> method.

What an instruction waits for is asked of `ir.dependencies.needs`, never known here. A value that the worker made
itself is at hand; one made elsewhere was announced by a RECV, and the consumer waits for it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from recycle.exec.model.stage import Stage
from recycle.exec.transport.base import Pending, Transport
from recycle.ir.dependencies import NEEDS, Value, ValueKind, needs
from recycle.ir.instruction import (
    NEEDED_KINDS,
    Backward,
    BackwardInput,
    BackwardWeight,
    Compute,
    Forward,
    Instruction,
    OptimizerStep,
    OverlappedPair,
    RecvActivation,
    RecvGradient,
    ReduceGradients,
    RedundantForward,
    SendActivation,
    SendGradient,
)

Timed = tuple[str, float, float]
"""Text of an instruction, and when it started and ended (monotonic seconds)."""


class Interpreter:
    """Runs programs on the stages of one worker.

    Args:
        stages: the stages that this worker hosts.
        model_stages: S, the stages of the whole model.
        transport: how tensors reach other workers.
        step: called by STEP with the stage; steps its optimizer.
        computed: called after each F, I, W, B and R with its seconds, while it still counts as running.
        ties: groups of stages that share a weight.

    Attributes:
        timed: when each instruction of the iteration ran.
        compute: `<stage><F|I|W|B>` -> (how many ran in the iteration, their seconds on this process's clock). Waiting
            for inputs is not part of them.
    """

    def __init__(
        self,
        stages: Mapping[int, Stage],
        model_stages: int,
        transport: Transport,
        step: Callable[[int], None],
        computed: Callable[[float], None] = lambda _: None,
        ties: Sequence[Sequence[int]] = (),
    ) -> None:
        self.stages, self.model_stages, self.transport, self.step = stages, model_stages, transport, step
        self._computed, self._ties = computed, ties
        self.timed: list[Timed] = []
        self.compute: dict[str, tuple[int, float]] = {}
        self._values: dict[Value, torch.Tensor | Pending | None] = {}
        self._reduced_ties: set[int] = set()
        self._read_twice: set[Value] = set()
        self._redundant: set[Value] = set()

    def begin(self, program: Sequence[Instruction], iteration: int) -> None:
        """Start an iteration from a clean state, whatever the one before left behind."""
        self.timed, self.compute, self._values, self._reduced_ties = [], {}, {}, set()
        # What goes to the next stage is the input of its redundant forward too.
        doubled = (one for one in program if isinstance(one, RedundantForward))
        self._read_twice = {value for one in doubled for value in needs(one, self.model_stages)}
        self._redundant = set()
        for stage in self.stages.values():
            stage.begin_iteration(iteration)
        self.transport.begin(program, iteration)

    def execute(self, instruction: Instruction) -> None:
        """Run one instruction: wait for its inputs, then do it."""
        if isinstance(instruction, OverlappedPair):
            self.execute(instruction.forward)
            self.execute(instruction.backward)
            return
        inputs = [] if isinstance(instruction, _TRANSFERS) else self._inputs(instruction)
        started = time.monotonic()
        _METHODS[type(instruction)](self, instruction, *inputs)
        if isinstance(instruction, Compute):
            self._computed(time.monotonic() - started)
        ended = time.monotonic()
        self.timed.append((str(instruction), started, ended))
        if instruction.kind in NEEDED_KINDS:
            key = f"{_stage(instruction)}{instruction.token}"
            count, seconds = self.compute.get(key, (0, 0.0))
            self.compute[key] = (count + 1, seconds + ended - started)

    def _inputs(self, instruction: Instruction) -> list[torch.Tensor | None]:
        """The values of other stages that the instruction consumes; None stands for the end of the model."""
        others = [value for value in needs(instruction, self.model_stages) if value.stage != _stage(instruction)]
        expected = sum(1 for _, offset in NEEDS.get(instruction.kind, ()) if offset != 0)
        found = [self._take(value) for value in others]
        return found + [None] * (expected - len(found))

    def _take(self, value: Value) -> torch.Tensor | None:
        if value in self._read_twice:
            self._read_twice.remove(value)
            made = self._values[value]
        else:
            made = self._values.pop(value)
        return made() if callable(made) and not isinstance(made, torch.Tensor) else made

    def _forward(self, instruction: Forward, activation: torch.Tensor | None) -> None:
        output = self.stages[instruction.stage].forward(instruction.micro_batch, activation)
        self._values[Value(ValueKind.ACTIVATION, instruction.stage, instruction.micro_batch)] = output

    def _redundant_forward(self, instruction: RedundantForward, activation: torch.Tensor | None) -> None:
        self.stages[instruction.stage].redundant_forward(instruction.micro_batch, activation)
        self._redundant.add(Value(ValueKind.ACTIVATION, instruction.stage, instruction.micro_batch))

    def _release(self, backward: Backward | BackwardInput) -> None:
        """The gradient of the stage behind is here, so that nobody wants what its redundant forward holds."""
        held = Value(ValueKind.ACTIVATION, backward.stage + 1, backward.micro_batch)
        if held in self._redundant:
            self._redundant.remove(held)
            self.stages[held.stage].release(held.micro_batch)

    def _backward(self, instruction: Backward, gradient: torch.Tensor | None) -> None:
        self._release(instruction)
        result = self.stages[instruction.stage].backward(instruction.micro_batch, gradient)
        self._values[Value(ValueKind.INPUT_GRADIENT, instruction.stage, instruction.micro_batch)] = result

    def _backward_input(self, instruction: BackwardInput, gradient: torch.Tensor | None) -> None:
        self._release(instruction)
        result = self.stages[instruction.stage].backward_input(instruction.micro_batch, gradient)
        self._values[Value(ValueKind.INPUT_GRADIENT, instruction.stage, instruction.micro_batch)] = result

    def _backward_weight(self, instruction: BackwardWeight) -> None:
        self.stages[instruction.stage].backward_weight(instruction.micro_batch)

    def _send(self, instruction: SendActivation | SendGradient) -> None:
        tensor = self._take(needs(instruction, self.model_stages)[0])
        assert tensor is not None, f"{instruction}: the last stage sends no activation, the first no gradient"
        self.transport.send(instruction, tensor)

    def _receive(self, instruction: RecvActivation | RecvGradient) -> None:
        self._values[needs(instruction, self.model_stages)[0]] = self.transport.receive(instruction)

    def _reduce(self, instruction: ReduceGradients) -> None:
        stage = self.stages[instruction.stage]
        self.transport.reduce(instruction.stage, stage.gradient_buffers())
        for place, tie in enumerate(self._ties):
            # Tied stages reduce as one, at the first of their reduces on this worker.
            if instruction.stage in tie and place not in self._reduced_ties:
                self._reduced_ties.add(place)
                self.transport.reduce(self.model_stages + place, stage.tied_buffers())

    def _step(self, instruction: OptimizerStep) -> None:
        self.step(instruction.stage)


_TRANSFERS = (SendActivation, SendGradient, RecvActivation, RecvGradient)
_METHODS: dict[type[Instruction], Any] = {
    Forward: Interpreter._forward,
    RedundantForward: Interpreter._redundant_forward,
    Backward: Interpreter._backward,
    BackwardInput: Interpreter._backward_input,
    BackwardWeight: Interpreter._backward_weight,
    SendActivation: Interpreter._send,
    SendGradient: Interpreter._send,
    RecvActivation: Interpreter._receive,
    RecvGradient: Interpreter._receive,
    ReduceGradients: Interpreter._reduce,
    OptimizerStep: Interpreter._step,
}


def _stage(instruction: Any) -> int:
    return int(getattr(instruction, "stage", -1))
