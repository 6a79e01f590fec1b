"""Options that price a schedule: times, overlap, transfers, a profile file, or a job with memory limits."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from recycle.errors import JobError, errors_as
from recycle.ir.schedule import Schedule
from recycle.job import Job, price
from recycle.job.pricing import byte_limit, profile_of_layout
from recycle.job.profile import Profile
from recycle.job.shape import Shape, Worker

TimesOption = Annotated[str | None, typer.Option(metavar="F,I,W", help="Times of one chunk; 1,1,1 if left out.")]
Overlap = Annotated[str | None, typer.Option(metavar="FB", help="Time of an overlapped pair; F+I+W.")]
Comm = Annotated[str | None, typer.Option(metavar="SECONDS", help="Time of a transfer; 0.")]
ProfileFile = Annotated[Path | None, typer.Option(help="Profile file, instead of --times.")]
_LINK = re.compile(r"([0-9]{1,9}\.[0-9]{1,9}),([0-9]{1,9}\.[0-9]{1,9})=(.+)")


def require_one(command: str, **options: object) -> None:
    if sum(given is not None for given in options.values()) > 1:
        names = " or ".join(f"--{name}" for name in options)
        raise JobError(f"{command}: give {names}, only one of them")


def resolve_profile(
    times: str | None,
    file: Path | None,
    overlap: str | None,
    comm: str | None,
    stated: Callable[[], Profile | None] = lambda: None,
) -> Profile:
    """Return the profile in `file`, of --times, or `stated` by the job or schedule file, in this order; else 1,1,1.

    --overlap and --comm change it; --comm applies to every pair of workers.

    Raises:
        JobError: an option does not have the required form.
        ScheduleError: as in `stated`.
    """
    if file is not None:
        profile = Profile.load(file)
    elif times is not None:
        profile = Profile(*times_of(times))
    else:
        profile = stated() or Profile()
    if overlap is not None:
        profile = replace(profile, overlapped_pair=_numbers("--overlap", overlap, "FB", 1)[0])
    if comm is not None:
        profile = replace(profile, latency=_numbers("--comm", comm, "SECONDS", 1)[0], bandwidth=None, links={})
    return profile


def times_of(text: str) -> tuple[float, float, float]:
    forward, backward_input, backward_weight = _numbers("--times", text, "F,I,W", 3)
    return forward, backward_input, backward_weight


def with_slow_links(profile: Profile, shape: Shape, written: Sequence[str]) -> Profile:
    """Apply the links of --link to a profile. Raises JobError for an invalid link, or one outside `shape`."""
    for text in written:
        match = _LINK.fullmatch(text)
        if match is None or match[1] == match[2]:
            raise JobError(f"--link {text!r}: write WORKER,WORKER=FACTOR, two workers, for example 1.0,1.1=4")
        first, second = (shape.require(Worker.parse(name), f"--link {text}") for name in match.groups()[:2])
        (factor,) = _numbers("--link", match[3], "FACTOR", 1)
        if not factor:
            raise JobError(f"--link {text!r}: a transfer takes some time; write a factor above 0")
        profile = profile.with_slow_link(shape, first, second, factor)
    return profile


def _numbers(option: str, text: str, form: str, count: int) -> list[float]:
    try:
        values = [float(word) for word in text.split(",")]
    except ValueError:
        values = []
    if len(values) != count or not all(math.isfinite(value) and value >= 0 for value in values):
        raise JobError(f"{option} {text!r}: write {form}, {count} finite number(s) of at least 0")
    return values


def job_limits(schedule: Schedule, file: Path, job_file: Path) -> tuple[Profile, list[float] | None, float | None]:
    """Return prices and limits of `job_file` for the schedule from `file`.

    Returns:
        The profile; activations (in chunks) that a worker of each rank may hold, or None; bytes that each worker may
            hold,
        or None.

    Raises:
        JobError: their shapes differ.
    """
    job = price(Job.load(job_file))
    if replace(schedule.shape, cut=()) != job.shape:
        raise JobError(f"{file} has the shape {schedule.shape}, {job_file} has {job.shape}: they must be the same")
    limit = byte_limit(job, job.prices)
    with errors_as(JobError, str(file)):
        prices = profile_of_layout(job, job.prices, schedule.shape)
    return (prices, job.limits, None) if limit is None else (prices, None, limit)
