"""Plans for whoever is alive: made ahead in a child process, at once when they are needed now.

`exec` does not know how to plan. It is handed a planner, a function importable by name, and calls it in child
processes, so that heartbeats never wait for a solver: one child works through the likely vectors, the other answers
what is wanted this moment. Plans are kept by failure vector and used in the names of the processes that are alive,
so that every survivor keeps its position and what is re-routed is what the dead worker was home to. Where peers are
not alike a vector does not say enough, and plans are made for the dead processes themselves.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import queue
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from recycle.child import Child, serve
from recycle.errors import RecycleError, RunError, ScheduleError
from recycle.exec.membership.interfaces import Ready
from recycle.exec.membership.messages import Mode
from recycle.exec.processes.waker import Waker
from recycle.files import write_whole
from recycle.ir.check import check
from recycle.ir.lower import with_barrier
from recycle.ir.schedule import Schedule, loop_placement
from recycle.ir.simulate import simulate
from recycle.job import Job, PricedJob, price
from recycle.plans import Plan, Vector, failure_vector, likely_vectors, schedule_hash, with_ties
from recycle.profile import Profile
from recycle.shape import Worker

Planner = Callable[..., str]
"""(job, dead workers per stage, quick) -> text of a plan file. A module-level function, for a child imports it.

Where peers are not alike it is called with `failed`, the dead workers, too, and plans in the names of the processes.
Where the run's own schedule places stages in a way of its own it is called with `like=schedule` too, and plans on that
placement.
"""


class Question(Struct, frozen=True):
    """What a planner's child is asked.

    Attributes:
        vector: dead workers per stage.
        quick: without any search.
        failed: the dead workers, where the plan shall be for them alone.
        profile: file of the profile to plan with; the job's own when left out.
    """

    vector: Vector
    quick: bool = False
    failed: tuple[str, ...] | None = None
    profile: str | None = None


Answer = tuple[Question, str, str]
"""(question, text of the plan file, or why there is none)."""


class PlanService:
    """Plans of one run, by failure vector.

    Args:
        job: what to plan for.
        planner: see `Planner`; None when only `schedule` shall run.
        directory: plan files in use are written here as `<hash>.json`.
        waker: is woken when a plan has been made.
        warn: is told of what cannot be kept.
        schedule: a schedule of the user's own, for the set of workers that it leaves alive.
    """

    def __init__(
        self,
        job: PricedJob,
        planner: Planner | None,
        directory: Path,
        waker: Waker,
        schedule: Schedule | None = None,
        warn: Callable[[str], object] = lambda message: None,
    ) -> None:
        self._job, self._directory, self._warn = job, directory, warn
        self._own = schedule
        usual = schedule is None or schedule.placement == loop_placement(job.shape)
        self._like = None if usual else schedule
        self._planner, self._waker = planner, waker
        self._by_vector = job.prices.are_peers_alike
        self._plans: dict[_Key, Plan] = {}
        self._used: dict[frozenset[Worker], Ready] = {}
        self._errors: dict[_Key, str] = {}
        self._answers: queue.SimpleQueue[Answer] = queue.SimpleQueue()
        self._asked: set[_Key] = set()
        self._background = self._urgent = None
        self._other: _PlannerProcess | None = None
        self._children: list[_PlannerProcess] = []
        self._with_profile: list[Answer] = []
        if planner is not None:
            self._background, self._urgent = self._child(planner), self._child(planner)
            for question in self._likely():
                self._background.ask(question)

    def _child(self, planner: Planner) -> _PlannerProcess:
        self._children.append(_PlannerProcess(self._job, planner, self._answers, self._waker, self._like))
        return self._children[-1]

    def _likely(self) -> Iterator[Question]:
        """What to plan ahead for; where peers are not alike, no failure and each single one."""
        shape, ahead = self._job.shape, self._job.planner.ahead
        if self._by_vector:
            yield from (Question(vector) for vector in likely_vectors(shape, ahead))
            return
        for failures in range(min(ahead, 1) + 1):
            for failed in combinations(shape.workers(), failures):
                if shape.pipelines > failures:
                    yield self._question(frozenset(failed))

    def _question(self, failed: frozenset[Worker], quick: bool = False) -> Question:
        names = None if self._by_vector else tuple(map(str, sorted(failed)))
        return Question(failure_vector(self._job.shape, failed), quick, names)

    def ready(self, failed: frozenset[Worker]) -> Ready | None:
        """The plan without the failed workers; None while it is being made. Raises RunError if none can be made."""
        if failed in self._used:
            return self._used[failed]
        if self._own is not None and self.is_own(failed):
            return self._use(failed, self._own, None)
        self._collect()
        question = self._question(failed, quick=True)
        key, vector = _key(question), question.vector
        if key in self._plans:
            plan = self._plans[key].for_processes(failed) if self._by_vector else self._plans[key]
            return self._use(failed, plan.schedule, plan)
        if key in self._errors:
            raise RunError(f"no plan for {vector} dead workers per stage: {self._errors[key]}")
        if self._urgent is None:
            raise RunError(f"no plan for {vector} dead workers per stage, and no planner was given")
        if key not in self._asked:
            self._asked.add(key)
            self._urgent.ask(question)
        return None

    def is_own(self, failed: frozenset[Worker]) -> bool:
        """Whether the user's own schedule runs without these workers."""
        return self._own is not None and self._own.failed == failed

    @property
    def can_plan(self) -> bool:
        """Whether plans for other times can be made: by a planner, for stages that lie where it puts them."""
        return self._planner is not None and self._like is None

    def ask(self, question: Question) -> None:
        """Ask for a plan with another profile, which nobody waits for; `answers` has it once it is there.

        The background child makes it if it has nothing else to do, else a third one: the urgent one stays free.
        """
        assert self._planner is not None
        assert self._background is not None
        child = self._background
        if child.is_busy:
            self._other = self._other or self._child(self._planner)
            child = self._other
        child.ask(question)

    @property
    def is_busy(self) -> bool:
        """Whether something is still to be answered."""
        return any(child.is_busy for child in self._children)

    def answers(self) -> list[Answer]:
        """What has been answered of what was asked with `ask`, each answer once."""
        self._collect()
        answered, self._with_profile = self._with_profile, []
        return answered

    def _collect(self) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                question, text, error = self._answers.get_nowait()
                key = _key(question)
                if question.profile is not None:
                    self._with_profile.append((question, text, error))
                elif error:
                    self._errors.setdefault(key, error)
                else:
                    self._plans[key] = Plan.from_text(text, f"plan for {question.vector}")
                    self._errors.pop(key, None)

    def _use(self, failed: frozenset[Worker], schedule: Schedule, plan: Plan | None) -> Ready:
        self._used[failed] = self.prepare(schedule, plan, self._job.prices)
        return self._used[failed]

    def prepare(self, schedule: Schedule, plan: Plan | None, profile: Profile) -> Ready:
        """No schedule reaches a worker unchecked, wherever it comes from. Its periods are those under `profile`."""
        schedule = with_ties(schedule, self._job)
        require_valid(schedule, self._job)
        periods: dict[Mode, float] = {"barrier": simulate(with_barrier(schedule), profile).period}
        if schedule.optimizer == "staggered":
            periods["staggered"] = simulate(schedule, profile).period
        text = schedule.dumps() if plan is None else replace(plan, schedule=schedule).text()
        digest = schedule_hash(schedule)
        try:
            write_whole(self._directory / f"{digest}.json", text)
        except RecycleError as error:
            self._warn(f"a plan in use is not kept: {error}")
        return Ready(digest, text, {worker: worker for worker in schedule.live}, periods)

    def close(self) -> None:
        """End the children."""
        for child in self._children:
            child.close()


