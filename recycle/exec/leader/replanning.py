"""Plans that follow the times: when they drift, a plan for the new times is made in the background and taken up.

A new generation begins at an iteration boundary once the checked plan is there, and only if it is better by `MARGIN`;
until then training goes on. A plan that was asked for is dropped when the live workers or their plan change: a failure
is answered at once with a plan for the job's own profile, and if the times still depart from that, a better one
follows.
"""

from __future__ import annotations

from dataclasses import dataclass

from recycle.exec.leader.actions import Outbox, PreparedPlan, Question
from recycle.exec.leader.compute_times import ComputeTimes
from recycle.exec.leader.drift import DriftMonitor
from recycle.exec.leader.plan_answers import PlanAnswers
from recycle.exec.leader.worth import common_mode, copy_time, is_worth, moves_between
from recycle.job import PricedJob
from recycle.job.profile import Profile
from recycle.job.shape import Worker

MARGIN = 0.05
"""Share of the period that a plan must save to be taken up. A new generation costs about an iteration: the pipeline
drains, groups form, and the first iteration waits for its barrier. So it has paid for itself after 20."""
QUIET = 4
"""A change within this many pauses of the last one doubles the pause before the next, so that times which jump to and
fro, as on cores that several workers share, cost ever fewer changes. The first pause is a window."""


@dataclass
class _Wanted:
    """A plan that was asked for.

    Attributes:
        running: the plan that ran then.
        profile, cause: to plan with, and what has changed.
        better: the answer, and both periods, if it is enough better than what ran.
    """

    question: Question
    running: PreparedPlan
    profile: Profile
    cause: str
    better: tuple[PreparedPlan, float, float] | None = None


class Replanner:
    """Better plans for the workers that train, where the times drift.

    Args:
        job: its `[membership]` section says what counts as drift.
        answers: of the planner.
        outbox: takes the events `replanned` and `slow-link`.
    """

    def __init__(self, job: PricedJob, answers: PlanAnswers, outbox: Outbox) -> None:
        self._job, self._answers, self._outbox = job, answers, outbox
        takes_time = job.model.kind != "emulated" or job.model.seconds_per_unit > 0
        self._is_on = job.membership.drift > 0 and job.planner.reroute and answers.can_search and takes_time
        self._drift = DriftMonitor(job)
        self._planned: dict[frozenset[Worker], Profile] = {}
        self._live: frozenset[Worker] = frozenset()
        self._wanted: _Wanted | None = None
        self._step = -1
        self._changed: int | None = None
        self._pause = job.membership.drift_iterations

    def has_better(self, failed: frozenset[Worker]) -> bool:
        """Whether a better plan without the failed workers is there."""
        wanted = self._wanted
        return wanted is not None and wanted.better is not None and wanted.question.failed == failed

    def take_better(self, failed: frozenset[Worker], running: PreparedPlan | None) -> PreparedPlan | None:
        """The plan that is better than the running one, if there is one: it will run from now on."""
        wanted = self._wanted
        if not self.has_better(failed) or wanted is None or wanted.better is None or wanted.running is not running:
            return None
        plan, before, after = wanted.better
        step, self._wanted = self._step + 1, None
        is_quiet = self._changed is None or step >= self._changed + QUIET * self._pause
        self._pause = self._job.membership.drift_iterations if is_quiet else 2 * self._pause
        self._changed = step
        self._outbox.log(
            "replanned",
            step=step,
            plan=plan.digest,
            cause=wanted.cause,
            period_before=before,
            period=after,
            profile=wanted.question.profile,
        )
        return plan

    def observe(
        self,
        failed: frozenset[Worker],
        step: int,
        times: ComputeTimes,
        running: PreparedPlan | None,
        *,
        is_moved: bool,
        is_own: bool,
    ) -> None:
        """An iteration is about to be committed, in which the workers computed for so long.

        Args:
            running: the plan that runs.
            is_moved: its layout is not that of the given stages.
            is_own: it is the user's own schedule, which is kept.
        """
        if not self._is_on:
            return
        self._step = step
        reported = frozenset(times.workers)
        for worker in self._live - reported:
            self._drift.forget(worker)
        self._live = reported
        self._drift.observe(times, self._profile_of(failed), by_stage=is_moved)
        wanted = self._wanted
        if wanted is not None and (wanted.question.failed != failed or wanted.running is not running):
            wanted = self._wanted = None
        if wanted is not None and (answer := self._answers.pop(wanted.question)) is not None:
            self._planned[failed] = wanted.profile  # whatever comes of it, the next departure is from these times
            wanted.better = None if answer.plan is None else self._judge(wanted, answer.plan)
            if wanted.better is None:
                self._wanted = None
        pauses = self._changed is not None and step < self._changed + self._pause
        if self._wanted is None and running is not None and not pauses and not is_own:
            self._ask(failed, running, is_moved)

    def _profile_of(self, failed: frozenset[Worker]) -> Profile:
        return self._planned.get(failed, self._job.prices)

    def _ask(self, failed: frozenset[Worker], running: PreparedPlan, is_moved: bool) -> None:
        departure = self._drift.departed(self._profile_of(failed))
        if departure is None:
            return
        for link in departure.slow_links:
            self._outbox.log(
                "slow-link",
                worker=str(link.sender),
                peer=str(link.receiver),
                step=self._step,
                seconds=round(link.seconds, 6),
                factor=None if link.factor is None else round(link.factor, 3),
            )
        profile = departure.profile
        question = Question(failed, moves=is_moved, profile=profile.digest(), compared=running.digest)
        self._wanted = _Wanted(question, running, profile, "; ".join(departure.causes))
        self._answers.pop(question)  # that of a question that was dropped
        self._answers.ask(question, profile)

    def _judge(self, wanted: _Wanted, plan: PreparedPlan) -> tuple[PreparedPlan, float, float] | None:
        """The plan and both periods under the new profile, if it is enough better than the one in use."""
        running, before = wanted.running, plan.compared_period
        after = plan.periods[common_mode(plan.periods, running.periods)]
        if before is None or not after < before * (1 - MARGIN):
            return None
        if wanted.question.moves:
            pause = before + copy_time(moves_between(self._job, running.hosts, plan.hosts))
            if not is_worth(before, after, pause, self._job.planner.iterations_between_changes * before):
                return None
        return plan, before, after
