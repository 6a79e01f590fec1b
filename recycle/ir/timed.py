"""A schedule with the times of its instructions: what `Timeline` and the questions asked of it stand on."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from recycle.ir.columns import Floats, Rows
from recycle.ir.dependencies import Dependencies
from recycle.ir.schedule import Schedule
from recycle.profile import Profile

TOLERANCE = 1e-9
"""Relative difference at which two times, or two amounts of memory, count as equal."""


@dataclass(frozen=True, eq=False)
class TimedSchedule:
    """When everything happens in one iteration from idle, and how often iterations can follow each other.

    Attributes:
        schedule: the lowered schedule that was timed.
        profile: what it was timed with.
        start, end: seconds per row of `schedule.columns`; of a send: when its transfer is under way.
        last: for each row, then each join, the node it waited for last, -1 if none.
        period: seconds between two iterations in steady state.
        dependencies: what each row needs.
    """

    schedule: Schedule
    profile: Profile
    start: Floats
    end: Floats
    last: Rows
    period: float
    dependencies: Dependencies

    @cached_property
    def makespan(self) -> float:
        """Last end minus first start of one iteration from idle."""
        return float(self.end.max() - self.start.min()) if len(self.end) else 0.0
