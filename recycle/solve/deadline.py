"""Deadlines: a wall-clock limit that every loop looks at before a step, and that somebody else can bring forward."""

from __future__ import annotations

import time
from typing import Protocol


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
