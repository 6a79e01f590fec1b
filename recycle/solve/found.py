"""What all searches share: the order found so far, and when there is nothing left to find."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from recycle.solve.deadline import Deadline
from recycle.solve.problem import Order, Problem

Progress = Callable[[str, float], None]
"""Told what is being done and the best period so far."""
WORTH_COMPILING, WORTH_COMPILING_FOR = 5.0, 200_000
"""Seconds that must be left, and operations times orders made, for compiled loops to pay even when none is cached."""


@dataclass(frozen=True)
class Found:
    """An order, its period by right-shift, and the steps spent on it."""

    order: Order
    period: float
    steps: int = 0


def is_met(problem: Problem, period: float, bound: float) -> bool:
    """Whether a period meets the bound; among whole times, whether no smaller whole one is left."""
    return period <= bound + 1e-9 or period < bound + problem.grain * (1 - 1e-6)


def worth_compiling(problem: Problem, orders: int, deadline: Deadline) -> bool:
    """Whether so many orders may be made and timed that compiled loops pay."""
    return deadline.left > WORTH_COMPILING and problem.size * orders > WORTH_COMPILING_FOR
