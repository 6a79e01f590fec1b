"""recycle: pipeline schedules as an instruction IR, planned, checked, run straight through failures, and shown.

The public API, re-exported by name. Heavy packages (torch, mip, numba, dash) load only when a function needs them.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from recycle.errors import JobError, PlanError, RecycleError, RunError, ScheduleError, ScheduleWarning
from recycle.ir.check import Finding, Findings, check
from recycle.ir.lower import lower
from recycle.ir.schedule import Schedule
from recycle.ir.simulate import Timeline, simulate
from recycle.job import Job, profile, shape
from recycle.job.profile import Link, Profile
from recycle.job.shape import MicroBatch, Shape, Worker

__all__ = [
    "Finding",
    "Findings",
    "Job",
    "JobError",
    "Link",
    "MicroBatch",
    "PlanError",
    "Profile",
    "RecycleError",
    "RunError",
    "Schedule",
    "ScheduleError",
    "ScheduleWarning",
    "Shape",
    "Timeline",
    "Worker",
    "check",
    "lower",
    "simulate",
]


def _draw(schedule: Schedule, profile: Profile | None, title: str) -> Any:
    from viz.notebook import show

    return show(schedule, profile, title)


def _read(path: str | Path) -> Schedule:
    from recycle.ir.formats import read

    return read(path)


Schedule.drawn_by = _draw
Schedule.read_by = _read
Job.planned_by = "recycle.cli.planner:plan_for_training"
Job.settled_by = "recycle.solve.partition:settle"

for _module in (profile, shape):
    sys.modules[f"recycle.{_module.__name__.rpartition('.')[2]}"] = _module  # plug-ins may import them from there
