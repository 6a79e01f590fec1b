"""The values that single instructions wait for, are handed and make, read from the rows of their kinds."""

from __future__ import annotations

from typing import NamedTuple

from recycle.ir.instruction import Compute, Instruction, OverlappedPair, Transfer
from recycle.ir.kinds import Origin, ValueKind
from recycle.shape import MicroBatch


class Value(NamedTuple):
    """One value: the `kind` that `stage` makes of `micro_batch`."""

    kind: ValueKind
    stage: int
    micro_batch: MicroBatch


def needs(instruction: Instruction, stages: int) -> tuple[Value, ...]:
    """The values that one instruction waits for, in a model of `stages` stages."""
    if isinstance(instruction, OverlappedPair):
        return needs(instruction.forward, stages) + needs(instruction.backward, stages)
    if not isinstance(instruction, Compute | Transfer):
        return ()
    return tuple(
        Value(need.value, instruction.stage + need.offset, instruction.micro_batch)
        for need in instruction.row.needs
        if 0 <= instruction.stage + need.offset < stages
    )


def inputs(instruction: Compute | Transfer, stages: int) -> tuple[Value | None, ...]:
    """The values that one instruction is handed, in the order of its row; None where the model has no such stage."""
    stage = instruction.stage
    return tuple(
        Value(need.value, stage + need.offset, instruction.micro_batch) if 0 <= stage + need.offset < stages else None
        for need in instruction.row.needs
        if need.origin != Origin.STAGE
    )


def produced(instruction: Instruction) -> tuple[Value, ...]:
    """The values that one instruction makes."""
    if isinstance(instruction, OverlappedPair):
        return produced(instruction.forward) + produced(instruction.backward)
    if not isinstance(instruction, Compute):
        return ()
    return tuple(Value(kind, instruction.stage, instruction.micro_batch) for kind in instruction.row.produces)
