"""What can be set side by side: the schedules of files, the plans and the executed steps of runs, by key.

An operand is made when it is asked for. Where an executed step is among those compared, all are put on its clock:
plans are stretched to seconds, by the job's profile where that says seconds, else by the executed work.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from recycle.errors import RecycleError
from recycle.ir.executed import executed_timeline
from recycle.ir.lower import lower
from recycle.ir.schedule import Schedule
from recycle.ir.simulate import Timeline, simulate
from recycle.job import Job
from viz.analysis.differences import Alignment, align, require_one_clock, scaled
from viz.lanes import LaneTable
from viz.run import Run
from viz.sources import ScheduleFile

STEPS_OFFERED = 500


@dataclass(frozen=True)
class Choice:
    """Something that can be compared: a unique `key`, and a title for people."""

    key: str
    title: str


@dataclass(frozen=True, eq=False)
class Operand:
    """One timeline to compare.

    Attributes:
        timeline: planned, or executed with times in seconds.
        executed: whether it ran.
        seconds_per_unit: of a plan's times, where the job knows it.
        limits: activations that the worker of each rank may hold, where plan or job say so.
        in_seconds: whether its times are seconds for certain.
        drawn: its lanes where they are made already.
    """

    key: str
    title: str
    timeline: Timeline
    executed: bool
    seconds_per_unit: float | None = None
    limits: tuple[float, ...] | None = None
    in_seconds: bool = False
    drawn: LaneTable | None = None

    @property
    def unit(self) -> Literal["s", ""]:
        """Of its times: seconds for certain, or what the profile says."""
        return "s" if self.in_seconds else ""

    @property
    def lanes(self) -> LaneTable:
        """Its lanes; made anew each time unless they were `drawn`."""
        return self.drawn or replace(LaneTable.from_timeline(self.timeline), unit=self.unit)


class Operands:
    """All that some sources have to compare.

    Args:
        now: gives the sources as they are now; a live run is another object once it was read again.
    """

    def __init__(self, now: Callable[[], Sequence[Run | ScheduleFile]]) -> None:
        self._now = now

    @property
    def sources(self) -> list[Run | ScheduleFile]:
        return list(self._now())

    def choices(self) -> list[Choice]:
        """Files first, then of each run its plans and its last STEPS_OFFERED executed steps."""
        found = []
        for place, source in enumerate(self.sources):
            if isinstance(source, ScheduleFile):
                if source.timeline is not None:
                    found.append(Choice(f"file/{place}", source.name))
                continue
            for phase in source.phases:
                key = f"plan/{place}/{phase.plan}"
                if phase.plan and key not in {choice.key for choice in found}:
                    found.append(Choice(key, f"{source.name}: plan of steps {phase.steps}, {phase.alive}"))
            for step in (source.trace.steps if source.trace else [])[-STEPS_OFFERED:]:
                found.append(Choice(f"step/{place}/{step}", f"{source.name}: executed step {step}"))
        return found

    def first_choice(self) -> list[str]:
        """What is compared at first: the first two files, or of a run the step worth a look and its plan."""
        files = [choice.key for choice in self.choices() if choice.key.startswith("file/")]
        if len(files) >= 2:
            return files[:2]
        for place, run in enumerate(self.sources):
            if not isinstance(run, Run) or run.trace is None:
                continue
            moments = [moment.step for moment in run.moments]
            step = moments[1] if len(moments) > 1 else moments[0] if moments else run.trace.steps[-1]
            if step in run.trace.steps and (plan := run.plan_of(step)):
                return [f"plan/{place}/{plan}", f"step/{place}/{step}"]
        return [choice.key for choice in self.choices()][:2]

    def get(self, key: str) -> Operand:
        """The operand of a key. Raises RecycleError when there is none, or it has no timeline."""
        titles = {choice.key: choice.title for choice in self.choices()}
        if key not in titles:
            raise RecycleError(f"compare: {key!r} is not there to be compared")
        kind, place, *rest = key.split("/")
        source = self.sources[int(place)]
        if isinstance(source, ScheduleFile):
            assert source.timeline is not None
            limits = stated_limits(source.schedule)
            return Operand(key, titles[key], source.timeline, executed=False, limits=limits, drawn=source.lanes)
        if kind == "plan":
            plan = source.plan(rest[0])
            if plan is None:
                raise RecycleError(f"{source.name}: plan {rest[0]} cannot be read")
            job = _job(source)
            unit, limits = (job.seconds_per_unit, _job_limits(job)) if job else (None, None)
            timeline = simulate(lower(plan), source.profile)
            return Operand(key, titles[key], timeline, False, unit, stated_limits(plan) or limits)
        assert source.trace is not None
        step = int(rest[0])
        window = source.trace.window(step, step, source.trace.generations_of(step)[-1])
        job = _job(source)
        limits = _job_limits(job) if job else None
        return Operand(
            key, titles[key], executed_timeline(window, source.profile), executed=True, limits=limits, in_seconds=True
        )


def _job(run: Run) -> Job | None:
    try:
        return Job.load(run.path / "job.toml")
    except RecycleError:
        return None


def _job_limits(job: Job) -> tuple[float, ...] | None:
    try:
        limits = job.activation_limits()
    except RecycleError:  # in bytes, and the profile that weighs activations is gone
        return None
    return None if limits is None else tuple(limits)


def stated_limits(schedule: Schedule) -> tuple[float, ...] | None:
    """The limits in the metadata of a plan file, if that is what they are."""
    stated = schedule.metadata.get("limits")
    if not isinstance(stated, list) or len(stated) != schedule.shape.ranks:
        return None
    usable = all(isinstance(limit, int | float) and not isinstance(limit, bool) and limit >= 0 for limit in stated)
    return tuple(float(limit) for limit in stated) if usable else None


def on_one_axis(operands: Sequence[Operand]) -> tuple[list[Operand], list[str]]:
    """(the operands on one clock, how that was done: a line for each that was stretched or checked).

    Raises:
        RecycleError: an executed one's workers had clocks that contradict each other, or it is of another plan.
    """
    ran = next((operand for operand in operands if operand.executed), None)
    if ran is None:
        return list(operands), []
    aligned, said = [], []
    for operand in operands:
        if operand.executed:
            checked, uncertainty = require_one_clock(operand.timeline)
            said.append(f"{operand.title}: from its first start. {_checked(checked, uncertainty)}")
            aligned.append(operand)
            continue
        found: Alignment = align(operand.timeline, ran.timeline, operand.seconds_per_unit)
        said.append(f"{operand.title}: 1 unit = {found.scale:.4g} s; {found.method}.")
        aligned.append(replace(operand, timeline=scaled(operand.timeline, found.scale), in_seconds=True, drawn=None))
    return aligned, said


def _checked(transfers: int, uncertainty: float) -> str:
    if not transfers:
        return "No transfer is in it, so nothing can be said of its workers' clocks."
    return (
        f"Of {transfers:,} transfers none was used before it was sent; clocks may disagree by up to"
        f" {1000 * uncertainty:.3g} ms unseen."
    )
