"""The values that single instructions wait for, are handed and make, read from the rows of their kinds; and the needs
that nothing in a schedule meets."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

from recycle.ir.columns import Flags, Rows
from recycle.ir.instruction import Compute, Instruction, OverlappedPair, Transfer
from recycle.ir.kinds import Origin, ValueKind
from recycle.job.shape import MicroBatch


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


class Why(IntEnum):
    """What is wrong with a need that nothing meets."""

    NO_PRODUCER = 0
    """no instruction makes the value"""
    NOT_LOCAL = 1
    """the value is made on another worker, but a send, W or B needs it on its own"""
    NOT_RECEIVED = 2
    """the value is made on another worker and never received on this one"""
    NO_SEND = 3
    """a receive whose peer never sends this value here"""
    NO_PREDECESSOR = 4
    """a step without a reduce of its stage on the same worker, or another kind without the one that it follows"""


@dataclass(frozen=True, eq=False)
class Unmet:
    """All needs that nothing meets, as columns, because a broken file may have millions.

    Attributes:
        row: which needs something; why: what is wrong, a `Why`.
        value: `ValueKind` of what is missing, -1 for NO_PREDECESSOR.
        stage, micro_batch: who would make it; the micro-batch as global id.
    """

    row: Rows
    why: Rows
    value: Rows
    stage: Rows
    micro_batch: Rows

    def __len__(self) -> int:
        return len(self.row)

    def take(self, places: Rows | Flags) -> Unmet:
        """The entries in these places."""
        return Unmet(*(column[places] for column in (self.row, self.why, self.value, self.stage, self.micro_batch)))

    def with_reason(self, why: Why) -> Unmet:
        """The entries with this reason."""
        return self.take(self.why == why)
