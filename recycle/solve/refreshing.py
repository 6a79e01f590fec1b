"""Profile drift: evaluate a library's plans under a new profile, and replace stale plans.

Each order is timed under the new profile and compared with the new lower bound. A plan is stale if its gap has grown by
more than a threshold.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from recycle.errors import PlanError
from recycle.ir.simulate import simulate
from recycle.job import Job, PricedJob, price
from recycle.plans import Entry, Plan, PlanLibrary, Vector, errors, failure_vector
from recycle.solve.bounds import lower_bound
from recycle.solve.bounds.bound import certify
from recycle.solve.filling import LibraryProgressCallback, fill
from recycle.solve.problem import Problem

THRESHOLD = 0.02
"""Growth of the gap from which a plan is stale."""


class PlanDrift(NamedTuple):
    """A stored plan under another profile.

    Attributes:
        vector: dead workers of each rank.
        stored_period, stored_gap: under the original profile.
        period: of the stored order under the new profile; None if the order does not fit the new limits or techniques.
        lower_bound: of the vector under the new profile.
    """

    vector: Vector
    stored_period: float
    stored_gap: float
    period: float | None
    lower_bound: float

    @property
    def gap(self) -> float | None:
        """(period - lower bound) / lower bound under the new profile."""
        return None if self.period is None else max(0.0, self.period / max(self.lower_bound, 1e-300) - 1)

    @property
    def growth(self) -> float | None:
        """Growth of the gap; None if the plan cannot be used."""
        return None if self.gap is None else self.gap - self.stored_gap

    def is_stale(self, threshold: float) -> bool:
        return self.growth is None or self.growth > threshold

    def summary(self) -> dict[str, Any]:
        """Return the entries that `recycle plan --json` prints."""
        return self._asdict() | {"gap": self.gap, "growth": self.growth}


def refresh(
    job: Job,
    directory: str | Path,
    threshold: float = THRESHOLD,
    progress: LibraryProgressCallback | None = None,
    *,
    cache: str | Path | None = None,
    processes: int = 1,
    seconds: float | None = None,
) -> tuple[list[PlanDrift], list[Entry]]:
    """Time a library's plans under the job's profile, and replace stale ones.

    A stale plan that still fits stays, with its new figures, until a better one is found. A later call continues an
    interrupted refresh.

    Args:
        threshold: growth of the gap from which a plan is stale.
        progress, cache, processes, seconds: as in `plan_library`, for the replaced plans.

    Returns:
        (drift of each plan made for another profile, contents of the library for this profile).

    Raises:
        PlanError: the library has no plan for this shape or cannot be written, or a plan cannot be made.
    """
    job = price(job)
    library = PlanLibrary(Path(directory), job)
    if not Path(directory).is_dir():
        raise PlanError(f"{directory}: not a plan library; make one with --failures N")
    library.prepare()
    stored = [entry for entry in library.entries().values() if len(entry.vector) == job.shape.ranks]
    old = []
    for entry in stored:
        plan = None if entry.job == library.key else library.read(entry)
        if plan is not None and plan.shape == job.shape:
            old.append((entry, *_priced(job, plan)))
    if not old and not library.usable():
        raise PlanError(f"{directory}: has no plan for {job.shape}; make plans with --failures N")
    drifts = [drift for _, drift, _ in old]
    entries = {entry.vector: entry for entry in library.usable()}
    again = []
    for entry, drift, plan in old:
        stale = drift.is_stale(threshold)
        if stale:
            again.append(entry.vector)
        if plan is not None:
            quick = stale or entry.quick
            entries[entry.vector] = library.add(replace(plan, planner={**plan.planner, "quick": quick}))
    wanted = [*entries, *(vector for vector in again if vector not in entries)]
    fill(job, library, wanted, entries, progress, cache=cache, processes=processes, seconds=seconds)
    return drifts, library.usable()


def _priced(job: PricedJob, plan: Plan) -> tuple[PlanDrift, Plan | None]:
    profile, limits = job.prices, job.limits
    problem = Problem.from_job(job, plan.schedule.failed)
    proven = lower_bound(problem)
    bound = float(proven)
    stored = (failure_vector(job.shape, plan.schedule.failed), plan.period, plan.gap)
    is_split = bool(plan.planner.get("decoupled", True))
    same_rules = (plan.schedule.optimizer, is_split) == (problem.optimizer, problem.split)
    if not same_rules or errors(plan.schedule, job):
        return PlanDrift(*stored, None, bound), None
    timeline = simulate(plan.schedule, profile)
    priced = replace(
        plan,
        makespan=timeline.makespan,
        period=timeline.period,
        lower_bound=bound,
        profile=profile.digest(),
        limits=None if limits is None else tuple(limits),
    )
    return PlanDrift(*stored, timeline.period, bound), certify(priced, proven, profile)
