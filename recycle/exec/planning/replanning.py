"""Plans that follow the times: when they drift, a plan for the new ones is made in the background and taken up.

A new generation begins at an iteration boundary once the checked plan is there, and only if it is better by `MARGIN`;
until then everybody trains on. What is asked for one set of live workers is dropped when the set changes: a failure is
answered at once with a plan for the job's own profile, and if the times still depart from that, a better one follows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from recycle.errors import RecycleError
from recycle.exec.leader.compute_times import ComputeTimes
from recycle.exec.leader.drift import DriftMonitor
from recycle.exec.leader.worth import copy_time, is_worth, moves_between
from recycle.exec.membership.interfaces import Ready
from recycle.exec.planning.planner_process import Question
from recycle.exec.planning.planning import PlanService
from recycle.ir.lower import with_barrier
from recycle.ir.schedule import Schedule
from recycle.ir.simulate import simulate
from recycle.job import PricedJob
from recycle.plans import Plan, failure_vector
from recycle.plans.hosting import Hosts
from recycle.plans.plan import in_process_names
from recycle.pricing import profile_of_layout
from recycle.profile import Profile
from recycle.shape import Worker

MARGIN = 0.05
"""Share of the period that a plan must save to be taken up. A new generation costs about an iteration: the pipeline
drains, groups form, and the first iteration waits for its barrier. So it has paid for itself after 20."""
QUIET = 4
"""A change within this many pauses of the last one doubles the pause before the next, so that times which jump to and
fro, as on cores that several workers share, cost ever fewer changes. The first pause is a window."""


@dataclass(frozen=True)
class _Asked:
    """A plan that was asked for.

    Attributes:
        failed: the dead workers.
        question: as it was asked.
        profile, cause: to plan with, and what has changed.
        layout: the plan that ran then, where that is not one of the given stages.
    """

    failed: frozenset[Worker]
    question: Question
    profile: Profile
    cause: str
    layout: Ready | None


@dataclass(frozen=True)
class _Better:
    failed: frozenset[Worker]
    ready: Ready
    details: dict[str, object]
    layout: Ready | None


class Replanner:
    """Implements the coordinator's `Plans` on a `PlanService`.

    Args:
        job: its `[membership]` section says what counts as drift.
        plans: makes plans for the job's own profile, and others in the background.
        directory: profiles that are planned with are left here as `<digest>.json`.
        log: takes the events `replanned` and `slow-link`.

    Attributes:
        compute: what the line of metrics says of the last iteration that was observed, see `ComputeTimes.line`.
    """

    def __init__(self, job: PricedJob, plans: PlanService, directory: Path, log: Callable[..., None]) -> None:
        self._job, self._plans, self._directory, self._log = job, plans, directory, log
        takes_time = job.model.kind != "emulated" or job.model.seconds_per_unit > 0
        self._is_on = job.membership.drift > 0 and job.planner.reroute and plans.can_plan and takes_time
        self._drift = DriftMonitor.of(job)
        self._planned: dict[frozenset[Worker], Profile] = {}
        self._ready: dict[frozenset[Worker], Ready] = {}
        self._live: frozenset[Worker] = frozenset()
        self._asked: _Asked | None = None
        self._better: _Better | None = None
        self._step = -1
        self._changed: int | None = None
        self._pause = job.membership.drift_iterations
        self.compute: dict[str, Any] = {"compute": {}}

    def ready(self, failed: frozenset[Worker], layout: Ready | None = None) -> Ready | None:
        """As `Plans.ready`; `layout` is the plan that runs, where that is not one of the given stages."""
        better = self._better
        if better is not None and better.failed == failed and better.layout == layout:
            self._better = None
            self._note_change(self._step + 1)
            self._log("replanned", step=self._step + 1, plan=better.ready.digest, **better.details)
            if layout is not None:
                return better.ready
            self._ready[failed] = better.ready
        return layout or self._ready.get(failed) or self._plans.ready(failed)

    def adopt(self, failed: frozenset[Worker], ready: Ready) -> None:
        """Use this plan of the given stages without the failed workers from now on."""
        self._ready[failed] = ready

    def hosts(self, digest: str) -> Hosts | None:
        return self._plans.hosts(digest)

    def _note_change(self, step: int) -> None:
        is_quiet = self._changed is None or step >= self._changed + QUIET * self._pause
        self._pause = self._job.membership.drift_iterations if is_quiet else 2 * self._pause
        self._changed = step

    def has_better(self, failed: frozenset[Worker]) -> bool:
        return self._better is not None and self._better.failed == failed

    def observe(
        self,
        failed: frozenset[Worker],
        step: int,
        times: ComputeTimes,
        layout: Ready | None = None,
        *,
        may_replan: bool = True,
    ) -> None:
        """As `Plans.observe`.

        Args:
            layout: as of `ready`.
            may_replan: another plan may follow.
        """
        self.compute = times.line()
        if not self._is_on or not may_replan:
            return
        self._step = step
        reported = frozenset(times.workers)
        for worker in self._live - reported:
            self._drift.forget(worker)
        self._live = reported
        self._drift.observe(times, by_stage=layout is not None)
        if self._better is not None and (self._better.failed, self._better.layout) != (failed, layout):
            self._better = None
        if self._asked is not None and (self._asked.failed, self._asked.layout) != (failed, layout):
            self._asked = None
        self._take_answers(failed)
        pauses = self._changed is not None and step < self._changed + self._pause
        if self._asked is None and self._better is None and not pauses and not self._plans.is_own(failed):
            self._ask(failed, layout)

    def _ask(self, failed: frozenset[Worker], layout: Ready | None) -> None:
        departed = self._drift.departed(self._planned.get(failed, self._drift.profile), self._live)
        if departed is None:
            return
        profile, cause = departed
        for link in self._drift.slow_links:
            self._log(
                "slow-link",
                worker=str(link.sender),
                peer=str(link.receiver),
                step=self._step,
                seconds=round(link.seconds, 6),
                factor=None if link.factor is None else round(link.factor, 3),
            )
        self._directory.mkdir(exist_ok=True)
        file = self._directory / f"{profile.digest()}.json"
        profile.save(file)
        names = tuple(map(str, sorted(failed)))
        vector, moves = failure_vector(self._job.shape, failed), layout is not None
        question = Question(vector, False, names, str(file.resolve()), moves)
        self._asked = _Asked(failed, question, profile, cause, layout)
        self._plans.ask(question)

    def _take_answers(self, failed: frozenset[Worker]) -> None:
        for question, text, error in self._plans.answers(drifted=True):
            asked = self._asked
            if asked is None or question != asked.question:
                continue
            self._asked = None
            self._planned[failed] = asked.profile  # the next to depart departs from here, whatever comes of this
            if not error:
                self._better = self._judge(asked, text)

    def _judge(self, asked: _Asked, text: str) -> _Better | None:
        """The plan, if it is valid and enough better than the one in use, both timed with the new profile."""
        now = self.ready(asked.failed, asked.layout)
        assert now is not None, "its live set has just committed an iteration"
        try:
            plan = Plan.from_text(text, "plan for other times")
            schedule = in_process_names(plan)
            ready = self._plans.prepare(schedule, replace(plan, schedule=schedule, moves=()), asked.profile)
        except RecycleError:
            return None
        running = Schedule.loads(now.text, "the plan in use")
        is_staggered = "staggered" in ready.periods and "staggered" in now.periods
        profile = profile_of_layout(self._job, asked.profile, running.shape)
        before = simulate(running if is_staggered else with_barrier(running), profile).period
        after = ready.periods["staggered" if is_staggered else "barrier"]
        if not after < before * (1 - MARGIN):
            return None
        details = {
            "cause": asked.cause,
            "period_before": before,
            "period": after,
            "profile": asked.profile.digest(),
        }
        if asked.layout is not None:
            assert now.hosts is not None
            assert ready.hosts is not None
            copying = copy_time(moves_between(self._job, now.hosts, ready.hosts))
            if not is_worth(before, after, before + copying, self._job.planner.iterations_between_changes * before):
                return None
        return _Better(asked.failed, ready, details, asked.layout)
