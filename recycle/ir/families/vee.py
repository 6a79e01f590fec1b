"""The V: rank r hosts stages r and 2 P - 1 - r. A micro-batch goes down the ranks with chunk 0, turns on the last one
and comes back up with chunk 1; its gradients go the same way back.

On each rank a micro-batch is six pieces of work, numbered in the order in which they can first run: F of chunk 0, F of
chunk 1, I of chunk 1, I of chunk 0, and the two W. Every rank takes the micro-batches of one kind of work in turn. So a
program is a list of these six numbers; which micro-batch is meant follows from counting.
"""

from __future__ import annotations

from collections.abc import Sequence

from recycle.errors import ScheduleError
from recycle.ir.instruction import BackwardInput, BackwardWeight, Compute, Forward, Instruction
from recycle.job.shape import MicroBatch, Shape

F0, F1, I1, I0, W1, W0 = range(6)
Orders = list[list[int]]
"""The six kinds of work, by rank, in program order."""

_CLASS_AND_CHUNK: tuple[tuple[type[Compute], int], ...] = (
    (Forward, 0),
    (Forward, 1),
    (BackwardInput, 1),
    (BackwardInput, 0),
    (BackwardWeight, 1),
    (BackwardWeight, 0),
)


def vee_stages(shape: Shape, family: str) -> list[tuple[int, int]]:
    """The stages of chunk 0 and of chunk 1 of each rank. Raises ScheduleError unless chunks = 2."""
    if shape.chunks != 2:
        raise ScheduleError(f"{family}: needs chunks = 2 (rank r hosts stages r and 2 P - 1 - r), got {shape.chunks}")
    return [(rank, shape.stages - 1 - rank) for rank in range(shape.ranks)]


def vee_programs(shape: Shape, orders: Orders, stages: Sequence[tuple[int, int]]) -> list[list[Instruction]]:
    """The instructions of pipeline 0 that `orders` stand for, a program per rank."""
    micro_batches = [MicroBatch(0, j) for j in range(shape.micro_batches)]
    programs = []
    for hosted, order in zip(stages, orders, strict=True):
        turns = [((cls, hosted[chunk]), iter(micro_batches)) for cls, chunk in _CLASS_AND_CHUNK]
        program: list[Instruction] = []
        for work in order:
            (cls, stage), left = turns[work]
            program.append(cls(stage, next(left)))
        programs.append(program)
    return programs
