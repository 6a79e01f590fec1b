"""Which stages of a job share a weight: told to every schedule that is made or run for it."""

from __future__ import annotations

from dataclasses import replace

from recycle.errors import ScheduleError
from recycle.ir.schedule import Schedule
from recycle.job import Job


def with_ties(schedule: Schedule, job: Job) -> Schedule:
    """The schedule with the ties of the job's model.

    Raises:
        ScheduleError: it states others.
    """
    if schedule.ties == job.ties:
        return schedule
    if schedule.ties:
        stages = " ".join(map(str, schedule.ties[0]))
        raise ScheduleError(
            f"the schedule ties stages {stages}, the job's model does not: [model] tied = true ties the first and the"
            f" last stage"
        )
    return replace(schedule, ties=job.ties)
