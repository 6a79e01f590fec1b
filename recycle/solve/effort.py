"""What all searches share: deadlines, the incumbent, which is the best order so far, and the effort left to beat it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from math import inf
from typing import Any, Protocol

from recycle.solve.problem import TOLERANCE, Order, Problem


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

    def earlier(self, seconds: float) -> Deadline:
        """A deadline so much before this one."""
        return Deadline(None if self.end is None else self.left - seconds, self.stop)

    @property
    def is_over(self) -> bool:
        return self.left <= 0


class Pace:
    """Asks a deadline before each step of a loop, and expects the next step to take as long as the latest."""

    def __init__(self, deadline: Deadline) -> None:
        self.deadline = deadline
        self.begun: float | None = None

    def is_over(self, longer: float = 1.0) -> bool:
        """Whether another step would not fit. To be asked once before each step; the first one needs any time left.

        Args:
            longer: factor by which the next step may take longer than the latest.
        """
        now = time.monotonic()
        latest = 0.0 if self.begun is None else now - self.begun
        if self.deadline.left <= longer * latest:
            return True
        self.begun = now
        return False


Progress = Callable[[str, float], None]
"""Is called with what is being done ("constructing", "searching", …) and the best period so far."""
STEPS_OF_ORDER = 50
"""Steps that allow for making one order."""


@dataclass(frozen=True)
class Incumbent:
    """An order and its period by right-shift."""

    order: Order
    period: float


def by_period(found: Iterable[Incumbent]) -> list[Incumbent]:
    """The shortest period first."""
    return sorted(found, key=lambda one: one.period)


def is_met(problem: Problem, period: float, bound: float) -> bool:
    """Whether a period meets the bound; among whole times, whether no smaller whole one is left."""
    return period <= bound + TOLERANCE or period < bound + problem.grain * (1 - 1e-6)


@dataclass
class Effort:
    """What a search may spend, by the clock or in steps, and what it has spent.

    With steps the result of a search depends on the seed and the steps only, unless the deadline comes first.

    Attributes:
        bound: a proven lower bound; a period that meets it ends the search.
        deadline: wall limit.
        steps: moves, or orders times `STEPS_OF_ORDER`; as many as the deadline allows when left out.
        processes: searches at once.
        progress: called with each better period.
        whole: the effort that this is a part of.
        spent: steps so far, those of all parts included.
        reported: best period that `progress` was called with.
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
        self._pace, self._orders = Pace(self.deadline), 0

    def part(self, share: float, left: float = 1.0, **changes: Any) -> Effort:
        """A share of the steps, or of the time.

        Args:
            left: share of the whole time that earlier parts have left.
            changes: other attributes of the part.
        """
        steps = None if self.steps is None else int(self.steps * share)
        own = {"steps": steps, "deadline": self.deadline.part(share / left), "whole": self}
        return replace(self, **{**own, **changes})

    def rest(self, **changes: Any) -> Effort:
        """All that is left."""
        return self.part(1.0, **{"steps": None if self.steps is None else int(self.left), **changes})

    @property
    def left(self) -> float:
        """Steps that are left."""
        return inf if self.steps is None else max(0, self.steps - self.spent)

    @property
    def orders(self) -> int:
        """Orders that the steps allow for, one at least."""
        return 1 << 40 if self.steps is None else max(1, self.steps // STEPS_OF_ORDER)

    def spend(self, steps: int) -> None:
        """Count steps, here and in the whole."""
        self.spent += steps
        if self.whole is not None:
            self.whole.spend(steps)

    def goes_on(self, problem: Problem, best: float, cost: int = 1) -> bool:
        """Whether to make another order, which is counted then: the bound is not met, and time and steps are left.

        Args:
            best: the best period so far; infinite when no order has been made.
            cost: steps that an order counts as.
        """
        if self._orders >= self.orders or self._pace.is_over() or self.is_met(problem, best):
            return False
        self._orders += 1
        self.spend(cost)
        return True

    def is_met(self, problem: Problem, period: float) -> bool:
        """Whether a period meets the bound."""
        return is_met(problem, period, self.bound)

    def report(self, stage: str, period: float) -> None:
        """Tell of a period, if it is better than all before."""
        if self.progress and period < self.reported:
            self.reported = period
            tell = self.whole.report if self.whole is not None else self.progress
            tell(stage, period)
