"""ZB-H2: the memory of almost two 1F1B pipelines buys a schedule without inner bubble (Qi et al., 2023, arXiv
2401.10241, section 2).

Rank r runs min(2 (P - r) - 1, m) forwards first and lets each W wait 2 r micro-batches. Peak min(2 P - 1, m)
activations on every worker. For m >= 2 P - 1 the largest inner bubble is (P - 1) max(0, I - F, F + I - 2 W), none at
F = I = W, and the bubble per worker (P - 1) max(F, I - F, F + I - 2 W), of which (P - 1) F is the start of the last
rank. The paper's (P - 1)(F + I - 2 W) is the case where that term is the largest. With fewer micro-batches the warm-up
is cut short, and a closed form is known at F = I = W only: the largest inner bubble is (2 P - 1 - m) F. Limits: one
chunk per rank.
"""

from __future__ import annotations

from recycle.ir.families.delayed_weights import delayed_weights
from recycle.ir.schedule import Optimizer, Schedule
from recycle.shape import Shape


def zb_h2(shape: Shape, optimizer: Optimizer = "staggered") -> Schedule:
    """The compute-only ZB-H2 schedule of `shape`. Raises ScheduleError when chunks > 1."""
    return delayed_weights(shape, "zb-h2", optimizer, lambda rank: 2 * (shape.ranks - rank) - 1, lambda rank: 2 * rank)
