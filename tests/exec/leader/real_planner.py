"""The real planner, which answers the questions of plans as it does in a run."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from recycle.cli.planner import plan_for_training
from recycle.exec.leader.actions import Ask, Event, Outbox, PreparedPlan, Question
from recycle.exec.leader.plan_answers import PlanAnswers
from recycle.exec.planning.planning import PlanService
from recycle.exec.processes.processes import Waker
from recycle.job import PricedJob


class RealPlanner:
    """Carries out the actions of plans.

    Attributes:
        outbox, answers: what `Plans` are made with.
        events: that they have written.
    """

    def __init__(self, job: PricedJob, service: PlanService) -> None:
        self._service = service
        self._open: set[Question] = set()
        self.outbox = Outbox()
        self.answers = PlanAnswers(job, self.outbox, can_search=service.can_search)
        self.events: list[dict[str, Any]] = []

    def _exchange(self) -> None:
        for action in self.outbox.take():
            match action:
                case Ask(question=question, profile=profile):
                    self._open.add(question)
                    self._service.ask(question, profile)
                case Event(kind=kind, fields=fields):
                    self.events.append({"kind": kind, **fields})
        for planned in self._service.look(print):
            self._open.discard(planned.question)
            self.answers.take(planned)

    def answer_all(self) -> None:
        """Wait until every question is answered."""
        deadline = time.monotonic() + 120
        self._exchange()
        while self._open:
            assert time.monotonic() < deadline, self._open
            time.sleep(0.01)
            self._exchange()

    def wait_for(self, ready: Callable[[], PreparedPlan | None]) -> PreparedPlan:
        """The plan, once it is made."""
        for _ in range(3):
            plan = ready()
            self.answer_all()
            if plan is not None:
                return plan
        raise AssertionError("all questions are answered, and there is no plan")


@contextmanager
def real_planner(job: PricedJob, directory: Path) -> Iterator[RealPlanner]:
    """The planner, with plan files in `directory/plans` and profiles in `directory/profiles`."""
    (directory / "plans").mkdir()
    waker = Waker()
    service = PlanService(job, plan_for_training, directory / "plans", directory / "profiles", waker)
    try:
        yield RealPlanner(job, service)
    finally:
        service.close()
        waker.close()
