"""ZB-H1: 1F1B's warm-up and memory with the weight gradients moved into the bubble (Qi et al., 2023, arXiv 2401.10241,
section 2).

Rank r runs min(P - r, m) forwards first and lets each W wait r micro-batches. Peak min(P, m) activations on every
worker. Bubble per worker (P - 1)(F + I) - (min(m, P) - 1) min(F, I, W), which for m >= P is
(P - 1) max(F, I, F + I - W); the paper's (P - 1)(F + I - W) is the case W <= F, W <= I. The largest inner bubble is the
same with min(F, W) in place of min(F, I, W). Limits: one chunk per rank.
"""

from __future__ import annotations

from recycle.ir.families.delayed_weights import delayed_weights
from recycle.ir.schedule import Optimizer, Schedule
from recycle.shape import Shape


def zb_h1(shape: Shape, optimizer: Optimizer = "staggered") -> Schedule:
    """The compute-only ZB-H1 schedule of `shape`. Raises ScheduleError when chunks > 1."""
    return delayed_weights(shape, "zb-h1", optimizer, lambda rank: shape.ranks - rank, lambda rank: rank)
