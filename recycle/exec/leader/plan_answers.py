"""What the planner was asked, and what it has answered."""

from __future__ import annotations

from collections.abc import Mapping

from recycle.errors import RunError
from recycle.exec.leader.actions import Ask, Outbox, Planned, PreparedPlan, Question
from recycle.job import PricedJob
from recycle.job.profile import Profile
from recycle.job.shape import Worker
from recycle.plans import failure_vector
from recycle.plans.hosting import Hosts


class PlanAnswers:
    """What the planner has answered.

    Args:
        job: what plans are for.
        outbox: takes the questions.
        own: plan of the user's own schedule, and the workers that it leaves out.
        can_search: whether better plans than those that are needed now can be asked for.

    Attributes:
        hosts: hash of a plan -> who hosts what by it.
    """

    def __init__(
        self,
        job: PricedJob,
        outbox: Outbox,
        own: tuple[frozenset[Worker], PreparedPlan] | None = None,
        can_search: bool = True,
    ) -> None:
        self._job, self._outbox, self._own = job, outbox, own
        self.can_search = can_search
        self._answers: dict[Question, Planned | None] = {}
        self.hosts: dict[str, Hosts] = {}
        if own is not None:
            self._note_hosts(own[1])

    def _note_hosts(self, plan: PreparedPlan) -> None:
        if plan.hosts is not None:
            self.hosts[plan.digest] = plan.hosts

    def take(self, planned: Planned) -> None:
        """Take an answer. An error does not replace a plan."""
        if planned.plan is not None:
            self._note_hosts(planned.plan)
        if planned.plan is not None or self._answers.get(planned.question) is None:
            self._answers[planned.question] = planned

    def needed(self, failed: frozenset[Worker], within: str = "") -> PreparedPlan | None:
        """The plan without the failed workers that training goes on with at once; None while it is being made.

        Args:
            within: hash of a plan in use whose layout is kept.

        Raises:
            RunError: there is none.
        """
        if self._own is not None and not within and self.is_own(failed):
            return self._own[1]
        question = Question(failed, is_urgent=True, within=within)
        self.ask(question)
        answer = self._answers[question]
        if answer is not None and answer.plan is None:
            vector = failure_vector(self._job.shape, failed)
            raise RunError(f"no plan for {vector} dead workers per stage: {answer.error}")
        return None if answer is None else answer.plan

    def ask(self, question: Question, profile: Profile | None = None) -> None:
        """Ask a question, once."""
        if question not in self._answers:
            self._answers[question] = None
            self._outbox.put(Ask(question, profile))

    def pop(self, question: Question) -> Planned | None:
        """The answer to a question that may be asked again afterwards; None while there is none."""
        return self._answers.pop(question) if self._answers.get(question) is not None else None

    def adopt(self, failed: frozenset[Worker], plan: PreparedPlan | None, hosts: Mapping[str, Hosts]) -> None:
        """Take over from another leader the plan without the failed workers, and the hosts of earlier plans."""
        self.hosts.update(hosts)
        if plan is not None:
            self.take(Planned(Question(failed, is_urgent=True), plan))

    def is_own(self, failed: frozenset[Worker]) -> bool:
        """Whether the user's own schedule runs without these workers."""
        return self._own is not None and self._own[0] == failed
