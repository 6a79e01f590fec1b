"""V-half: a V-shaped schedule that holds half of what 1F1B holds (Qi et al., 2024, arXiv 2405.15362).

Rank r hosts stages r and 2 P - 1 - r. The paper's building block (two slots per rank on the ways down, one on the ways
up) is repeated and then squeezed by our own construction under the cap C = 2 floor(P / 2) + 2 chunks, where 1F1B's
worst rank holds 2 P. The cap is kept for every P and m.

At F = I = W = 1 and m >= P the makespan is 6 m + max(P - 1, 3 (2 P - C) - 1): measured for P up to 64, not proven. It
meets 2 m (F + B) + (P - 1) F, below which no V goes, for P <= 2 only. With fewer micro-batches than ranks, or other
times, there is no closed form. Against the order that the paper's authors publish (their greedy reordering, timed
here): equal for m >= 2 P; for m = P never longer, e.g. 29 instead of 34 (P = 4), 41 for 44 (P = 5), 59 for 66 (P = 7).
Where F, I and W differ by much, give `times`: the order made for (2, 3, 1) then takes 118 instead of the published 124
(P = 4, m = 8) and 253 instead of 266 (P = 8, m = 16). Limits: two chunks per rank.
"""

from __future__ import annotations

from recycle.ir.families.memory_capped import UNIT_TIMES, Times, building_block, memory_capped, repeated
from recycle.ir.families.vee import Orders
from recycle.ir.schedule import Optimizer, Schedule
from recycle.shape import Shape


def v_half(shape: Shape, optimizer: Optimizer = "staggered", times: Times = UNIT_TIMES) -> Schedule:
    """The compute-only V-half schedule of `shape`.

    Args:
        times: F, I and W of one chunk, for which the order is made.

    Raises:
        ScheduleError: chunks is not 2, or `times` is not three finite numbers of at least 0.
    """
    cap = 2 * (shape.ranks // 2) + 2
    return memory_capped(shape, "v-half", [repeated_half(shape)], cap, optimizer, times)


def repeated_half(shape: Shape) -> Orders:
    """V-half's building block for every micro-batch, not squeezed. Holds at most 2 floor(P / 2) + 2 chunks."""
    waits = (0, 0 if shape.ranks % 2 else 3, 1)
    return repeated(building_block(shape.ranks, (2, 1, 2, 1), waits), shape.micro_batches)
