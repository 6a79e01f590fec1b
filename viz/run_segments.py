"""The words in which a run is told: its stretches of steps, the steps worth a look, and what a plan promises."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from recycle.shape import Worker


@dataclass(frozen=True)
class RunSegment:
    """Consecutive steps that ran in one generation with one plan."""

    first: int
    last: int
    plan: str | None
    generation: int | None
    failed: tuple[Worker, ...]

    @property
    def steps(self) -> str:
        return f"{self.first}" if self.first == self.last else f"{self.first} to {self.last}"

    @property
    def alive(self) -> str:
        return f"without {', '.join(map(str, self.failed))}" if self.failed else "all workers"


class NotableStep(NamedTuple):
    """A step worth looking at, and why."""

    title: str
    step: int


@dataclass(frozen=True)
class PlanFigures:
    """What a plan promises: seconds (or units of the profile) per iteration, and how far that is from the bound."""

    period: float
    makespan: float
    lower_bound: float | None
    gap: float | None
    optimizer: str


def settled(segment: RunSegment) -> int:
    """A step of a segment that ran as the others of it: the first runs with the optimizer's barrier."""
    return min(segment.first + 1, segment.last)
