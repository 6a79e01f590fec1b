"""1F1B: each worker runs P - r forwards, then alternates backward and forward (PipeDream-flush, Narayanan et al.,
2021, arXiv 2006.09503; Megatron-LM's non-interleaved schedule).

Bubble per worker (P - 1)(F + B), makespan (m + P - 1)(F + B), peak min(P - r, m) activations on rank r. Limits: one
chunk per rank.
"""

from __future__ import annotations

from recycle.errors import ScheduleError
from recycle.ir.families.every_pipeline import every_pipeline
from recycle.ir.instruction import Backward, Forward, Instruction
from recycle.ir.schedule import Optimizer, Schedule
from recycle.shape import MicroBatch, Shape


def one_f_one_b(shape: Shape, optimizer: Optimizer = "staggered") -> Schedule:
    """The compute-only 1F1B schedule of `shape`. Raises ScheduleError when chunks > 1."""
    if shape.chunks != 1:
        raise ScheduleError(f"1f1b: needs chunks = 1, got {shape.chunks}")
    m = shape.micro_batches
    programs = []
    for stage in range(shape.ranks):
        warm_up = min(shape.ranks - stage, m)
        program: list[Instruction] = [Forward(stage, MicroBatch(0, j)) for j in range(warm_up)]
        for j in range(m):
            program.append(Backward(stage, MicroBatch(0, j)))
            if j + warm_up < m:
                program.append(Forward(stage, MicroBatch(0, j + warm_up)))
        programs.append(program)
    return every_pipeline(shape, programs, optimizer=optimizer, metadata={"family": "1f1b"})
