"""What a job file says about a schedule: its prices and its memory limits, for the commands that take `--job`."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from recycle.errors import JobError
from recycle.ir.schedule import Schedule
from recycle.job import Job, price
from recycle.pricing import parse_bytes
from recycle.profile import Profile


class Limits(NamedTuple):
    """Prices and limits of a job.

    Attributes:
        profile: seconds and bytes of its instructions.
        activations: activations (in chunks) that the worker of each rank may hold, or None.
        bytes: bytes that any worker may hold, or None.
    """

    profile: Profile
    activations: list[float] | None
    bytes: float | None


def job_limits(schedule: Schedule, file: Path, job_file: Path) -> Limits:
    """The limits in `job_file` for the schedule read from `file`. Raises JobError when their shapes differ."""
    job = price(Job.load(job_file))
    if schedule.shape != job.shape:
        raise JobError(f"{file} has the shape {schedule.shape}, {job_file} has {job.shape}: they must be the same")
    limit = job.memory.limit
    if isinstance(limit, str):
        return Limits(job.prices, None, parse_bytes(limit))
    return Limits(job.prices, job.limits, None)
