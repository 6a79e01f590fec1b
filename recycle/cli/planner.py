"""The planner for training runs: keeps plans in the user's cache directory."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from recycle.job import Job, price

if TYPE_CHECKING:
    from recycle.ir.schedule import Schedule
    from recycle.job import PricedJob
    from recycle.job.shape import Worker


def require_plannable(job: Job) -> None:
    """Raise PlanError or JobError, before any process starts, for a job that cannot be planned."""
    from recycle.solve.problem import Problem

    Problem.from_job(price(job))


def plan_for_training(
    job: PricedJob,
    vector: Sequence[int],
    quick: bool = False,
    failed: Iterable[Worker] | None = None,
    like: Schedule | None = None,
    moves: bool = False,
    within: str | None = None,
) -> str:
    """Call `recycle.solve.planner.plan_for_training` with the cache directory of the environment."""
    from recycle.plans import cache_directory
    from recycle.solve.planner import plan_for_training

    return plan_for_training(job, vector, quick, failed, like, cache_directory(os.environ), moves, within)
