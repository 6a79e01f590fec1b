"""A planner in a process of its own, started again when it ends, and replaced when its answer is overdue.

A process may be ended by whoever is short of memory, or stand still. That costs the time in which another one starts,
and the question is asked again. What `MOST_FAILURES` processes in a row did not answer is given up. One question is
under way at a time, in a thread that may block on the process, so that nobody else ever waits for it.
"""

from __future__ import annotations

import importlib
import math
import os
import queue
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import islice
from typing import Any

import msgspec
from msgspec import Struct

from recycle.child import Child, serve
from recycle.exec.processes.waker import Waker
from recycle.ir.plugins import load_plugins
from recycle.ir.schedule import Schedule
from recycle.job import Job, PricedJob, price
from recycle.plans import Plan, Vector
from recycle.plans.replaying import with_room
from recycle.shape import Worker

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


PlannerAnswer = tuple[Question, str, str]
"""(question, text of the plan file, or why there is none)."""


def answer(planner: Planner, job: PricedJob, like: Schedule | None, question: Question) -> tuple[str, str]:
    """The text of the plan file, or why there is none: whatever a planner raises is an answer, too."""
    known: dict[str, Any] = {} if like is None else {"like": like}
    if question.failed is not None:
        known["failed"] = [Worker.parse(name) for name in question.failed]
    if question.moves:
        known["moves"] = True
    if question.within is not None:
        known["within"] = question.within
    try:
        if question.profile is not None:
            job = job.with_sections(times=msgspec.structs.replace(job.times, profile=question.profile))
        text = planner(job, question.vector, question.quick, **known)
        if job.integrity.every == "gaps":
            plan = Plan.from_text(text, f"plan for {question.vector}")
            text = replace(plan, schedule=with_room(plan.schedule, job)).text()
        return text, ""
    except Exception as failure:
        return "", f"{type(failure).__name__}: {failure}"


class PlannerProcess:
    """Answers questions in their order.

    Args:
        job: what to plan for; `[membership]` says how long a quick answer may take, `[planner] seconds` how long
            another. Where the job limits steps instead of seconds, only a quick answer can be overdue.
        planner: see `Planner`.
        answers: takes what the process answers; `waker` is woken then.
        like: the schedule whose placement plans keep.
        questions: to work through whenever nothing else was asked.
    """

    def __init__(
        self,
        job: PricedJob,
        planner: Planner,
        answers: queue.SimpleQueue[PlannerAnswer],
        waker: Waker,
        like: Schedule | None = None,
        questions: Iterable[Question] = (),
    ) -> None:
        self._job, self._answers, self._waker = job, answers, waker
        self._name = f"{planner.__module__}:{planner.__qualname__}"
        self._first = (job.to_toml(), None if like is None else like.dumps())
        self._changed = threading.Condition()
        self._pending: deque[Question] = deque()
        self._later = iter(questions)
        self._failures, self._longest = 0, 0.0
        self._draw()
        self._start()

    def _start(self) -> None:
        self._is_fresh, self._is_ending, self._since = True, False, time.monotonic()
        self._child = Child("recycle.exec.planning.planner_process", self._name, environment={"OMP_NUM_THREADS": "1"})
        self._thread = threading.Thread(target=self._talk, args=(self._child,), daemon=True)
        self._thread.start()

    def _draw(self) -> None:
        """Have something pending as long as there is anything left to ask."""
        if not self._pending:
            self._pending.extend(islice(self._later, 1))

    @property
    def is_busy(self) -> bool:
        """Whether it still has something to answer."""
        return bool(self._pending)

    def ask(self, question: Question) -> None:
        """Answer this as well."""
        with self._changed:
            if not self._pending:
                self._since = time.monotonic()
            self._pending.append(question)
            self._changed.notify()

    def look(self) -> list[Question]:
        """Start another process if this one has ended or its answer is overdue; returns what is given up."""
        if self._failures < MOST_FAILURES:
            if self._child.process.poll() is None and not self._is_overdue():
                return []
            self.close()
            self._failures += 1
            if self._failures < MOST_FAILURES:
                self._start()
                return []
        given_up = list(self._pending)
        self._pending.clear()
        self._later = iter(())
        return given_up

    def _is_overdue(self) -> bool:
        with self._changed:
            return bool(self._pending) and time.monotonic() - self._since > self._patience(self._pending[0])

    def _patience(self, question: Question) -> float:
        """Seconds that an answer may take: what a worker's operation may, and before the first one imports take."""
        limits, plans = self._job.membership, self._job.planner
        if not question.quick and plans.steps is not None:
            return math.inf
        longest = self._longest if question.quick else plans.seconds
        return max(limits.hung_after, limits.hung_factor * longest) + (limits.warm_up if self._is_fresh else 0.0)

    def _talk(self, child: Child) -> None:
        child.send(self._first)
        while (question := self._next()) is not None:
            child.send(question)
            line = child.answers.readline()
            if not line.endswith(b"\n"):
                break
            text, error, seconds = msgspec.json.decode(line, type=tuple[str, str, float])
            self._answers.put((question, text, error))
            with self._changed:
                if question.quick:
                    self._longest = max(self._longest, seconds)
                self._is_fresh, self._failures, self._since = False, 0, time.monotonic()
                self._pending.popleft()
                self._draw()
            self._waker.wake()
        self._waker.wake()

    def _next(self) -> Question | None:
        with self._changed:
            self._changed.wait_for(lambda: bool(self._pending) or self._is_ending)
            return None if self._is_ending else self._pending[0]

    def close(self) -> None:
        """End the process."""
        self._child.kill()
        with self._changed:
            self._is_ending = True
            self._changed.notify()
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
        question, began = msgspec.json.decode(line, type=Question), time.monotonic()
        text, error = answer(planner, job, like, question)
        answers.write(msgspec.json.encode((text, error, time.monotonic() - began)) + b"\n")


if __name__ == "__main__":
    _serve(*sys.argv[1:])
