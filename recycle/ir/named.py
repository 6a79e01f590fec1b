"""A schedule by the name that a user gives: a known family, or a file."""

from __future__ import annotations

from pathlib import Path

from recycle.errors import JobError
from recycle.ir import formats
from recycle.ir.families import FAMILIES
from recycle.ir.schedule import Schedule
from recycle.shape import Shape


def named_schedule(name: str, shape: Shape) -> Schedule:
    """The family `name` in `shape`, else what the file `name` holds. Raises JobError, ScheduleError."""
    if name in FAMILIES:
        return FAMILIES[name](shape)
    if not Path(name).exists():
        raise JobError(f"schedule {name}: is neither a file nor a family; families are {', '.join(FAMILIES)}")
    return formats.read(name)
