"""Plans for whoever is alive: made ahead in a child process, at once when they are needed now.

`exec` does not know how to plan. It is handed a planner, a function importable by name, and calls it in child
processes, so that heartbeats never wait for a solver: one child works through the likely vectors, the other answers
what is wanted this moment. Plans are kept by failure vector and used in the names of the processes that are alive,
so that every survivor keeps its position and what is re-routed is what the dead worker was home to.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

from recycle.errors import RecycleError, RunError, ScheduleError
from recycle.exec.coordinator import Ready
from recycle.exec.membership import Mode
from recycle.exec.waker import Waker
from recycle.files import write_whole
from recycle.ir.check import check
from recycle.ir.formats import native
from recycle.ir.lower import with_barrier
from recycle.ir.schedule import Schedule
from recycle.ir.simulate import simulate
from recycle.job import Job
from recycle.plans import Plan, Vector, failure_vector, likely_vectors, schedule_hash
from recycle.shape import Worker

Planner = Callable[[Job, Vector, bool], str]
"""(job, dead workers per stage, quick) -> text of a plan file. A module-level function, for a child imports it."""


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
        job: Job,
        planner: Planner | None,
        directory: Path,
        waker: Waker,
        schedule: Schedule | None = None,
        warn: Callable[[str], object] = lambda message: None,
    ) -> None:
        self._job, self._directory, self._warn = job, directory, warn
        self._own = None if schedule is None else (frozenset(schedule.failed), schedule)
        self._plans: dict[Vector, Plan] = {}
        self._used: dict[frozenset[Worker], Ready] = {}
        self._errors: dict[Vector, str] = {}
        self._answers: queue.SimpleQueue[tuple[Vector, str, str]] = queue.SimpleQueue()
        self._asked: set[Vector] = set()
        self._background = self._urgent = None
        if planner is not None:
            self._background, self._urgent = (_Child(job, planner, self._answers, waker) for _ in range(2))
            for vector in likely_vectors(job.shape, job.planner.ahead):
                self._background.ask(vector, quick=False)

    def ready(self, failed: frozenset[Worker]) -> Ready | None:
        """The plan without the failed workers; None while it is being made. Raises RunError if none can be made."""
        if failed in self._used:
            return self._used[failed]
        if self._own is not None and self._own[0] == failed:
            return self._use(failed, self._own[1], None)
        self._collect()
        vector = failure_vector(self._job.shape, failed)
        if vector in self._plans:
            plan = self._plans[vector].for_processes(failed)
            return self._use(failed, plan.schedule, plan)
        if vector in self._errors:
            raise RunError(f"no plan for {vector} dead workers per stage: {self._errors[vector]}")
        if self._urgent is None:
            raise RunError(f"no plan for {vector} dead workers per stage, and no planner was given")
        if vector not in self._asked:
            self._asked.add(vector)
            self._urgent.ask(vector, quick=True)
        return None

    def _collect(self) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                vector, text, error = self._answers.get_nowait()
                if error:
                    self._errors.setdefault(vector, error)
                else:
                    self._plans[vector] = Plan.from_text(text, f"plan for {vector}")
                    self._errors.pop(vector, None)

    def _use(self, failed: frozenset[Worker], schedule: Schedule, plan: Plan | None) -> Ready:
        """No schedule reaches a worker unchecked, wherever it comes from."""
        require_valid(schedule, self._job)
        profile = self._job.profile()
        periods: dict[Mode, float] = {"barrier": simulate(with_barrier(schedule), profile).period}
        if schedule.optimizer == "staggered":
            periods["staggered"] = simulate(schedule, profile).period
        text = native.dumps(schedule) if plan is None else plan.text()
        digest = schedule_hash(schedule)
        try:
            write_whole(self._directory / f"{digest}.json", text)
        except RecycleError as error:
            self._warn(f"a plan in use is not kept: {error}")
        ready = Ready(digest, text, {worker: worker for worker in schedule.live}, periods)
        self._used[failed] = ready
        return ready

    def close(self) -> None:
        """End the children."""
        for child in (self._background, self._urgent):
            if child is not None:
                child.close()


def require_valid(schedule: Schedule, job: Job) -> None:
    """Raise ScheduleError with the first error that `check` finds."""
    if schedule.shape != job.shape:
        raise ScheduleError(f"the schedule is for {schedule.shape}, the job for {job.shape}")
    profile, limits = job.profile(), job.activation_limits()
    errors = [f for f in check(schedule, profile=profile, limits=limits) if f.severity == "error"]
    if not errors:
        ready = check(with_barrier(schedule), profile=profile, limits=limits, about_to_run=True)
        errors = [f for f in ready if f.severity == "error"]
    if errors:
        first = errors[0]
        place = f"worker {first.worker}, position {first.position}: " if first.worker is not None else ""
        more = f" ({len(errors) - 1} more errors; see `recycle check`)" if len(errors) > 1 else ""
        raise ScheduleError(f"the schedule does not pass check: {place}{first.rule}: {first.message}{more}")


class _Child:
    """A planner in a process of its own: one request per line in, one answer per line out."""

    def __init__(
        self, job: Job, planner: Planner, answers: queue.SimpleQueue[tuple[Vector, str, str]], waker: Waker
    ) -> None:
        name = f"{planner.__module__}:{planner.__qualname__}"
        self._answers, self._waker, self._pending = answers, waker, list[Vector]()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "recycle.exec.planning", name, str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            start_new_session=True,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._requests, self._lines = self._process.stdin, self._process.stdout
        self._requests.write(json.dumps({"job": job.to_toml()}) + "\n")
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def ask(self, vector: Vector, quick: bool) -> None:
        self._pending.append(vector)
        with contextlib.suppress(BrokenPipeError):
            self._requests.write(json.dumps({"vector": vector, "quick": quick}) + "\n")
            self._requests.flush()

    def _read(self) -> None:
        for line in self._lines:
            answer = json.loads(line)
            vector = tuple(answer["vector"])
            self._pending.remove(vector)
            self._answers.put((vector, answer["text"], answer["error"]))
            self._waker.wake()
        for vector in self._pending:
            self._answers.put((vector, "", "the planner's process ended"))
        self._waker.wake()

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        self._reader.join()
        for pipe in (self._requests, self._lines):
            with contextlib.suppress(BrokenPipeError):
                pipe.close()


def _serve(name: str, parent: str) -> None:
    """The child: read requests from standard input, answer on standard output; a solver's chatter goes elsewhere."""
    from recycle.exec.processes import die_with_parent

    die_with_parent(int(parent))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.nice(5)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    module, _, function = name.partition(":")
    planner = getattr(importlib.import_module(module), function)
    job = Job.from_toml(json.loads(sys.stdin.readline())["job"])
    for line in sys.stdin:
        request = json.loads(line)
        text, error = "", ""
        try:
            text = planner(job, tuple(request["vector"]), request["quick"])
        except Exception as failure:  # whatever a planner raises is the answer, and the child lives on
            error = f"{type(failure).__name__}: {failure}"
        answers.write(json.dumps({"vector": request["vector"], "text": text, "error": error}) + "\n")
        answers.flush()


if __name__ == "__main__":
    _serve(*sys.argv[1:])
