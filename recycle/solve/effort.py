"""Shared by all searches: deadlines, the best order so far (incumbent), and the remaining effort."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from math import inf
from typing import Any, Protocol

from recycle.solve.problem import TOLERANCE, Order, Problem


class Stop(Protocol):
    """Flag that asks a search to end with its best result, such as an event."""

    def is_set(self) -> bool: ...


class Deadline:
    """Optional wall-clock limit, which also ends once `stop` is set."""

    def __init__(self, seconds: float | None, stop: Stop | None = None) -> None:
        self.end = inf if seconds is None else time.monotonic() + seconds
        self.stop = stop

    @property
    def seconds_left(self) -> float:
        if self.stop is not None and self.stop.is_set():
            return 0.0
        return self.end - time.monotonic()

    def part(self, share: float) -> Deadline:
        return Deadline(self.seconds_left * share, self.stop)

    def earlier(self, seconds: float) -> Deadline:
        return Deadline(self.seconds_left - seconds, self.stop)

    @property
    def is_over(self) -> bool:
        return self.seconds_left <= 0


class Pace:
    """Check a deadline before each step of a loop, expecting the next step to take as long as the latest."""

    def __init__(self, deadline: Deadline) -> None:
        self.deadline = deadline
        self.begun: float | None = None

    def is_over(self, longer: float = 1.0) -> bool:
        """Return whether a step, up to `longer` times the latest, would miss the deadline. Call before each step."""
        now = time.monotonic()
        latest = 0.0 if self.begun is None else now - self.begun
        if self.deadline.seconds_left <= longer * latest:
            return True
        self.begun = now
        return False


Progress = Callable[[str, float], None]
"""Called with the phase ("constructing", "searching", …) and the best period so far."""
STEPS_OF_ORDER = 50
"""Search steps that one order counts as."""


@dataclass(frozen=True)
class Incumbent:
    """An order and its period by right-shift."""

    order: Order
    period: float


def shortest(incumbents: Iterable[Incumbent]) -> Incumbent:
    """Return the order with the shortest period, the first of equals."""
    return min(incumbents, key=lambda incumbent: incumbent.period)


def is_met(problem: Problem, period: float, bound: float) -> bool:
    """Return whether a period meets the bound; with whole times, whether no shorter whole period is possible."""
    return period <= bound + TOLERANCE or period < bound + problem.grain * (1 - 1e-6)


@dataclass
class Effort:
    """Effort that a search may spend, in time or in steps, and the effort spent.

    With steps the result depends only on the seed and the steps, unless the deadline ends the search.

    Attributes:
        bound: a proven lower bound; a period that meets it ends the search.
        steps: moves, or orders times `STEPS_OF_ORDER`; None for no limit but the deadline.
        whole: the effort that this is a part of.
        spent: steps so far, including all parts.
        reported: best period reported to `progress`.
    """

    bound: float
    deadline: Deadline = field(default_factory=lambda: Deadline(None))
    steps: int | None = None
    seed: int = 0
    processes: int = 1
    progress: Progress | None = None
    whole: Effort | None = None
    spent: int = field(default=0, init=False)
    reported: float = field(default=inf, init=False)

    def __post_init__(self) -> None:
        self._pace, self._orders, self.bound = Pace(self.deadline), 0, float(self.bound)

    def part(self, share: float, remaining_share: float = 1.0, **changes: Any) -> Effort:
        """Return a share of the steps, or of the time, with changed attributes.

        Args:
            remaining_share: share of the whole time that earlier parts have not used.
        """
        steps = None if self.steps is None else int(self.steps * share)
        own = {"steps": steps, "deadline": self.deadline.part(share / remaining_share), "whole": self}
        return replace(self, **{**own, **changes})

    def remaining(self) -> Effort:
        return self.part(1.0, steps=None if self.steps is None else int(self.steps_left))

    @property
    def steps_left(self) -> float:
        return inf if self.steps is None else max(0, self.steps - self.spent)

    @property
    def orders(self) -> int:
        """Orders that the steps allow, at least one."""
        return 1 << 40 if self.steps is None else max(1, self.steps // STEPS_OF_ORDER)

    def spend(self, steps: int) -> None:
        """Count steps here and in the whole."""
        self.spent += steps
        if self.whole is not None:
            self.whole.spend(steps)

    def claim_order(self, problem: Problem, best: float, cost: int = 1) -> bool:
        """Return whether bound, time and steps allow another order of `cost` steps, and count these."""
        if self._orders >= self.orders or self._pace.is_over() or self.is_met(problem, best):
            return False
        self._orders += 1
        self.spend(cost)
        return True

    def is_met(self, problem: Problem, period: float) -> bool:
        """Return whether a period meets the bound."""
        return is_met(problem, period, self.bound)

    def report(self, stage: str, period: float) -> None:
        """Report a period if it is better than all before."""
        if self.progress and period < self.reported:
            self.reported = period
            tell = self.whole.report if self.whole is not None else self.progress
            tell(stage, period)
