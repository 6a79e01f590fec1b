"""What-if: plans for chosen dead workers, from the library or from a planner passed in.

The viewer imports no solver; `recycle view` passes a callable. Answers are cached, so undo and deep links are fast.
Workers have the names of processes: the failed workers of an answer's schedule are the requested ones.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import msgspec

from recycle.errors import PlanError, RecycleError
from recycle.ir.memory import held_activations
from recycle.ir.simulate import Timeline, simulate
from recycle.job import Job, PricedJob, price
from recycle.job.pricing import profile_of_layout
from recycle.job.profile import Profile
from recycle.job.shape import Shape, Worker
from recycle.plans import Entry, Plan, PlanLibrary, dead_roles, failure_vector, rename, require_hosts
from viz.lane_cache import BoundedCache, Explainer
from viz.lanes import LaneTable

WhatIfPlanner = Callable[[frozenset[Worker]], Plan]
"""Dead workers -> their plan, in the names of the processes. Raises PlanError if none exists."""
Source = Literal["library", "planned"]
_Maker = Callable[[frozenset[Worker]], tuple[Plan, Source]]
KEPT, KEPT_ROWS = 16, 4_000_000
"""Maximum number of cached answers, and of rows of their timelines; the last two always stay."""
MOST_COUNTED = 2_000_000
"""Maximum instructions over all plans of a library for which the table shows peaks."""


@dataclass(frozen=True, eq=False)
class Answer:
    """The plan for a set of dead workers.

    Attributes:
        plan: in the names of the processes; live workers that it leaves idle are among its failed workers.
        source: "library", or "planned" for a new plan.
    """

    failed: frozenset[Worker]
    plan: Plan
    timeline: Timeline
    source: Source
    seconds: float

    @cached_property
    def lanes(self) -> LaneTable:
        return LaneTable.from_timeline(self.timeline)

    @property
    def idle(self) -> list[Worker]:
        """Return the live workers that the plan leaves idle."""
        return sorted(self.plan.schedule.failed - self.failed)

    @cached_property
    def explainer(self) -> Explainer:
        return Explainer(self.timeline, limits=self.plan.limits, bound=(self.plan.lower_bound, self.plan.gap))


class WhatIf:
    """Plans of one job.

    Args:
        job: prices and limits; None if only a library is given, whose plans are timed in slots of 1.
        library: consulted first.
        planner: used if the library has no plan for the exact failure vector.
        rerouting: a planner that moves no layers, if `planner` may.
        searcher: a slower planner for better plans.
        of_job: returns the `WhatIf` of another job, for slow workers; None: slow workers are not supported.

    Raises:
        RecycleError: neither a job nor a plan states the shape.
    """

    def __init__(
        self,
        job: Job | None,
        library: PlanLibrary | None,
        planner: WhatIfPlanner | None,
        rerouting: WhatIfPlanner | None = None,
        searcher: WhatIfPlanner | None = None,
        of_job: Callable[[PricedJob], WhatIf] | None = None,
    ) -> None:
        job = None if job is None else price(job)
        self.job, self.library, self.planner, self.rerouting = job, library, planner, rerouting
        self.searcher, self.of_job = searcher, of_job
        self._slowed: tuple[tuple[tuple[Worker, float], ...], WhatIf] | None = None
        self.profile = job.prices if job else Profile.uniform()
        self.limits = job.limits if job else None
        self.shape = job.shape if job else self._shape_of_library()
        self._answers: BoundedCache[tuple[frozenset[Worker], bool], Answer] = BoundedCache(
            KEPT_ROWS, lambda answer: len(answer.timeline.start), at_least=2, at_most=KEPT
        )
        self._lock = threading.Lock()

    def _shape_of_library(self) -> Shape:
        first = next(iter(self.library.plans()), None) if self.library else None
        if first is None:
            where = f"{self.library.directory}: " if self.library else ""
            raise RecycleError(f"{where}no plan can be read in it, and no job file was given")
        return first.shape

    def entries(self) -> list[Entry]:
        """Return the library's plans for this job, fewest failures first."""
        return self.library.usable() if self.library else []

    def peaks(self, entries: Sequence[Entry]) -> list[float | None]:
        """Return the largest activations on any worker under each plan; None beyond `MOST_COUNTED`."""
        each = 3 * self.shape.stages * self.shape.global_micro_batches
        found: list[float | None] = []
        for place, entry in enumerate(entries):
            plan = self.library.read(entry) if self.library and (place + 1) * each <= MOST_COUNTED else None
            held = held_activations(plan.schedule, self.profile, in_bytes=False)[0] if plan else None
            found.append(max(held, default=0.0) if held is not None else None)
        return found

    def dead_of(self, vector: Sequence[int]) -> frozenset[Worker]:
        """Return a set of dead workers with the given failure vector."""
        return dead_roles(self.shape, vector)

    def with_slow(self, slow: Sequence[tuple[Worker, float]]) -> WhatIf:
        """Return the `WhatIf` for slow workers, given with their factors; it has no library.

        Raises PlanError if no planner is available.
        """
        if not slow:
            return self
        if self.job is None or self.of_job is None:
            raise PlanError("slow workers: only a job can be planned for: recycle view job.toml")
        key = tuple(slow)
        with self._lock:
            if self._slowed is None or self._slowed[0] != key:
                speed = self.profile.speed | {str(w): factor * self.profile.speed_of(w) for w, factor in key}
                prices = replace(self.profile, speed=speed)
                self._slowed = key, self.of_job(msgspec.structs.replace(self.job, prices=prices))
            return self._slowed[1]

    def answer(self, failed: Iterable[Worker]) -> Answer:
        """Return the plan without `failed`. Questions are answered one at a time.

        Raises:
            PlanError: a stage has no live worker, a memory limit is too small, or the library lacks the plan and no
                planner is loaded.
        """
        return self._answered(frozenset(failed), self._plan, moving=True)

    def searched(self, failed: Iterable[Worker]) -> tuple[Answer, Answer]:
        """Return (the answer before, the answer after a longer search); equal if the search did not shorten the period.

        Raises PlanError as in `answer`, or if no planner is loaded.
        """
        failed = frozenset(failed)
        if self.searcher is None:
            raise PlanError("no planner is loaded: give a job file, recycle view job.toml")
        before, after = self.answer(failed), self._made(failed, _by(self.searcher))
        if after.plan.period >= before.plan.period * (1 - 1e-9):
            return before, before
        return before, self._answers.put((failed, True), after)

    def without_moving(self, failed: Iterable[Worker]) -> Answer | None:
        """Return the answer without moving layers; None if layers never move. Raises PlanError as `answer` does."""
        return self._answered(frozenset(failed), _by(self.rerouting), moving=False) if self.rerouting else None

    def _answered(self, failed: frozenset[Worker], make: _Maker, *, moving: bool) -> Answer:
        require_hosts(self.shape, failure_vector(self.shape, failed))
        with self._lock:
            known = self._answers.get((failed, moving))
            return known or self._answers.put((failed, moving), self._made(failed, make))

    def _made(self, failed: frozenset[Worker], make: _Maker) -> Answer:
        begun = time.perf_counter()
        plan, source = make(failed)
        shape, job = plan.schedule.shape, self.job
        profile = profile_of_layout(job, self.profile, shape) if job else self.profile
        timeline = simulate(plan.schedule, profile)
        return Answer(failed, plan, timeline, source, time.perf_counter() - begun)

    def _plan(self, failed: frozenset[Worker]) -> tuple[Plan, Source]:
        vector = failure_vector(self.shape, failed)
        kept = self.library.get(vector) if self.library and self.profile.are_peers_alike else None
        if kept is not None and kept.shape == self.shape:
            return kept.for_processes(failed), "library"
        if self.planner is not None:
            return self.planner(failed), "planned"
        if self.library is None:
            raise PlanError("no plan library is loaded and there is no planner: give a job file, recycle view job.toml")
        plan, roles, moves = self.library.lookup(failed, self.shape)
        if moves:
            raise PlanError(f"the library has a plan for vector {vector} only if workers change stage")
        return replace(plan, schedule=rename(plan.schedule, roles)), "library"


def _by(planner: WhatIfPlanner) -> _Maker:
    return lambda failed: (planner(failed), "planned")
