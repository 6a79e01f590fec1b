"""Functions that run each class of instruction.

User-defined classes are registered here from their own file (see docs/guides/add-an-instruction.md). Imports no torch,
so every command can read such a file.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from recycle.errors import RunError
from recycle.ir.instruction import (
    Backward,
    BackwardInput,
    BackwardWeight,
    Forward,
    GatherParameters,
    Instruction,
    OptimizerStep,
    OverlappedPair,
    RecvActivation,
    RecvGradient,
    ReduceBucket,
    ReduceGradients,
    RedundantForward,
    Replay,
    SendActivation,
    SendGradient,
    WaitSendActivation,
    WaitSendGradient,
    WeightPart,
)

RUNS: dict[type[Instruction], Callable[..., Any]] = {
    Forward: lambda worker, one, activation: worker.stages[one.stage].forward(one.micro_batch, activation),
    Backward: lambda worker, one, gradient: worker.stages[one.stage].backward(one.micro_batch, gradient),
    BackwardInput: lambda worker, one, gradient: worker.stages[one.stage].backward_input(one.micro_batch, gradient),
    BackwardWeight: lambda worker, one: worker.stages[one.stage].backward_weight(one.micro_batch),
    WeightPart: lambda worker, one: worker.stages[one.stage].backward_weight(
        one.micro_batch, one.bucket, worker.buckets
    ),
    OverlappedPair: lambda worker, pair: worker.overlap(pair),
    SendActivation: lambda worker, one: worker.send(one),
    SendGradient: lambda worker, one: worker.send(one),
    RecvActivation: lambda worker, one: worker.receive(one),
    RecvGradient: lambda worker, one: worker.receive(one),
    ReduceBucket: lambda worker, one: worker.begin_reduce(one.stage, one.bucket),
    ReduceGradients: lambda worker, one: worker.reduce(one.stage),
    OptimizerStep: lambda worker, one: worker.step(one.stage),
    GatherParameters: lambda worker, one: worker.gather(one.stage),
    RedundantForward: lambda worker, one, activation: worker.stages[one.stage].redundant_forward(
        one.micro_batch, activation
    ),
    Replay: lambda worker, one, activation, gradient: worker.replay(one, activation, gradient),
    # A transport keeps a tensor until it is delivered, so these need not wait.
    WaitSendActivation: lambda worker, one: None,
    WaitSendGradient: lambda worker, one: None,
}
"""Class -> function (interpreter, instruction, input tensors) -> first value of the row's `produces`.

Tensors beyond the ends of the model are None; so is a value that is not produced.
"""

RELEASES: dict[type[Instruction], Callable[..., None]] = {
    RedundantForward: lambda worker, one: worker.stages[one.stage].release(one.micro_batch),
}
"""Class whose row has `released_by` -> (interpreter, instruction): frees the values that the instruction holds."""


def run_of(kind: type[Instruction]) -> Callable[..., Any]:
    """The function for a class of instructions. Raises RunError if none is registered."""
    try:
        return RUNS[kind]
    except KeyError:
        raise RunError(
            f"{kind.token}: nothing says how to run it: enter {kind.__name__} in recycle.exec.worker.kinds.RUNS"
        ) from None
