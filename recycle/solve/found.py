"""What all searches share: the order found so far, the time that is left, and when there is nothing left to find."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

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


class Stop(Protocol):
    """Something that is set when a search should end with what it has, such as an event."""

    def is_set(self) -> bool: ...


class Deadline:
    """A wall-clock limit that may be absent, and that ends early once `stop` is set."""

    def __init__(self, seconds: float | None, stop: Stop | None = None) -> None:
        self.end = None if seconds is None else time.monotonic() + seconds
        self.stop = stop

    @property
    def left(self) -> float:
        if self.stop is not None and self.stop.is_set():
            return 0.0
        return float("inf") if self.end is None else self.end - time.monotonic()

    def part(self, share: float) -> Deadline:
        """A deadline after this share of the time that is left."""
        return Deadline(None if self.end is None else self.left * share, self.stop)

    @property
    def is_over(self) -> bool:
        return self.left <= 0


def is_met(problem: Problem, period: float, bound: float) -> bool:
    """Whether a period meets the bound; among whole times, whether no smaller whole one is left."""
    return period <= bound + 1e-9 or period < bound + problem.grain * (1 - 1e-6)


def worth_compiling(problem: Problem, orders: int, deadline: Deadline) -> bool:
    """Whether so many orders may be made and timed that compiled loops pay."""
    return deadline.left > WORTH_COMPILING and problem.size * orders > WORTH_COMPILING_FOR
