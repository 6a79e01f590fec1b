"""A planner in a child process, restarted when the child ends, and replaced when its answer is overdue.

After `MOST_FAILURES` failures in a row, the calling thread makes urgent plans itself and gives up the rest.
"""

from __future__ import annotations

import importlib
import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import msgspec
from msgspec import Struct

from recycle.child import Child, serve
from recycle.errors import RecycleError
from recycle.exec.planning.run_checks import ScheduleFacts, check_for_run
from recycle.ir.plugins import load_plugins
from recycle.ir.schedule import Schedule
from recycle.job import Job, PricedJob, price
from recycle.job.shape import Worker
from recycle.plans import Plan, Vector
from recycle.plans.plan import in_process_names

MOST_FAILURES = 3
"""Children in a row that may end or stall before one has answered."""

Planner = Callable[..., str]
"""(job, dead workers per stage, quick) -> text of a plan file. A module-level function, so that a child can import it.

Optional arguments: `failed`, the dead workers, if peers differ; then plan in the names of the processes.
`like=schedule`: plan on the placement of the run's own schedule. `moves=True`: live workers may host other parts of the
model. `within=FILE`: keep the layout of that plan; with `moves`, start from it.
"""


class Question(Struct, frozen=True):
    """A question to a planner.

    Attributes:
        vector: dead workers per stage.
        quick: answer without any search.
        failed: the dead workers, if the plan is for these only.
        profile: file of the profile to plan with; None for the job's own.
        moves: workers may host other parts of the model.
        within: plan file with the present layout, which stays unless `moves`.
    """

    vector: Vector
    quick: bool = False
    failed: tuple[str, ...] | None = None
    profile: str | None = None
    moves: bool = False
    within: str | None = None


class PlannerAnswer(Struct, frozen=True):
    """An answer of a planner: a checked plan file with facts, or an error; `seconds` is the duration of answering."""

    question: Question
    text: str = ""
    facts: ScheduleFacts = ScheduleFacts({}, 0)
    error: str = ""
    seconds: float = 0.0


def answer(planner: Planner, job: PricedJob, like: Schedule | None, question: Question) -> PlannerAnswer:
    """Return the plan, checked for running, or the error; any exception of a planner becomes an error."""
    known: dict[str, Any] = {} if like is None else {"like": like}
    if question.failed is not None:
        known["failed"] = [Worker.parse(name) for name in question.failed]
    if question.moves:
        known["moves"] = True
    if question.within is not None:
        known["within"] = question.within
    began, asked = time.monotonic(), job
    try:
        if question.profile is not None:
            asked = job.with_sections(times=msgspec.structs.replace(job.times, profile=question.profile))
        text = planner(asked, question.vector, question.quick, **known)
    except Exception as failure:
        return PlannerAnswer(question, error=f"{type(failure).__name__}: {failure}")
    try:
        plan = Plan.from_text(text, f"plan for {question.vector}")
        schedule = plan.schedule if question.failed is None else in_process_names(plan)
        schedule, facts = check_for_run(schedule, job, asked.prices)
    except RecycleError as refusal:
        layout = "no plan for the present layout: " if question.within else ""
        return PlannerAnswer(question, error=f"{layout}{refusal}")
    except Exception as failure:  # a plug-in's exception
        return PlannerAnswer(question, error=f"{type(failure).__name__}: {failure}")
    text = replace(plan, schedule=schedule).text()
    return PlannerAnswer(question, text, facts, seconds=time.monotonic() - began)


