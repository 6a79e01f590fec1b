"""Timing an order in two linear passes: earliest starts, then right-shift.

Every stage's last end E_s (its step included) is kept from the first pass (with the barrier: the makespan is), and
every operation is put as late as these ends and its successors allow. With S_w the latest first start of worker w,

    period = max over w of (E_s(w) - S_w)    staggered optimizer         period = max over s of E_s    barrier.

Limits: an upper estimate of the staggered period, nearly always exact (`simulate` is); a transfer waits for no other.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from recycle.ir.compiled import run
from recycle.solve.problem import Floats, Order, Problem
from recycle.solve.search.order_kernels import time_from_idle, timed_order


@dataclass(frozen=True, eq=False)
class Timing:
    """When an order's operations and stages end.

    Attributes:
        period: by right-shift; infinite when the order can never finish.
        makespan: end of its last stage, step included, when started from idle.
        due: E_s of each rank: the latest end, step included, of the stages that its workers host.
        latest_starts: [operations], right-shifted start of each operation.
    """

    period: float
    makespan: float
    due: list[float]
    latest_starts: Floats


def time_order(problem: Problem, order: Order) -> Timing:
    """Time an order."""
    stages, ranks = problem.shape.stages, problem.shape.ranks
    state, last, latest = timed_order(problem, order), np.zeros(stages), np.zeros(problem.size)
    (period, makespan), *_, last, latest = run(time_from_idle, problem.size, problem.arrays, state, last, latest)
    due = np.asarray(last).reshape(-1, ranks).max(axis=0) + problem.rank_update_seconds
    return Timing(float(period), float(makespan), due.tolist(), np.asarray(latest))
