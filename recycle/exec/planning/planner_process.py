"""A planner in a process of its own, started again when it ends, and replaced when its answer is overdue.

A process may be ended by whoever is short of memory, or stand still. That costs the time in which another one starts,
and the question is asked again. Once `MOST_FAILURES` processes in a row have not answered, the thread that talks to
them plans itself what is needed now, and gives up the rest. One question is under way at a time.
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
"""Processes in a row that may end or fall silent before one has answered."""

Planner = Callable[..., str]
"""(job, dead workers per stage, quick) -> text of a plan file. A module-level function, for a child imports it.

Where peers are not alike it is called with `failed`, the dead workers, too, and plans in the names of the processes.
Where the run's own schedule places stages in a way of its own it is called with `like=schedule` too, and plans on that
placement. With `moves=True` it plans for the dead workers themselves, and live ones may host other parts of the model.
With `within=FILE` it plans for them in the layout of that plan, and nobody hosts anything else than there; with both
they may move from there.
"""


class Question(Struct, frozen=True):
    """What a planner is asked.

    Attributes:
        vector: dead workers per stage.
        quick: without any search.
        failed: the dead workers, where the plan shall be for them alone.
        profile: file of the profile to plan with; the job's own when left out.
        moves: workers may come to host other parts of the model.
        within: plan file whose layout workers are in; it stays as it is unless they may move.
    """

    vector: Vector
    quick: bool = False
    failed: tuple[str, ...] | None = None
    profile: str | None = None
    moves: bool = False
    within: str | None = None


class PlannerAnswer(Struct, frozen=True):
    """What a planner has answered.

    Attributes:
        question: that was asked.
        text: the plan file, checked; empty where there is none.
        facts: of the plan's schedule.
        error: why there is no plan; empty where there is one.
        seconds: what answering took.
    """

    question: Question
    text: str = ""
    facts: ScheduleFacts = ScheduleFacts({}, 0)
    error: str = ""
    seconds: float = 0.0


def answer(planner: Planner, job: PricedJob, like: Schedule | None, question: Question) -> PlannerAnswer:
    """The plan, checked for running, or why there is none: whatever a planner raises is an answer, too."""
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
        layout = "no plan for the layout at hand: " if question.within else ""
        return PlannerAnswer(question, error=f"{layout}{refusal}")
    except Exception as failure:  # a plug-in's
        return PlannerAnswer(question, error=f"{type(failure).__name__}: {failure}")
    text = replace(plan, schedule=schedule).text()
    return PlannerAnswer(question, text, facts, seconds=time.monotonic() - began)


class PlannerProcess:
    """Answers questions in their order.

    Args:
        job: what to plan for; `[membership]` says how long a quick answer may take, `[planner] seconds` how long
            another. Where the job limits steps instead of seconds, only a quick answer can be overdue.
        planner: see `Planner`.
        answered: called, in a thread, with every answer.
        warn: called, in a thread, with what goes wrong.
        like: the schedule whose placement plans keep.
        questions: to work through whenever nothing else was asked.
    """

    def __init__(
        self,
        job: PricedJob,
        planner: Planner,
        answered: Callable[[PlannerAnswer], object],
        warn: Callable[[str], object],
        like: Schedule | None = None,
        questions: Iterable[Question] = (),
    ) -> None:
        self._job, self._planner, self._like = job, planner, like
        self._give, self._warn = answered, warn
        self._asked: queue.Queue[Question | None] = queue.Queue()
        self._later = iter(questions)
        self._failures, self._longest, self._is_closed = 0, 0.0, False
        self._draw()
        self._start()
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    def _start(self) -> None:
        name = f"{self._planner.__module__}:{self._planner.__qualname__}"
        self._child = Child("recycle.exec.planning.planner_process", name, environment={"OMP_NUM_THREADS": "1"})
        self._is_fresh = True

    def _draw(self) -> None:
        """Have something to do as long as there is anything left to ask."""
        if self._asked.empty() and (question := next(self._later, None)) is not None:
            self._asked.put(question)

    @property
    def is_busy(self) -> bool:
        """Whether it still has something to answer."""
        return self._asked.unfinished_tasks > 0

    def ask(self, question: Question) -> None:
        """Answer this as well."""
        self._asked.put(question)

    def look(self) -> None:
        """Have a process that has ended while nothing was asked replaced; to be called again and again."""
        if not self.is_busy and self._failures < MOST_FAILURES and self._child.process.poll() is not None:
            self._asked.put(None)

    def _work(self) -> None:
        while not self._is_closed:
            question = self._asked.get()
            answered = None
            if question is None:
                self._replace()
            else:
                answered = self._answered(question)
                self._draw()
            self._asked.task_done()
            if answered is not None:
                self._give(answered)

    def _answered(self, question: Question) -> PlannerAnswer | None:
        """The answer; None where this ends before it is there."""
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
        self._warn("no planner process answers; a plan that is needed now is made by the coordinator")
        return answer(self._planner, self._job, self._like, question)

    def _exchange(self, question: Question) -> bytes:
        """The process's answer; it is ended when that is overdue."""
        overdue = threading.Timer(self._patience(question), self._child.process.kill)
        overdue.daemon = True
        overdue.start()
        if self._is_fresh:
            self._child.send((self._job.to_toml(), None if self._like is None else self._like.dumps()))
        self._child.send(question)
        line = self._child.answers.readline()
        overdue.cancel()
        return line

    def _patience(self, question: Question) -> float:
        """Seconds that an answer may take: what a worker's operation may, and before the first one imports take."""
        limits, plans = self._job.membership, self._job.planner
        if not question.quick and plans.steps is not None:
            return threading.TIMEOUT_MAX
        longest = self._longest if question.quick else plans.seconds
        return max(limits.hung_after, limits.hung_factor * longest) + (limits.warm_up if self._is_fresh else 0.0)

    def _replace(self) -> None:
        """Start another process, unless too many in a row have failed."""
        self._child.close()
        self._failures += 1
        if self._failures < MOST_FAILURES and not self._is_closed:
            self._start()

    def close(self) -> None:
        """End the process."""
        self._is_closed = True
        self._asked.put(None)
        self._child.process.kill()
        self._thread.join()
        self._child.close()


def _serve(parent: str, name: str) -> None:
    """The child: answer one question after the other; a solver's chatter goes elsewhere."""
    requests, answers = serve(parent)
    os.nice(5)
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
