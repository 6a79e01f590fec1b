"""What all searches share: the incumbent, which is the best order found so far, and when nothing better is left."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from recycle.solve.problem import TOLERANCE, Order, Problem

Progress = Callable[[str, float], None]
"""Is called with what is being done ("constructing", "searching", …) and the best period so far."""


@dataclass(frozen=True)
class Incumbent:
    """An order, its period by right-shift, and the search steps spent on it."""

    order: Order
    period: float
    steps: int = 0


def is_met(problem: Problem, period: float, bound: float) -> bool:
    """Whether a period meets the bound; among whole times, whether no smaller whole one is left."""
    return period <= bound + TOLERANCE or period < bound + problem.grain * (1 - 1e-6)