class PlannerProcess:
    """Answers questions in order, and `questions` when idle; calls `answered` and `warn` in a thread.

    `[membership]` limits the duration of quick answers, `[planner] seconds`, if given, of others. Plans keep the
    placement of `like`.
    """

    def __init__(
        self,
        job: PricedJob,
        planner: Planner,
        answered: Callable[[PlannerAnswer], object],
        warn: Callable[[str], object],
        like: Schedule | None = None,
        questions: Iterable[Question] = (),
        niceness: int = 0,
    ) -> None:
        self._job, self._planner, self._like = job, planner, like
        self._deliver, self._warn = answered, warn
        self._niceness = str(niceness)
        self._asked: queue.Queue[Question | None] = queue.Queue()
        self._later = iter(questions)
        self._failures, self._longest, self._is_closed = 0, 0.0, False
        self._queue_next()
        self._start()
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    def _start(self) -> None:
        name = f"{self._planner.__module__}:{self._planner.__qualname__}"
        module, environment = "recycle.exec.planning.planner_process", {"OMP_NUM_THREADS": "1"}
        self._child = Child(module, name, self._niceness, environment=environment)
        self._is_fresh = True

    def _queue_next(self) -> None:
        if self._asked.empty() and (question := next(self._later, None)) is not None:
            self._asked.put(question)

    @property
    def is_busy(self) -> bool:
        return self._asked.unfinished_tasks > 0

    def ask(self, question: Question) -> None:
        self._asked.put(question)

    def restart_if_ended(self) -> None:
        """Replace a child that ended while idle; call regularly."""
        if not self.is_busy and self._failures < MOST_FAILURES and self._child.process.poll() is not None:
            self._asked.put(None)

    def _work(self) -> None:
        while not self._is_closed:
            question = self._asked.get()
            answered = None
            if question is None:
                self._replace()
            else:
                answered = self._ask_child(question)
                self._queue_next()
            self._asked.task_done()
            if answered is not None:
                self._deliver(answered)

    def _ask_child(self, question: Question) -> PlannerAnswer | None:
        while self._failures < MOST_FAILURES and not self._is_closed:
            line = self._exchange(question)
            if line.endswith(b"\n"):
                answered = msgspec.json.decode(line, type=PlannerAnswer)
                self._longest = max(self._longest, answered.seconds if question.quick else 0.0)
                self._is_fresh, self._failures = False, 0
                return answered
            self._replace()
        if self._is_closed:
            return None
        self._later = iter(())
        if not question.quick:
            return PlannerAnswer(question, error="no planner process answers")
        self._warn("no planner process answers; the leader's process makes urgent plans itself")
        return answer(self._planner, self._job, self._like, question)

    def _exchange(self, question: Question) -> bytes:
        overdue_leavers = threading.Timer(self._patience(question), self._child.process.kill)
        overdue_leavers.daemon = True
        overdue_leavers.start()
        if self._is_fresh:
            self._child.send((self._job.to_toml(), None if self._like is None else self._like.dumps()))
        self._child.send(question)
        line = self._child.answers.readline()
        overdue_leavers.cancel()
        return line

    def _patience(self, question: Question) -> float:
        limits, plans = self._job.membership, self._job.planner
        if not question.quick and plans.steps is not None:
            return threading.TIMEOUT_MAX
        longest = self._longest if question.quick else plans.seconds
        return max(limits.hung_after, limits.hung_factor * longest) + (limits.warm_up if self._is_fresh else 0.0)

    def _replace(self) -> None:
        self._child.close()
        self._failures += 1
        if self._failures < MOST_FAILURES and not self._is_closed:
            self._start()

    def close(self) -> None:
        self._is_closed = True
        self._asked.put(None)
        self._child.process.kill()
        self._thread.join()
        self._child.close()


def _serve(parent: str, name: str, niceness: str) -> None:
    """The child's loop. Standard output of solvers is redirected."""
    requests, answers = serve(parent)
    os.nice(int(niceness))
    load_plugins()
    module, _, function = name.partition(":")
    planner = getattr(importlib.import_module(module), function)
    first = requests.readline()
    if not first.endswith(b"\n"):
        return  # the launcher has ended
    text, placement = msgspec.json.decode(first, type=tuple[str, str | None])
    job = price(Job.from_toml(text))
    like = None if placement is None else Schedule.loads(placement)
    for line in requests:
        answered = answer(planner, job, like, msgspec.json.decode(line, type=Question))
        answers.write(msgspec.json.encode(answered) + b"\n")


if __name__ == "__main__":
    _serve(*sys.argv[1:])
