"""GPipe: all forwards, then all backwards (Huang et al., 2019, arXiv 1811.06965).

Bubble per worker (P - 1)(F + B), peak m activations on every worker. Limits: one chunk per rank.
"""

from __future__ import annotations

from recycle.errors import ScheduleError
from recycle.ir.families.every_pipeline import every_pipeline
from recycle.ir.instruction import Backward, Forward, Instruction
from recycle.ir.schedule import Optimizer, Schedule
from recycle.shape import MicroBatch, Shape


def gpipe(shape: Shape, optimizer: Optimizer = "staggered") -> Schedule:
    """The compute-only GPipe schedule of `shape`. Raises ScheduleError when chunks > 1."""
    if shape.chunks != 1:
        raise ScheduleError(f"gpipe: needs chunks = 1, got {shape.chunks}")
    micro_batches = [MicroBatch(0, j) for j in range(shape.micro_batches)]
    programs = []
    for rank in range(shape.ranks):
        forwards: list[Instruction] = [Forward(rank, j) for j in micro_batches]
        programs.append(forwards + [Backward(rank, j) for j in micro_batches])
    return every_pipeline(shape, programs, optimizer=optimizer, metadata={"family": "gpipe"})
