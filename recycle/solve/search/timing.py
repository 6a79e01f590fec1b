"""Timing an order in two linear passes: earliest starts, then right-shift.

Every rank's last end E_r (reduces and steps of its stages included) is kept from the first pass (with the barrier: the
makespan is), and every operation and transfer is put as late as these ends and its successors allow. With S_w the
latest first start of worker w, and with lanes that begin their first transfer as late and end their last one as early
as that permits,

    period = max(max over w of (E_r(w) - S_w), time of the longest lane)    staggered optimizer
    period = max over r of E_r                                              barrier.

Limits: an upper estimate of the staggered period, nearly always exact (`simulate` is).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from recycle.ir.compiled import run
from recycle.solve.effort import Incumbent
from recycle.solve.problem import Order, Problem
from recycle.solve.problem_arrays import Floats
from recycle.solve.search.order_kernels import time_from_idle, timed_order


@dataclass(frozen=True, eq=False)
class Timing:
    """When an order's operations and ranks end.

    Attributes:
        period: by right-shift; infinite when the order can never finish.
        makespan: end of its last stage, step included, when started from idle.
        due: E_r of each rank; with the barrier each is the makespan.
        latest_starts: [operations], right-shifted start of each operation.
    """

    period: float
    makespan: float
    due: list[float]
    latest_starts: Floats


def time_order(problem: Problem, order: Order) -> Timing:
    """Time an order."""
    state, due, latest = timed_order(problem, order), np.zeros(problem.shape.ranks), np.zeros(problem.size)
    (period, makespan), *_, due, latest = run(time_from_idle, problem.size, problem.arrays, state, due, latest)
    return Timing(float(period), float(makespan), np.asarray(due).tolist(), np.asarray(latest))


def timed(problem: Problem, order: Order) -> Incumbent:
    """An order with its period."""
    return Incumbent(order, time_order(problem, order).period)
