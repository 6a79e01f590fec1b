"""ZB-V: a V-shaped schedule without inner bubble at the memory of 1F1B (Qi et al., 2023, arXiv 2401.10241, section 6).

Rank r hosts stages r and 2 P - 1 - r; the cap is 2 P chunks, which is what 1F1B's worst rank holds. For m >= 2 P - 1
the paper's hand-made order is the start: a warm-up until the first gradient is back, then F, I and W of both chunks in
turn; the W left over by the last gradients fill the end. For fewer micro-batches the start is V-half's building block,
squeezed under the cap. Peak min(2 m, 2 P) on the worst rank.

At F = I = W = 1 and m >= P the makespan is 6 m + P - 1, which is 2 m (F + B) + (P - 1) F, below which no V goes; the
largest inner bubble is 0 for m >= 2 P - 1. With m >= 2 P - 1 and any times with I >= F, the bubble of every rank is
(P - 1) max(I, 2 (I - W)) + E and the largest inner bubble (P - 1) max(I - F, 2 (I - W)) + E, where
E = max(0, P - 2) max(0, W - I). Where F > I, or m < P, there is no closed form. `times` makes an order for other times:
107 instead of 108 for (2, 3, 1), 102 instead of 104 for (1, 2, 3), both P = 4, m = 8. Limits: two chunks per rank.
"""

from __future__ import annotations

from recycle.ir.families.memory_capped import UNIT_TIMES, Times, memory_capped
from recycle.ir.families.v_half import repeated_half
from recycle.ir.families.vee import F0, F1, I0, I1, W0, W1, Orders
from recycle.ir.schedule import Optimizer, Schedule
from recycle.shape import Shape


def zb_v(shape: Shape, optimizer: Optimizer = "staggered", times: Times = UNIT_TIMES) -> Schedule:
    """The compute-only ZB-V schedule of `shape`.

    Args:
        times: F, I and W of one chunk, for which the order is made.

    Raises:
        ScheduleError: chunks is not 2, or `times` is not three finite numbers of at least 0.
    """
    starts = [repeated_half(shape)]
    if shape.micro_batches >= 2 * shape.ranks - 1:
        starts.insert(0, _hand_made(shape.ranks, shape.micro_batches))
    return memory_capped(shape, "zb-v", starts, 2 * shape.ranks, optimizer, times)


def _hand_made(ranks: int, micro_batches: int) -> Orders:
    """The paper's order, for m >= 2 P - 1."""
    orders = []
    for rank in range(ranks):
        below = ranks - rank  # this rank and those further down the V
        warm_up = [F0] * (2 * below - 1) + [F1, F0] * rank + [F1, I1, W1] * below
        steady = [F0, I0, W0, F1, I1, W1] * (micro_batches - ranks - below + 1) + [I0, W0, F1, I1, W1] * (below - 1)
        cool_down = [I0, I1] * rank + [I0, W0] * below + [W1] * rank + [W0] * rank
        orders.append(warm_up + steady + cool_down)
    return orders