_Key = tuple[Vector, tuple[str, ...] | None]


def _key(question: Question) -> _Key:
    return question.vector, question.failed


def require_valid(schedule: Schedule, job: PricedJob) -> None:
    """Raise ScheduleError with the first error that `check` finds."""
    if schedule.shape != job.shape:
        raise ScheduleError(f"the schedule is for {schedule.shape}, the job for {job.shape}")
    profile, limits = job.prices, job.limits
    errors = [f for f in check(schedule, profile=profile, limits=limits) if f.severity == "error"]
    if not errors:
        ready = check(with_barrier(schedule), profile=profile, limits=limits, about_to_run=True)
        errors = [f for f in ready if f.severity == "error"]
    if errors:
        first = errors[0]
        place = f"worker {first.worker}, position {first.position}: " if first.worker is not None else ""
        more = f" ({len(errors) - 1} more errors; see `recycle check`)" if len(errors) > 1 else ""
        raise ScheduleError(f"the schedule does not pass check: {place}{first.rule}: {first.message}{more}")


class _PlannerProcess:
    """A planner in a process of its own.

    It is told the job and the schedule whose placement plans keep, then a question per line; it answers each with the
    text of a plan file, and why there is none.
    """

    def __init__(
        self, job: Job, planner: Planner, answers: queue.SimpleQueue[Answer], waker: Waker, like: Schedule | None
    ) -> None:
        self._answers, self._waker, self._pending = answers, waker, list[Question]()
        name = f"{planner.__module__}:{planner.__qualname__}"
        self._child = Child("recycle.exec.planning.planning", name, environment={"OMP_NUM_THREADS": "1"})
        self._child.send((job.to_toml(), None if like is None else like.dumps()))
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def is_busy(self) -> bool:
        """Whether it still has something to answer."""
        return bool(self._pending)

    def ask(self, question: Question) -> None:
        self._pending.append(question)
        self._child.send(question)

    def _read(self) -> None:
        for line in self._child.lines():
            self._answers.put((self._pending[0], *msgspec.json.decode(line, type=tuple[str, str])))
            self._pending.pop(0)
            self._waker.wake()
        for question in self._pending:
            self._answers.put((question, "", "the planner's process ended"))
        self._waker.wake()

    def close(self) -> None:
        self._child.kill()
        self._reader.join()
        self._child.close()


def _serve(parent: str, name: str) -> None:
    """The child: answer one question after the other; a solver's chatter goes elsewhere."""
    requests, answers = serve(parent)
    os.nice(5)
    module, _, function = name.partition(":")
    planner = getattr(importlib.import_module(module), function)
    first = requests.readline()
    if not first.endswith(b"\n"):
        return  # the launcher has ended
    text, placement = msgspec.json.decode(first, type=tuple[str, str | None])
    own = price(Job.from_toml(text))
    like = {} if placement is None else {"like": Schedule.loads(placement)}
    for line in requests:
        question = msgspec.json.decode(line, type=Question)
        known: Any = {} if question.failed is None else {"failed": [Worker.parse(name) for name in question.failed]}
        text, error = "", ""
        try:
            job = own
            if question.profile is not None:
                job = own.with_sections(times=msgspec.structs.replace(own.times, profile=question.profile))
            text = planner(job, question.vector, question.quick, **known, **like)
        except Exception as failure:  # whatever a planner raises is the answer, and the child lives on
            error = f"{type(failure).__name__}: {failure}"
        answers.write(msgspec.json.encode((text, error)) + b"\n")


if __name__ == "__main__":
    _serve(*sys.argv[1:])
