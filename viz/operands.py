"""What can be set side by side: the schedules of files, the plans and the executed steps of runs, by key.

An operand is made when it is asked for. Where an executed step is among those compared, all are put on its clock:
plans are stretched to seconds, by the job's profile where that says seconds, else by the executed work.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple, Protocol

from recycle.errors import RecycleError
from recycle.ir.schedule import Schedule
from recycle.ir.simulate import Timeline
from viz.analysis.differences import align, require_one_clock, scaled
from viz.lane_cache import Explainer
from viz.lanes import LaneTable


class Operand(NamedTuple):
    """One timeline to compare: its lanes by the rows of what explains them.

    Attributes:
        seconds_per_unit: of a plan's times, where the job knows it.
    """

    title: str
    explainer: Explainer
    lanes: LaneTable
    seconds_per_unit: float | None = None

    @property
    def timeline(self) -> Timeline:
        """Planned, or executed with times in seconds."""
        return self.explainer.timeline


class Comparable(Protocol):
    """A source of things to compare; `place` is its own among all sources and stands in its keys."""

    def choices(self, place: int) -> Mapping[str, tuple[str, Callable[[str], Operand]]]:
        """What can be compared of it: unique keys, titles for people, and what makes the operand of a title. That
        raises RecycleError where there is no timeline."""

    def suggested(self, place: int) -> list[str]:
        """Keys of its own that are compared at first: one for a file, a plan and what ran of it for a run."""


class Operands:
    """All that some sources have to compare.

    Args:
        now: gives the sources as they are now; a live run is another object once it was read again.
    """

    def __init__(self, now: Callable[[], Sequence[Comparable]]) -> None:
        self.now = now

    def _choices(self) -> dict[str, tuple[str, Callable[[str], Operand]]]:
        return dict(choice for place, source in enumerate(self.now()) for choice in source.choices(place).items())

    def choices(self) -> dict[str, str]:
        """All choices, key -> title, source by source."""
        return {key: title for key, (title, _) in self._choices().items()}

    def first_choice(self) -> list[str]:
        """What is compared at first: the first two files, or of a run the step worth a look and its plan."""
        suggested = [source.suggested(place) for place, source in enumerate(self.now())]
        files = [keys[0] for keys in suggested if len(keys) == 1]
        pairs = [keys for keys in suggested if len(keys) > 1]
        if len(files) >= 2 or not pairs:
            return files[:2] if len(files) >= 2 else list(self.choices())[:2]
        return pairs[0]

    def get(self, key: str) -> Operand:
        """The operand of a key. Raises RecycleError when there is none, or it has no timeline."""
        choice = self._choices().get(key)
        if choice is None:
            raise RecycleError(f"compare: {key!r} is not there to be compared")
        title, make = choice
        return make(title)


def stated_limits(schedule: Schedule) -> tuple[float, ...] | None:
    """The limits in the metadata of a plan file, if that is what they are."""
    stated = schedule.metadata.get("limits")
    if not isinstance(stated, list) or len(stated) != schedule.shape.ranks:
        return None
    usable = all(isinstance(limit, int | float) and not isinstance(limit, bool) and limit >= 0 for limit in stated)
    return tuple(float(limit) for limit in stated) if usable else None


def stated_bound(timeline: Timeline) -> tuple[float, float] | None:
    """(lower bound, gap) in the metadata of a plan, None where they are of other times than the timeline's.

    A plan says by a hash which profile it was made for; of one without, or whose stages are others than the profile's,
    the period has to be the same.
    """
    metadata = timeline.schedule.metadata
    bound, gap, period = (metadata.get(name) for name in ("lower_bound", "gap", "period"))
    if not isinstance(bound, int | float) or not isinstance(gap, int | float):
        return None
    made_for = metadata.get("profile")
    if isinstance(made_for, str) and not timeline.schedule.shape.cut:
        return (bound, gap) if made_for == timeline.profile.digest() else None
    is_same = isinstance(period, int | float) and math.isclose(period, timeline.period, rel_tol=1e-6)
    return (bound, gap) if is_same else None


def on_one_axis(operands: Sequence[Operand]) -> tuple[list[Operand], list[str]]:
    """(the operands on one clock, how that was done: a line for each that was stretched or checked).

    Raises:
        RecycleError: an executed one's workers had clocks that contradict each other, or it is of another plan.
    """
    ran = next((operand for operand in operands if operand.explainer.executed), None)
    if ran is None:
        return list(operands), []
    aligned, notes = [], []
    for operand in operands:
        if operand.explainer.executed:
            checked, uncertainty = require_one_clock(operand.timeline)
            notes.append(f"{operand.title}: from its first start. {_checked(checked, uncertainty)}")
            aligned.append(operand)
            continue
        scale, method = align(operand.timeline, ran.timeline, operand.seconds_per_unit)
        notes.append(f"{operand.title}: 1 unit = {scale:.4g} s; {method}.")
        timeline = scaled(operand.timeline, scale)
        lanes = replace(LaneTable.from_timeline(timeline), unit="s")
        aligned.append(Operand(operand.title, Explainer(timeline, limits=operand.explainer.limits), lanes))
    return aligned, notes


def _checked(transfers: int, uncertainty: float) -> str:
    if not transfers:
        return "No transfer is in it, so nothing can be said of its workers' clocks."
    return (
        f"Of {transfers:,} transfers none was used before it was sent; clocks may disagree by up to"
        f" {1000 * uncertainty:.3g} ms undetected."
    )
