"""The hand-made zero-bubble schedules: 1F1B with the backward split, where each W comes a fixed number of micro-batches
after its I (Qi et al., 2023, arXiv 2401.10241, section 2).

A rank is given its warm-up forwards and its lag. For each micro-batch k it then runs I k, W k - lag and the next
forward, each as far as it exists, and the W left over at the end. A lag of w holds w activations more. Limits: one
chunk per rank.

ZB-H1 keeps 1F1B's warm-up and memory and moves the weight gradients into the bubble. Rank r runs min(P - r, m) forwards
first and lets each W wait r micro-batches. Peak min(P, m) activations on every worker. Bubble per worker (P - 1)(F + I)
- (min(m, P) - 1) min(F, I, W), which for m >= P is (P - 1) max(F, I, F + I - W); the paper's (P - 1)(F + I - W) is the
case W <= F, W <= I. The largest inner bubble is the same with min(F, W) in place of min(F, I, W).

ZB-H2 buys a schedule without inner bubble for the memory of almost two 1F1B pipelines. Rank r runs min(2 (P - r) - 1,
m) forwards first and lets each W wait 2 r micro-batches. Peak min(2 P - 1, m) activations on every worker. For m >= 2 P
- 1 the largest inner bubble is (P - 1) max(0, I - F, F + I - 2 W), none at F = I = W, and the bubble per worker (P - 1)
max(F, I - F, F + I - 2 W), of which (P - 1) F is the start of the last rank. The paper's (P - 1)(F + I - 2 W) is the
case where that term is the largest. With fewer micro-batches the warm-up is cut short, and a closed form is known at F
= I = W only: the largest inner bubble is (2 P - 1 - m) F.
"""

from __future__ import annotations

from collections.abc import Callable

from recycle.errors import ScheduleError
from recycle.ir.families.every_pipeline import every_pipeline
from recycle.ir.instruction import BackwardInput, BackwardWeight, Forward, Instruction
from recycle.ir.schedule import Optimizer, Schedule
from recycle.shape import MicroBatch, Shape


def zb_h1(shape: Shape, optimizer: Optimizer = "staggered") -> Schedule:
    """The compute-only ZB-H1 schedule of `shape`. Raises ScheduleError when chunks > 1."""
    return _delayed_weights(shape, "zb-h1", optimizer, lambda rank: shape.ranks - rank, lambda rank: rank)


def zb_h2(shape: Shape, optimizer: Optimizer = "staggered") -> Schedule:
    """The compute-only ZB-H2 schedule of `shape`. Raises ScheduleError when chunks > 1."""
    return _delayed_weights(shape, "zb-h2", optimizer, lambda rank: 2 * (shape.ranks - rank) - 1, lambda rank: 2 * rank)


def _delayed_weights(
    shape: Shape, family: str, optimizer: Optimizer, warm_up: Callable[[int], int], lag: Callable[[int], int]
) -> Schedule:
    """The schedule with `warm_up`: rank -> forwards before its first I, cut to m; and `lag`: rank -> micro-batches
    between an I and its W."""
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
