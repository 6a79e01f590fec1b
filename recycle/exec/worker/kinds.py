"""How the executor runs each kind of instruction.

A kind of one's own enters a function here, from the file that registers it (see docs/guides/add-an-instruction.md).
Imports no torch, so that such a file can be read by every command.
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
    # A transport keeps what it sends until it has arrived, so that nothing needs to be waited for.
    WaitSendActivation: lambda worker, one: None,
    WaitSendGradient: lambda worker, one: None,
}
"""Kind -> (interpreter, instruction, a tensor for each need that is handed over, None beyond the model's ends) -> what
the row's `produces` names first, None where that is not made."""

RELEASES: dict[type[Instruction], Callable[..., None]] = {
    RedundantForward: lambda worker, one: worker.stages[one.stage].release(one.micro_batch),
}
"""Kind whose row has `released_by` -> (interpreter, instruction): lets go of what the instruction holds."""


def run_of(kind: type[Instruction]) -> Callable[..., Any]:
    """How a kind is run. Raises RunError where nothing says so."""
    try:
        return RUNS[kind]
    except KeyError:
        raise RunError(
            f"{kind.token}: nothing says how to run it: enter {kind.__name__} in recycle.exec.worker.kinds.RUNS"
        ) from None
