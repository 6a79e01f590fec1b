"""Families on the V under a memory cap: ZB-V, V-half and V-min (Qi et al., 2023, arXiv 2401.10241, section 6, and 2024,
arXiv 2405.15362).

Rank r hosts stages r and 2 P - 1 - r. The papers' building block, or a hand-made order, is repeated and then squeezed
by our own construction under a cap of C chunks (see `memory_capped`), which is kept for every P and m. 1F1B's worst
rank holds 2 P. No V takes less than 2 m (F + B) + (P - 1) F. Limits: two chunks per rank. "Published" are the orders of
the authors' greedy reordering, timed here.

ZB-V has no inner bubble at the memory of 1F1B, C = 2 P. For m >= 2 P - 1 the paper's hand-made order is the start: a
warm-up until the first gradient is back, then F, I and W of both chunks in turn; the W left over by the last gradients
fill the end. For fewer micro-batches it is V-half's building block. Peak min(2 m, 2 P) on the worst rank. At F = I = W
= 1 and m >= P the makespan is 6 m + P - 1, the least of any V; the largest inner bubble is 0 for m >= 2 P - 1. With m
>= 2 P - 1 and any times with I >= F, the bubble of every rank is (P - 1) max(I, 2 (I - W)) + E and the largest inner
bubble (P - 1) max(I - F, 2 (I - W)) + E, where E = max(0, P - 2) max(0, W - I). Where F > I, or m < P, there is no
closed form. `times` makes an order for other times: 107 instead of 108 for (2, 3, 1), 102 instead of 104 for (1, 2, 3),
both P = 4, m = 8.

V-half holds half of what 1F1B holds, C = 2 floor(P / 2) + 2. Its block takes two slots per rank on the ways down, one
on the ways up. V-min holds a third, C = 2 (floor((P + 1) / 3) + 1), with one slot per rank on every way, so that a
micro-batch is back as soon as can be. For both, at F = I = W = 1 and m >= P, the makespan is 6 m + max(P - 1, 3 (2 P -
C) - 1): measured for P up to 64, not proven, and the least of any V for P <= 2 only. With fewer micro-batches than
ranks, or other times, there is no closed form.

Against the published orders V-half is equal for m >= 2 P and for m = P never longer, e.g. 29 instead of 34 (P = 4), 41
for 44 (P = 5), 59 for 66 (P = 7). V-min takes 4 less for P = 5 and 8, e.g. 71 instead of 75 (P = 5, m = 10) and 119 for
123 (P = 8, m = 16), and 2 less for P = 2; else equal, but for 23 instead of 26 at P = m = 3. Where F, I and W differ by
much, give `times`: for (2, 3, 1) V-half then takes 118 instead of 124 (P = 4, m = 8) and 253 instead of 266 (P = 8, m =
16), V-min 141 instead of 167 and 279 instead of 348.
"""

from __future__ import annotations

from recycle.ir.families.memory_capped import UNIT_TIMES, Times, building_block, memory_capped, repeated
from recycle.ir.families.vee import F0, F1, I0, I1, W0, W1, Orders
from recycle.ir.schedule import Optimizer, Schedule
from recycle.job.shape import Shape


def zb_v(shape: Shape, optimizer: Optimizer = "staggered", times: Times = UNIT_TIMES) -> Schedule:
    """The compute-only ZB-V schedule of `shape`.

    Args:
        times: F, I and W of one chunk, for which the order is made.

    Raises:
        ScheduleError: chunks is not 2, or `times` is not three finite numbers of at least 0.
    """
    starts = [_repeated_half(shape)]
    if shape.micro_batches >= 2 * shape.ranks - 1:
        starts.insert(0, _hand_made(shape.ranks, shape.micro_batches))
    return memory_capped(shape, "zb-v", starts, 2 * shape.ranks, optimizer, times)


def v_half(shape: Shape, optimizer: Optimizer = "staggered", times: Times = UNIT_TIMES) -> Schedule:
    """The compute-only V-half schedule of `shape`. Arguments and errors are those of `zb_v`."""
    cap = 2 * (shape.ranks // 2) + 2
    return memory_capped(shape, "v-half", [_repeated_half(shape)], cap, optimizer, times)


def v_min(shape: Shape, optimizer: Optimizer = "staggered", times: Times = UNIT_TIMES) -> Schedule:
    """The compute-only V-min schedule of `shape`. Arguments and errors are those of `zb_v`."""
    block = building_block(shape.ranks, (1, 1, 1, 1), (0, 0 if shape.ranks % 3 else 2, 0))
    cap = 2 * ((shape.ranks + 1) // 3 + 1)
    return memory_capped(shape, "v-min", [repeated(block, shape.micro_batches)], cap, optimizer, times)


def _repeated_half(shape: Shape) -> Orders:
    """V-half's building block for every micro-batch, not squeezed. Holds at most 2 floor(P / 2) + 2 chunks."""
    block = building_block(shape.ranks, (2, 1, 2, 1), (0, 0 if shape.ranks % 2 else 3, 1))
    return repeated(block, shape.micro_batches)


def _hand_made(ranks: int, micro_batches: int) -> Orders:
    """ZB-V's order of the paper, for m >= 2 P - 1."""
    orders = []
    for rank in range(ranks):
        below = ranks - rank  # this rank and those further down the V
        warm_up = [F0] * (2 * below - 1) + [F1, F0] * rank + [F1, I1, W1] * below
        steady = [F0, I0, W0, F1, I1, W1] * (micro_batches - ranks - below + 1) + [I0, W0, F1, I1, W1] * (below - 1)
        cool_down = [I0, I1] * rank + [I0, W0] * below + [W1] * rank + [W0] * rank
        orders.append(warm_up + steady + cool_down)
    return orders
