"""Plans for the live workers: made ahead in a child process, or urgently when needed, and checked.

A planner function, known by name, runs in child processes, so that the leader never waits for a solver: one child plans
for likely failure vectors, another answers urgent questions. The children also check and simulate.

Plans are keyed by failure vector, so that survivors keep their positions and only the dead workers' micro-batches are
re-routed. If peers differ, plans are made for the dead workers themselves.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import TypeVar

import msgspec

from recycle.errors import RecycleError
from recycle.exec.leader.actions import Planned, PreparedPlan, Question as LeaderQuestion
from recycle.exec.leader.plans import common_mode
from recycle.exec.planning.planner_process import Planner, PlannerAnswer, PlannerProcess, Question
from recycle.exec.planning.run_checks import ScheduleFacts, check_for_run, periods_of
from recycle.exec.processes.processes import Waker
from recycle.files import write_whole, writing
from recycle.ir.schedule import Schedule, placement_of
from recycle.job import PricedJob
from recycle.job.profile import Profile
from recycle.job.shape import Worker
from recycle.plans import Plan, failure_vector, likely_vectors, schedule_hash
from recycle.plans.hosting import Hosts, stages_by_rank
from recycle.runs.logs import plan_file
from recycle.threads import WaitingThread

URGENT, BACKGROUND = 5, 12
"""Niceness of planners. If workers need all cores, a planner gets 25 % or 6 % of a core."""
_Item = TypeVar("_Item")


class PlanService:
    """Answers the leader's questions for plans.

    Args:
        planner: see `Planner`; None to run only `schedule`.
        directory: folder for plan files in use, `<hash>.json`.
        profiles: folder for the profiles to plan with, `<digest>.json`.
        waker: is woken when there is an answer.
        schedule: the user's own schedule, for the workers that it leaves alive.
        has_first: the leader has a plan of all workers.
    """

    def __init__(
        self,
        job: PricedJob,
        planner: Planner | None,
        directory: Path,
        profiles: Path,
        waker: Waker,
        schedule: Schedule | None = None,
        has_first: bool = False,
    ) -> None:
        self._job, self._directory, self._profiles, self._waker = job, directory, profiles, waker
        self._schedule = schedule
        # If the user's placement is the same for all workers of a rank, the plans of other live workers keep it.
        usual = schedule is None or schedule.placement == placement_of(job.shape) or stages_by_rank(schedule) is None
        self._like = None if usual else schedule
        self._planner = planner
        self._by_vector = job.prices.are_peers_alike
        self._ahead: dict[Question, tuple[Plan, ScheduleFacts]] = {}
        self._schedules: dict[str, Schedule] = {}
        self._waiting: dict[Question, list[tuple[LeaderQuestion, Profile | None]]] = {}
        self._lock = threading.Lock()
        self._prepared: queue.SimpleQueue[Planned] = queue.SimpleQueue()
        self._warnings: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._thread = WaitingThread()
        self._children: list[PlannerProcess] = []
        if planner is not None:
            likely = islice(self._likely(), has_first, None)
            self._background, self._urgent = self._child(planner, likely), self._child(planner, niceness=URGENT)

    def _child(
        self, planner: Planner, questions: Iterable[Question] = (), niceness: int = BACKGROUND
    ) -> PlannerProcess:
        child = PlannerProcess(self._job, planner, self._take, self._warnings.put, self._like, questions, niceness)
        self._children.append(child)
        return child

    def _likely(self) -> Iterator[Question]:
        """If peers differ: no failure, and each single failure."""
        shape, ahead = self._job.shape, self._job.planner.ahead
        if self._by_vector:
            most = shape.ranks * (shape.pipelines - 1)
            yield from (Question(vector) for vector in likely_vectors(shape, min(ahead, most)))
            return
        alone = [(worker,) for worker in shape.workers()] if ahead and shape.pipelines > 1 else []
        for failed in ((), *alone):
            yield Question(failure_vector(shape, failed), False, tuple(map(str, failed)))

    @property
    def can_search(self) -> bool:
        """Whether the planner can search for better plans; not with a placement of the user."""
        return self._planner is not None and self._like is None

    def own(self) -> tuple[frozenset[Worker], PreparedPlan] | None:
        """Return the user's own schedule, prepared, and the workers that it leaves out. Raises ScheduleError."""
        if self._schedule is None:
            return None
        schedule, facts = check_for_run(self._schedule, self._job, self._job.prices)
        return schedule.failed, self._prepared_plan(schedule, facts)

    def ask(self, question: LeaderQuestion, profile: Profile | None = None) -> None:
        """Start answering a question; `poll` returns the answer."""
        if question.text:
            self._thread.submit(self._answer_with, question)
            return
        if self._planner is None:
            self._deliver(question, error="no planner was given")
            return
        try:
            asked = self._translated(question, profile)
        except RecycleError as error:
            self._warnings.put(f"no plan for the measured times: {error}")
            self._deliver(question, error=str(error))
            return
        with self._lock:
            known = self._ahead.get(msgspec.structs.replace(asked, quick=True)) if question.is_urgent else None
            waiting = self._waiting.setdefault(asked, []) if known is None else []
            waiting.append((question, profile))
        if known is not None:
            self._thread.submit(self._answer, asked, question, profile, known)
            return
        if len(waiting) > 1:
            return
        if question.is_urgent:
            self._urgent.ask(asked)
        elif not self._background.is_busy:
            self._background.ask(asked)
        else:  # a third child, so that the urgent child stays free
            (self._children[2] if len(self._children) > 2 else self._child(self._planner)).ask(asked)

    def _answer_with(self, question: LeaderQuestion) -> None:
        try:
            schedule = Schedule.loads(question.text, "session(schedule=...)")
            if not self._job.planner.staggered:
                schedule = replace(schedule, optimizer="barrier")
            prepared = self._prepared_plan(*check_for_run(schedule, self._job, self._job.prices))
        except RecycleError as error:
            self._deliver(question, error=str(error))
        else:
            self._deliver(question, prepared)

    def _translated(self, question: LeaderQuestion, profile: Profile | None) -> Question:
        failed, file = tuple(map(str, sorted(question.failed))), None
        vector = failure_vector(self._job.shape, question.failed)
        within = str(plan_file(self._directory, question.within).resolve()) if question.within else None
        if profile is not None:
            with writing(self._profiles):
                self._profiles.mkdir(exist_ok=True)
            file = str(self._profile_file(profile.digest()))
            profile.save(file)
        asked = Question(vector, question.is_urgent, failed, file, question.moves, within)
        if not question.is_urgent or within is not None:
            return asked
        if max(vector) >= self._job.shape.pipelines and self._job.planner.layout == "elastic":
            # If all workers of a rank are dead, other workers may hold their state.
            return msgspec.structs.replace(asked, quick=False, moves=True)
        return msgspec.structs.replace(asked, failed=None) if self._by_vector else asked

    def poll(self, warn: Callable[[str], object]) -> list[Planned]:
        """Return the answers since the last call, and `warn` of problems that do not stop training; call regularly."""
        for child in self._children:
            child.restart_if_ended()
        for message in _drained(self._warnings):
            warn(message)
        return _drained(self._prepared)

    def _take(self, answered: PlannerAnswer) -> None:
        self._thread.submit(self._take_answer, answered)

    def _take_answer(self, answered: PlannerAnswer) -> None:
        asked, error = answered.question, answered.error
        urgent = msgspec.structs.replace(asked, quick=True)
        if not error:
            try:
                known = Plan.from_text(answered.text, f"plan for {asked.vector}"), answered.facts
            except RecycleError as refusal:
                error = str(refusal)
        with self._lock:
            waiting = self._waiting.pop(asked, [])
            if not (error or asked.profile):  # a plan made ahead answers the same urgent question
                waiting += self._waiting.pop(urgent, [])
            if not error and all(question.is_urgent for question, _ in waiting):  # a search is answered once
                self._ahead.setdefault(urgent, known)
        for question, profile in waiting:
            if error:
                self._deliver(question, error=error)
            else:
                self._answer(asked, question, profile, known)

    def _answer(
        self,
        asked: Question,
        question: LeaderQuestion,
        profile: Profile | None,
        known: tuple[Plan, ScheduleFacts],
    ) -> None:
        plan, facts = known
        if asked.failed is None:
            plan = plan.for_processes(question.failed)
        if question.is_urgent:
            self._deliver(question, self._prepared_plan(plan.schedule, facts, plan))
            return
        prepared = self._prepared_plan(plan.schedule, facts, replace(plan, moves=()))
        compared = None
        if (running := self._schedules.get(question.compared)) is not None:
            periods = periods_of(running, self._job, profile or self._job.prices)
            compared = periods[common_mode(facts.periods, periods)]
        self._deliver(question, replace(prepared, layout_limit=plan.layout_limit, compared_period=compared))

    def _deliver(self, question: LeaderQuestion, plan: PreparedPlan | None = None, error: str = "") -> None:
        self._prepared.put(Planned(question, plan, error))
        self._waker.wake()

    def _prepared_plan(self, schedule: Schedule, facts: ScheduleFacts, plan: Plan | None = None) -> PreparedPlan:
        text = schedule.dumps() if plan is None else replace(plan, schedule=schedule).text()
        digest, kept = schedule_hash(schedule), ""
        try:
            write_whole(plan_file(self._directory, digest), text)
        except RecycleError as error:
            kept = text
            self._warnings.put(f"a plan file cannot be written, and workers get the plan in a message: {error}")
        if self._job.integrity.every and not facts.rounds:
            self._warnings.put(
                f'[integrity] every = "gaps": plan {digest} has no gap that holds a replay: nothing is replayed while'
                f" it runs, and states are compared every {self._job.compared_every(0)} iterations; write every = N to"
                " replay anyway"
            )
        self._schedules[digest] = schedule
        return PreparedPlan(digest, facts.periods, kept, Hosts.of_schedule(self._job, schedule), facts.rounds)

    def _load(self, digest: str) -> Schedule | None:
        with contextlib.suppress(RecycleError):
            schedule = Schedule.load(plan_file(self._directory, digest))
            if schedule_hash(schedule) == digest:
                return schedule
        return None

    def hosts(self, digest: str) -> Hosts | None:
        """Return the hosts of the plan with this hash; None if the directory does not hold it."""
        schedule = self._load(digest)
        return None if schedule is None else Hosts.of_schedule(self._job, schedule)

    def times(self, digest: str) -> Profile | None:
        """Return the measured times with this digest; None if the directory does not hold them."""
        with contextlib.suppress(RecycleError):
            return Profile.load(self._profile_file(digest))
        return None

    def _profile_file(self, digest: str) -> Path:
        return (self._profiles / f"{digest}.json").resolve()

    def adopted(self, failed: frozenset[Worker], digest: str) -> PreparedPlan | None:
        """Return the plan that another leader used without the failed workers, if the directory holds it."""
        schedule = self._load(digest)
        if schedule is None or schedule.failed != failed:
            return None
        with contextlib.suppress(RecycleError):
            return self._prepared_plan(*check_for_run(schedule, self._job, self._job.prices))
        return None

    def close(self) -> None:
        for child in self._children:
            child.close()
        self._thread.shut()


def _drained(items: queue.SimpleQueue[_Item]) -> list[_Item]:
    return [items.get_nowait() for _ in range(items.qsize())]
