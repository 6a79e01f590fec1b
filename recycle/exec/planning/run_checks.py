"""The checks of a schedule before workers run it, and the resulting periods and replay rounds."""

from __future__ import annotations

from dataclasses import replace

from msgspec import Struct

from recycle.errors import ScheduleError
from recycle.exec.protocol import StepMode
from recycle.ir.check import check, require_no_errors
from recycle.ir.lower import with_barrier
from recycle.ir.schedule import Schedule
from recycle.ir.simulate import simulate
from recycle.job import PricedJob
from recycle.job.pricing import byte_limit, profile_of_layout
from recycle.job.profile import Profile
from recycle.plans import with_updates_of
from recycle.plans.hosting import layers_of
from recycle.plans.plan import rotation_of, with_room


class ScheduleFacts(Struct, frozen=True):
    """Facts from checking a schedule; also valid with a stage's workers renamed if peers are alike.

    Attributes:
        periods: step mode -> period, in the profile's unit of time.
        rounds: iterations after which all work has been replayed once; 0 without replays.
    """

    periods: dict[StepMode, float]
    rounds: int


def check_for_run(schedule: Schedule, job: PricedJob, profile: Profile) -> tuple[Schedule, ScheduleFacts]:
    """Return the schedule as workers run it, with ties, buckets, gathers and replay room, and its facts.

    Periods follow `profile`; validity follows the job's own. Raises ScheduleError.
    """
    schedule = with_updates_of(schedule, job)
    require_valid(schedule, job)
    schedule = with_room(schedule, job)
    rotation = rotation_of(schedule, job)
    if rotation is not None:
        require_valid(rotation.whole, job)  # each iteration runs this without some replays
    rounds = 0 if rotation is None else rotation.rounds
    return schedule, ScheduleFacts(periods_of(schedule, job, profile), rounds)


def periods_of(schedule: Schedule, job: PricedJob, profile: Profile) -> dict[StepMode, float]:
    """Return the period for each step mode that a schedule supports."""
    profile = profile_of_layout(job, profile, schedule.shape)
    periods: dict[StepMode, float] = {"barrier": simulate(with_barrier(schedule), profile).period}
    if schedule.optimizer == "staggered":
        periods["staggered"] = simulate(schedule, profile).period
    return periods


def require_valid(schedule: Schedule, job: PricedJob) -> None:
    """Raise ScheduleError with the first error that `check` finds."""
    shape = schedule.shape
    if replace(shape, cut=()) != job.shape:
        raise ScheduleError(f"the schedule is for {shape}, the job for {job.shape}")
    layers = layers_of(job)
    if shape.cut and sum(shape.cut) != sum(layers):
        raise ScheduleError(
            f"the schedule cuts a model of {sum(shape.cut)} layers, the job's has {sum(layers)}; plan it for this job"
        )
    if schedule.forward_only:
        raise ScheduleError("the schedule is forward-only and cannot train; [eval] derives such schedules by itself")
    profile, limits, room = profile_of_layout(job, job.prices, shape), job.limits, None
    if shape.cut and (room := byte_limit(job, job.prices)) is not None:
        limits = None  # the activation limit follows from the hosted stages
    require_no_errors(check(schedule, profile=profile, limits=limits, byte_limit=room))
    require_no_errors(check(with_barrier(schedule), profile=profile, limits=limits, byte_limit=room, about_to_run=True))
