"""recycle: pipeline schedules as an instruction IR, planned, checked, run straight through failures, and shown.

The public API, re-exported by name. Heavy packages (torch, mip, numba, dash) load only when a function needs them.
"""

from recycle.errors import JobError, PlanError, RecycleError, RunError, ScheduleError
from recycle.ir.check import Finding, check
from recycle.ir.lower import lower
from recycle.ir.schedule import Schedule
from recycle.ir.simulate import Timeline, simulate
from recycle.job import Job
from recycle.profile import Link, Profile
from recycle.shape import MicroBatch, Shape, Worker

__all__ = [
    "Finding",
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
    "Shape",
    "Timeline",
    "Worker",
    "check",
    "lower",
    "simulate",
]
