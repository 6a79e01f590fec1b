"""Reads what is known of a live, finished or killed run from its directory, for its report and its metrics."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from recycle.errors import JobError, RecycleError
from recycle.ir.instruction import OptimizerStep
from recycle.ir.kinds import Compute, HostCopy, Part, kind_of_token
from recycle.job import Job
from recycle.runs.logs import (
    ADDRESS,
    EVENTS,
    METRICS,
    TRACE,
    LineTail,
    LoggedIteration,
    is_event,
    new_iterations,
    trace_logs,
)
from recycle.runs.report import Activity, RunReport, report_of

_TOKEN = re.compile(r"\(?\d+([A-Z_]+)")
"""Kind of an instruction's text; for an overlapped pair the kind of its forward, as both halves compute."""


@dataclass(frozen=True)
class RunRecord:
    """What is known of a run.

    Attributes:
        metrics: committed steps, ascending, one line per step.
        events: all events, in the order of their lines.
    """

    path: Path
    job: Job
    metrics: Sequence[Mapping[str, Any]]
    events: Sequence[Mapping[str, Any]]
    report: RunReport

    @property
    def name(self) -> str:
        """Name of the run directory."""
        return self.path.resolve().name

    @property
    def last(self) -> Mapping[str, Any]:
        """The line of the last committed step; empty before the first one."""
        return self.metrics[-1] if self.metrics else {}


def load_report(run_dir: str | Path) -> RunReport:
    """Return the report of a run directory.

    Raises RecycleError if the directory does not hold a run, or a file is invalid.
    """
    return RunReader(run_dir).read().report


class RunReader:
    """Reads a run directory again and again; each `read` takes only the lines that were appended since the last one.

    It starts over if the run was resumed in another shape, or returned to a checkpoint, which removes lines.
    """

    def __init__(self, run_dir: str | Path) -> None:
        self.path = Path(run_dir)
        self._forget()

    def _forget(self) -> None:
        self._job: tuple[int, Job] | None = None
        self._steps: dict[int, dict[str, Any]] = {}
        self._events: list[dict[str, Any]] = []
        self._attempts: dict[tuple[int, int], Activity] = {}
        self._is_broken = False
        self._tails: dict[Path, LineTail] = {}

    def read(self) -> RunRecord:
        """Return the run up to now. Raises RecycleError if the directory does not hold a run, or a file is invalid."""
        path = self.path
        if not (path / "job.toml").is_file() or not (path / METRICS).exists():
            raise JobError(f"{path}: is not a run directory; give the directory of --run")
        written = (path / "job.toml").stat().st_mtime_ns
        is_new = self._job is None or self._job[0] != written
        if is_new or any(tail.is_replaced for tail in self._tails.values()):
            self._forget()
            self._job = written, Job.of_run(path)
        assert self._job is not None
        job = self._job[1]
        self._events += filter(is_event, self._appended(EVENTS))
        for line in self._appended(METRICS):
            if isinstance(line.get("step"), int) and isinstance(line.get("time"), int | float):
                self._steps[line["step"]] = line
        self._read_logs(job)
        metrics, events = [self._steps[step] for step in sorted(self._steps)], list(self._events)
        attempts = {} if self._is_broken else self._attempts
        is_over = (path / TRACE).exists() or any(event["kind"] in ("finished", "stopped") for event in events[-2:])
        is_over |= job.train.trace == "off" and not (path / ADDRESS).exists()
        return RunRecord(
            path, job, metrics, events, report_of(metrics, events, attempts, job.seconds_per_unit, is_over)
        )

    def _tail(self, path: Path) -> LineTail:
        return self._tails.setdefault(path, LineTail(path))

    def _appended(self, name: str) -> list[dict[str, Any]]:
        return [entry for _, entry in self._tail(self.path / name).objects()]

    def _read_logs(self, job: Job) -> None:
        try:
            for log in trace_logs(self.path):
                for iteration in new_iterations(self._tail(log), job.shape):
                    self._add(iteration)
        except RecycleError:
            self._is_broken = True  # the report does without the logs

    def _add(self, iteration: LoggedIteration) -> None:
        if iteration.evaluation is not None or not iteration.instructions:
            return
        activity = self._attempts.setdefault((iteration.generation, iteration.step), Activity())
        activity.workers += 1
        for text, start, end in iteration.instructions:
            activity.first, activity.last = min(activity.first, start), max(activity.last, end)
            computes, is_replay = _classify_token(_token(text))
            if is_replay:
                activity.replayed += end - start
            elif computes:
                activity.busy += end - start


def _token(text: str) -> str:
    match = _TOKEN.match(text)
    return match[1] if match else ""


@lru_cache(maxsize=256)
def _classify_token(token: str) -> tuple[bool, bool]:
    try:
        kind = kind_of_token(token)
    except (KeyError, RecycleError):
        return False, False
    if issubclass(kind, HostCopy):
        return False, False
    is_replay = issubclass(kind, Compute) and not issubclass(kind, Part) and not kind.row.required
    return issubclass(kind, Compute | OptimizerStep), is_replay
