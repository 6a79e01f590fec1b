"""The planner that training runs are given: plans are kept in the user's cache directory."""

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
    """Raise PlanError or JobError for a job that no plan can be made for, before any process starts."""
    from recycle.solve.problem import Problem

    Problem.of(price(job))


def plan_for_training(
    job: PricedJob,
    vector: Sequence[int],
    quick: bool = False,
    failed: Iterable[Worker] | None = None,
    like: Schedule | None = None,
    moves: bool = False,
    within: str | None = None,
) -> str:
    """`recycle.solve.planner.plan_for_training` with the cache directory that the environment names."""
    from recycle.plans import cache_directory
    from recycle.solve.planner import plan_for_training

    return plan_for_training(job, vector, quick, failed, like, cache_directory(os.environ), moves, within)
