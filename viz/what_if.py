"""What-if: plans for chosen dead workers, from the library or from a planner passed in.

The viewer imports no solver. Workers have the names of processes: an outcome's failed workers are the requested ones.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import msgspec

from recycle.errors import PlanError, RecycleError
from recycle.ir.simulate import Timeline, simulate
from recycle.job import Job, PricedJob, price
from recycle.job.pricing import profile_of_layout
from recycle.job.profile import Profile
from recycle.job.shape import Shape, Worker
from recycle.plans import Entry, Plan, PlanLibrary, failure_vector, rename, require_hosts
from viz.condition import Condition
from viz.lane_cache import BoundedCache, TimedLanes, TimelineContext
from viz.lanes import LaneTable

WhatIfPlanner = Callable[[frozenset[Worker]], Plan]
"""Dead workers -> their plan, in the names of the processes. Raises PlanError if none exists."""
Source = Literal["library", "planned"]
MAX_ROWS, MIN_ROWS = 4_000_000, 250_000
"""Maximum rows of all cached timelines, and the least rows that each counts. The last two always stay."""


@dataclass(frozen=True, eq=False)
class PlannedOutcome:
    """The plan for a set of dead workers.

    Attributes:
        plan: in the names of the processes; live workers that it leaves idle are among its failed workers.
        condition: slow workers and links that the times include.
        source: "library", or "planned" for a new plan.
    """

    failed: frozenset[Worker]
    plan: Plan
    timeline: Timeline
    source: Source
    seconds: float
    condition: Condition
    unit: Literal["s", ""]

    @cached_property
    def timed(self) -> TimedLanes:
        return TimedLanes(LaneTable.from_timeline(self.timeline, self.unit), self.context)

    @property
    def idle(self) -> list[Worker]:
        return sorted(self.plan.schedule.failed - self.failed)

    @cached_property
    def context(self) -> TimelineContext:
        return TimelineContext(self.timeline, limits=self.plan.limits, plan=self.plan, condition=self.condition)


class WhatIf:
    """Plans of one job.

    Args:
        job: prices and limits; None if only a library is given, whose plans are timed in slots of 1.
        library: consulted first.
        planner: used if the library has no plan for the exact failure vector.
        rerouting: a planner that moves no layers, if `planner` may.
        searcher: a slower planner for better plans.
        for_job: returns the `WhatIf` of another job, for slow workers; None: slow workers are not supported.

    Raises RecycleError if neither a job nor a plan states the shape.
    """

    def __init__(
        self,
        job: Job | None,
        library: PlanLibrary | None,
        planner: WhatIfPlanner | None,
        rerouting: WhatIfPlanner | None = None,
        searcher: WhatIfPlanner | None = None,
        for_job: Callable[[PricedJob], WhatIf] | None = None,
    ) -> None:
        job = None if job is None else price(job)
        self.job, self.library, self.planner, self.rerouting = job, library, planner, rerouting
        self.searcher, self.for_job = searcher, for_job
        self._slowed: tuple[Condition, WhatIf] | None = None
        self.condition = Condition()
        self.profile = job.prices if job else Profile.uniform()
        self.unit: Literal["s", ""] = "s" if job and job.seconds_per_unit == 1 else ""
        self.shape = job.shape if job else self._shape_of_library()
        self._outcomes: BoundedCache[tuple[frozenset[Worker], WhatIfPlanner | None], PlannedOutcome] = BoundedCache(
            MAX_ROWS, lambda outcome: max(MIN_ROWS, len(outcome.timeline.start)), min_items=2
        )
        self._lock = threading.Lock()

    def _shape_of_library(self) -> Shape:
        first = next(iter(self.library.plans()), None) if self.library else None
        if first is None:
            prefix = f"{self.library.directory}: " if self.library else ""
            raise RecycleError(f"{prefix}no plan can be read in it, and no job file was given")
        return first.shape

    def entries(self) -> list[Entry]:
        return self.library.usable() if self.library else []

    def under(self, condition: Condition) -> WhatIf:
        """Return the `WhatIf` for the slow workers and links of a condition; with any, it has no library.

        Raises PlanError if no planner is available.
        """
        slow = condition._replace(failed=frozenset())
        if not slow.names():
            return self
        if self.job is None or self.for_job is None:
            raise PlanError("slow workers: planning needs a job file, recycle view job.toml")
        with self._lock:
            if self._slowed is None or self._slowed[0] != slow:
                prices = slow.slow_down(self.profile, self.shape)
                self._slowed = slow, self.for_job(msgspec.structs.replace(self.job, prices=prices))
                self._slowed[1].condition = slow
            return self._slowed[1]

    def outcome(self, failed: Iterable[Worker]) -> PlannedOutcome:
        """Return the plan without `failed`. Only one plan is made at a time.

        Raises PlanError if a stage has no live worker, a memory limit is too small, or the plan is missing.
        """
        return self._cached_outcome(frozenset(failed), None)

    def search(self, failed: Iterable[Worker]) -> tuple[PlannedOutcome, PlannedOutcome]:
        """Return (the outcome before, the outcome after a longer search); equal if the period did not get shorter.

        Raises PlanError as in `outcome`, or if no planner is loaded.
        """
        failed = frozenset(failed)
        if self.searcher is None:
            raise PlanError("no planner is loaded: pass a job file, recycle view job.toml")
        before, after = self.outcome(failed), self._evaluate(failed, self.searcher)
        if after.plan.period >= before.plan.period * (1 - 1e-9):
            return before, before
        return before, self._outcomes.put((failed, None), after)

    def without_moves(self, failed: Iterable[Worker]) -> PlannedOutcome | None:
        """Return the outcome without moving layers; None if layers never move. Raises PlanError as `outcome` does."""
        return self.rerouting and self._cached_outcome(frozenset(failed), self.rerouting)

    def _cached_outcome(self, failed: frozenset[Worker], planner: WhatIfPlanner | None) -> PlannedOutcome:
        require_hosts(self.shape, failure_vector(self.shape, failed))
        with self._lock:
            cached = self._outcomes.get((failed, planner))
            return cached or self._outcomes.put((failed, planner), self._evaluate(failed, planner))

    def _evaluate(self, failed: frozenset[Worker], planner: WhatIfPlanner | None) -> PlannedOutcome:
        start = time.perf_counter()
        plan, source = self._plan(failed, planner)
        shape, job = plan.schedule.shape, self.job
        profile = profile_of_layout(job, self.profile, shape) if job else self.profile
        timeline = simulate(plan.schedule, profile)
        return PlannedOutcome(failed, plan, timeline, source, time.perf_counter() - start, self.condition, self.unit)

    def _plan(self, failed: frozenset[Worker], planner: WhatIfPlanner | None) -> tuple[Plan, Source]:
        """Return the plan of a planner; None: the library's, or else one of the planner for all failures."""
        vector = failure_vector(self.shape, failed)
        entry = self.library.get(vector) if self.library and self.profile.are_peers_alike else None
        if planner is None and entry is not None and entry.shape == self.shape:
            return entry.for_processes(failed), "library"
        planner = planner or self.planner
        if planner is not None:
            return planner(failed), "planned"
        if self.library is None:
            raise PlanError("neither a plan library nor a planner is loaded: pass a job file, recycle view job.toml")
        plan, roles, moves = self.library.lookup(failed, self.shape)
        if moves:
            raise PlanError(f"the library has a plan for vector {vector} only if workers change stage")
        return replace(plan, schedule=rename(plan.schedule, roles)), "library"
