"""What a file says of a schedule: its order, and its times where it holds any, planned or executed."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace

from recycle.ir.executed import executed_profile, executed_timeline
from recycle.ir.schedule import Schedule
from recycle.ir.simulate import Timeline
from recycle.ir.trace import Trace
from recycle.job.profile import Profile

_log = logging.getLogger(__name__)
_MOST_PERIODS = 64


@dataclass(frozen=True, eq=False)
class ScheduleInput:
    """The content of a schedule file or folder of traces.

    Attributes:
        name: of the file or folder, for warnings.
        schedule: its order.
        planned: the profile that the times of a planned timeline follow from; None in a file without one.
        trace: all iterations that a trace holds with whole times; None in any other file.
        step, generation: the iteration of `trace` that `schedule` is made from.
        warnings: what a reader should know who uses the order alone.
        timed_warnings: what a reader should know who uses the times too.
    """

    name: str
    schedule: Schedule
    planned: Profile | None = None
    trace: Trace | None = None
    step: int = 0
    generation: int = 0
    warnings: tuple[str, ...] = ()
    timed_warnings: tuple[str, ...] = ()

    def order(self) -> Schedule:
        """The schedule alone; logs what it leaves out."""
        for message in self.warnings:
            _log.warning("%s: %s", self.name, message)
        return self.schedule

    def executed(self) -> Timeline | None:
        """The iteration that ran, in seconds; None where the file holds no executed times. Logs what it leaves out.

        Its period is the median distance of the iterations, of the last `_MOST_PERIODS` where the trace holds many.
        """
        if self.trace is None or not _is_in_shape(self.trace):
            return None
        for message in self.timed_warnings:
            _log.warning("%s: %s", self.name, message)
        ran = executed_timeline(self.trace.window(self.step, self.step, self.generation), Profile.uniform())
        steps = self.trace.steps[-_MOST_PERIODS - 1 :]
        period = self.trace.period(steps[0], steps[-1]) if len(steps) > 1 else None
        return ran if period is None else replace(ran, period=period)

    def profile(self) -> Profile | None:
        """What the instructions take: as planned, else as medians of what ran; None where the file holds no times.

        Raises:
            ScheduleError: a stage lacks its forward or its backward.
        """
        if self.trace is None or not _is_in_shape(self.trace):
            return self.planned
        return executed_profile(self.trace, self.step, self.name)


def _is_in_shape(ran: Trace) -> bool:
    """Whether all stages and micro-batches of a trace are there in its shape: else `check` says what is wrong."""
    columns, shape = ran.columns, ran.shape
    limits = {"stage": shape.stages, "pipeline": shape.pipelines, "index": shape.micro_batches}
    return all(
        int(getattr(columns, column).max(initial=-1)) < limit
        for name, limit in limits.items()
        for column in (name, f"{name}2")
    )
