"""V-min: a V-shaped schedule that holds a third of what 1F1B holds (Qi et al., 2024, arXiv 2405.15362).

Rank r hosts stages r and 2 P - 1 - r. The paper's building block (one slot per rank on every way, so that a micro-batch
is back as soon as can be) is repeated and then squeezed by our own construction under the cap
C = 2 (floor((P + 1) / 3) + 1) chunks, where 1F1B's worst rank holds 2 P. The cap is kept for every P and m.

At F = I = W = 1 and m >= P the makespan is 6 m + max(P - 1, 3 (2 P - C) - 1): measured for P up to 64, not proven. It
meets 2 m (F + B) + (P - 1) F, below which no V goes, for P <= 2 only. With fewer micro-batches than ranks, or other
times, there is no closed form. Against the order that the paper's authors publish (their greedy reordering, timed
here): 4 less for P = 5 and 8, e.g. 71 instead of 75 (P = 5, m = 10) and 119 for 123 (P = 8, m = 16), and 2 less for
P = 2; else equal, but for 23 instead of 26 at P = m = 3. V-min loses much when F, I and W differ; `times` wins part of
it back: the order made for (2, 3, 1) takes 141 instead of the published 167 (P = 4, m = 8) and 279 instead of 348
(P = 8, m = 16). Limits: two chunks per rank.
"""

from __future__ import annotations

from recycle.ir.families.memory_capped import UNIT_TIMES, Times, building_block, memory_capped, repeated
from recycle.ir.families.vee import Orders
from recycle.ir.schedule import Optimizer, Schedule
from recycle.shape import Shape


def v_min(shape: Shape, optimizer: Optimizer = "staggered", times: Times = UNIT_TIMES) -> Schedule:
    """The compute-only V-min schedule of `shape`.

    Args:
        times: F, I and W of one chunk, for which the order is made.

    Raises:
        ScheduleError: chunks is not 2, or `times` is not three finite numbers of at least 0.
    """
    cap = 2 * ((shape.ranks + 1) // 3 + 1)
    return memory_capped(shape, "v-min", [repeated_min(shape)], cap, optimizer, times)


def repeated_min(shape: Shape) -> Orders:
    """V-min's building block for every micro-batch, not squeezed. Holds at most 2 (floor((P + 1) / 3) + 1) chunks."""
    waits = (0, 0 if shape.ranks % 3 else 2, 0)
    return repeated(building_block(shape.ranks, (1, 1, 1, 1), waits), shape.micro_batches)
