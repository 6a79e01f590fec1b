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

import numpy as np

from recycle.errors import ScheduleError
from recycle.ir.columns import Rows
from recycle.ir.families.every_pipeline import placed
from recycle.ir.instruction import BackwardInput, BackwardWeight, Forward
from recycle.ir.schedule import Optimizer, Schedule
from recycle.job.shape import Shape


def zb_h1(shape: Shape, optimizer: Optimizer = "staggered") -> Schedule:
    """The compute-only ZB-H1 schedule of `shape`. Raises ScheduleError when chunks > 1."""
    rank = np.arange(shape.ranks)
    return _delayed_weights(shape, "zb-h1", optimizer, shape.ranks - rank, rank)


def zb_h2(shape: Shape, optimizer: Optimizer = "staggered") -> Schedule:
    """The compute-only ZB-H2 schedule of `shape`. Raises ScheduleError when chunks > 1."""
    rank = np.arange(shape.ranks)
    return _delayed_weights(shape, "zb-h2", optimizer, 2 * (shape.ranks - rank) - 1, 2 * rank)


def _delayed_weights(shape: Shape, family: str, optimizer: Optimizer, warm_up: Rows, lag: Rows) -> Schedule:
    """The schedule in which each rank runs `warm_up` forwards, at most m, before its first I, and lets `lag` more
    micro-batches come between an I and its W."""
    if shape.chunks != 1:
        raise ScheduleError(f"{family}: needs chunks = 1, got {shape.chunks}")
    m = shape.micro_batches
    first, behind = np.minimum(warm_up, m)[:, None], np.minimum(lag, m)[:, None]
    stage, j = np.arange(shape.ranks)[:, None], np.arange(m)[None, :]

    def input_at(k: Rows) -> Rows:
        """The place of I k, which has the forwards up to F k + first - 1 and the W up to W k - 1 - behind before it."""
        return k + np.minimum(first + k, m) + np.maximum(0, k - behind)

    # W j follows I j + behind; the forward behind an I follows the W behind it, if any; the last W end the program.
    weight = np.where(j < m - behind, input_at(j + behind) + 1, 2 * m + j)
    forward = np.where(j < first, j, input_at(j - first) + 1 + (j - first >= behind))
    pieces = (Forward, forward, stage), (BackwardInput, input_at(j), stage), (BackwardWeight, weight, stage)
    return placed(shape, j[0], *pieces, optimizer=optimizer, metadata={"family": family})
