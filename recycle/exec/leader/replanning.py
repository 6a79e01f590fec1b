"""Plans that follow the times: when they drift, a plan for the new times is made in the background and taken up.

A new generation begins at an iteration boundary once the checked plan is there, and only if it is better by `MARGIN`;
until then training goes on. A plan that was asked for is dropped when the live workers change: a failure is answered at
once with a plan for the job's own profile, and if the times still depart from that, a better one follows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from recycle.exec.leader.actions import Outbox, PreparedPlan, Question
from recycle.exec.leader.compute_times import ComputeTimes
from recycle.exec.leader.drift import DriftMonitor
from recycle.exec.leader.worth import copy_time, is_worth, moves_between
from recycle.job import PricedJob
from recycle.profile import Profile
from recycle.shape import Worker

if TYPE_CHECKING:
    from recycle.exec.leader.plans import PlanAnswers

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
        profile, cause: to plan with, and what has changed.
        layout: the plan that ran then, where that is not one of the given stages.
        running: the plan that ran then.
    """

    question: Question
    profile: Profile
    cause: str
    layout: PreparedPlan | None
    running: PreparedPlan


@dataclass(frozen=True)
class _Better:
    failed: frozenset[Worker]
    plan: PreparedPlan
    details: dict[str, object]
    layout: PreparedPlan | None


class Replanner:
    """Plans of the given stages, and better ones where the times drift.

    Args:
        job: its `[membership]` section says what counts as drift.
        answers: of the planner.
        outbox: takes the events `replanned` and `slow-link`.

    Attributes:
        compute: the computing times of the last observed iteration, see `ComputeTimes.line`.
    """

    def __init__(self, job: PricedJob, answers: PlanAnswers, outbox: Outbox) -> None:
        self._job, self._answers, self._outbox = job, answers, outbox
        takes_time = job.model.kind != "emulated" or job.model.seconds_per_unit > 0
        self._is_on = job.membership.drift > 0 and job.planner.reroute and answers.can_search and takes_time
        self._drift = DriftMonitor.of(job)
        self._planned: dict[frozenset[Worker], Profile] = {}
        self._adopted: dict[frozenset[Worker], PreparedPlan] = {}
        self._live: frozenset[Worker] = frozenset()
        self._asked: _Asked | None = None
        self._better: _Better | None = None
        self._step = -1
        self._changed: int | None = None
        self._pause = job.membership.drift_iterations
        self.compute: dict[str, Any] = {"compute": {}}

    def ready(self, failed: frozenset[Worker], layout: PreparedPlan | None = None) -> PreparedPlan | None:
        """As `Plans.ready`; `layout` is the plan that runs, where that is not one of the given stages."""
        better = self._better
        if better is not None and better.failed == failed and better.layout == layout:
            self._better = None
            self._note_change(self._step + 1)
            self._outbox.log("replanned", step=self._step + 1, plan=better.plan.digest, **better.details)
            if layout is not None:
                return better.plan
            self._adopted[failed] = better.plan
        return layout or self._adopted.get(failed) or self._answers.needed(failed)

    def adopt(self, failed: frozenset[Worker], plan: PreparedPlan) -> None:
        """Use this plan of the given stages without the failed workers from now on."""
        self._adopted[failed] = plan

    def _note_change(self, step: int) -> None:
        is_quiet = self._changed is None or step >= self._changed + QUIET * self._pause
        self._pause = self._job.membership.drift_iterations if is_quiet else 2 * self._pause
        self._changed = step

    def has_better(self, failed: frozenset[Worker]) -> bool:
        """As `Plans.has_better`."""
        return self._better is not None and self._better.failed == failed

    def observe(
        self,
        failed: frozenset[Worker],
        step: int,
        times: ComputeTimes,
        layout: PreparedPlan | None = None,
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
        if self._asked is not None and (self._asked.question.failed, self._asked.layout) != (failed, layout):
            self._asked = None
        self._take_answer(failed)
        pauses = self._changed is not None and step < self._changed + self._pause
        if self._asked is None and self._better is None and not pauses and not self._answers.is_own(failed):
            self._ask(failed, layout)

    def _ask(self, failed: frozenset[Worker], layout: PreparedPlan | None) -> None:
        departed = self._drift.departed(self._planned.get(failed, self._drift.profile), self._live)
        running = self.ready(failed, layout)
        if departed is None or running is None:
            return
        profile, cause = departed
        for link in self._drift.slow_links:
            self._outbox.log(
                "slow-link",
                worker=str(link.sender),
                peer=str(link.receiver),
                step=self._step,
                seconds=round(link.seconds, 6),
                factor=None if link.factor is None else round(link.factor, 3),
            )
        question = Question(failed, moves=layout is not None, profile=profile.digest(), compared=running.digest)
        self._asked = _Asked(question, profile, cause, layout, running)
        self._answers.pop(question)  # that of a question that was dropped
        self._answers.ask(question, profile)

    def _take_answer(self, failed: frozenset[Worker]) -> None:
        asked = self._asked
        if asked is None or (answer := self._answers.pop(asked.question)) is None:
            return
        self._asked = None
        self._planned[failed] = asked.profile  # whatever comes of it, the next departure is from these times
        if answer.plan is not None:
            self._better = self._judge(asked, answer.plan)

    def _judge(self, asked: _Asked, plan: PreparedPlan) -> _Better | None:
        """The plan, if it is enough better than the one in use, both timed with the new profile."""
        running, before = asked.running, plan.compared_period
        if before is None:
            return None
        is_staggered = "staggered" in plan.periods and "staggered" in running.periods
        after = plan.periods["staggered" if is_staggered else "barrier"]
        if not after < before * (1 - MARGIN):
            return None
        details = {
            "cause": asked.cause,
            "period_before": before,
            "period": after,
            "profile": asked.question.profile,
        }
        if asked.layout is not None:
            assert running.hosts is not None
            assert plan.hosts is not None
            copying = copy_time(moves_between(self._job, running.hosts, plan.hosts))
            if not is_worth(before, after, before + copying, self._job.planner.iterations_between_changes * before):
                return None
        return _Better(asked.question.failed, plan, details, asked.layout)
