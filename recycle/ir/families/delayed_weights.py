"""The order that the hand-made zero-bubble schedules share: 1F1B with the backward split, where each W comes a fixed
number of micro-batches after its I (Qi et al., 2023, arXiv 2401.10241, section 2).

A rank is given its warm-up forwards and its lag. For each micro-batch k it then runs I k, W k - lag and the next
forward, each as far as it exists, and the W left over at the end. A lag of w holds w activations more.
"""

from __future__ import annotations

from collections.abc import Callable

from recycle.errors import ScheduleError
from recycle.ir.families.every_pipeline import every_pipeline
from recycle.ir.instruction import BackwardInput, BackwardWeight, Forward, Instruction
from recycle.ir.schedule import Optimizer, Schedule
from recycle.shape import MicroBatch, Shape


def delayed_weights(
    shape: Shape, family: str, optimizer: Optimizer, warm_up: Callable[[int], int], lag: Callable[[int], int]
) -> Schedule:
    """The compute-only schedule of `shape` with the given warm-up and lag.

    Args:
        family: name for metadata and errors.
        warm_up: rank -> forwards before its first I, cut to m.
        lag: rank -> micro-batches between an I and its W.

    Raises:
        ScheduleError: chunks > 1.
    """
    if shape.chunks != 1:
        raise ScheduleError(f"{family}: needs chunks = 1, got {shape.chunks}")
    m = shape.micro_batches
    micro_batches = [MicroBatch(0, j) for j in range(m)]
    programs = []
    for stage in range(shape.ranks):
        first, behind = min(warm_up(stage), m), min(lag(stage), m)
        program: list[Instruction] = [Forward(stage, j) for j in micro_batches[:first]]
        for k in range(m):
            program.append(BackwardInput(stage, micro_batches[k]))
            if k >= behind:
                program.append(BackwardWeight(stage, micro_batches[k - behind]))
            if k + first < m:
                program.append(Forward(stage, micro_batches[k + first]))
        programs.append(program + [BackwardWeight(stage, j) for j in micro_batches[m - behind :]])
    return every_pipeline(shape, programs, optimizer=optimizer, metadata={"family": family})
