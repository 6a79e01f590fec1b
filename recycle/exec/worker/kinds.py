"""Functions that run each class of instruction.

User-defined classes: docs/guides/add-an-instruction.md. Imports no torch, so that every command can read their files.
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
    Offload,
    OptimizerStep,
    OverlappedPair,
    RecvActivation,
    RecvGradient,
    ReduceBucket,
    ReduceGradients,
    RedundantForward,
    Reload,
    Replay,
    SendActivation,
    SendGradient,
    WaitSendActivation,
    WaitSendGradient,
    WeightPart,
)

RUNS: dict[type[Instruction], Callable[..., Any]] = {
    Forward: lambda worker, op, activation: worker.stages[op.stage].forward(op.micro_batch, activation),
    Backward: lambda worker, op, gradient: worker.stages[op.stage].backward(op.micro_batch, gradient),
    BackwardInput: lambda worker, op, gradient: worker.stages[op.stage].backward_input(op.micro_batch, gradient),
    BackwardWeight: lambda worker, op: worker.stages[op.stage].backward_weight(op.micro_batch),
    WeightPart: lambda worker, op: worker.stages[op.stage].backward_weight(op.micro_batch, op.bucket, worker.buckets),
    OverlappedPair: lambda worker, op: worker.overlap(op),
    SendActivation: lambda worker, op: worker.send(op),
    SendGradient: lambda worker, op: worker.send(op),
    RecvActivation: lambda worker, op: worker.receive(op),
    RecvGradient: lambda worker, op: worker.receive(op),
    ReduceBucket: lambda worker, op: worker.begin_reduce(op.stage, op.bucket),
    ReduceGradients: lambda worker, op: worker.reduce(op.stage),
    OptimizerStep: lambda worker, op: worker.step(op.stage),
    GatherParameters: lambda worker, op: worker.gather(op.stage),
    RedundantForward: lambda worker, op, activation: worker.stages[op.stage].redundant_forward(
        op.micro_batch, activation
    ),
    Replay: lambda worker, op, activation, gradient: worker.replay(op, activation, gradient),
    Offload: lambda worker, op: worker.stages[op.stage].offload(op.micro_batch),
    Reload: lambda worker, op: worker.stages[op.stage].reload(op.micro_batch),
    # A transport keeps a tensor until it is delivered, so these need not wait.
    WaitSendActivation: lambda worker, op: None,
    WaitSendGradient: lambda worker, op: None,
}
"""Class -> function (interpreter, instruction, input tensors) -> first value of the row's `produces`.

Tensors beyond the ends of the model are None; so is a value that is not produced.
"""

RELEASES: dict[type[Instruction], Callable[..., None]] = {
    RedundantForward: lambda worker, op: worker.stages[op.stage].release(op.micro_batch),
}
"""Class whose row has `released_by` -> (interpreter, instruction): frees the values that the instruction holds."""


def run_of(kind: type[Instruction]) -> Callable[..., Any]:
    """The function for a class of instructions. Raises RunError if none is registered."""
    try:
        return RUNS[kind]
    except KeyError:
        raise RunError(
            f"{kind.token}: no function runs it; register {kind.__name__} in recycle.exec.worker.kinds.RUNS"
        ) from None
