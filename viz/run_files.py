"""Reads run directories, also of live runs; missing or broken files become lines in the argument `problems`."""

from __future__ import annotations

import os
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from recycle.errors import RecycleError
from recycle.ir.schedule import Schedule
from recycle.ir.trace import Trace
from recycle.job import Job
from recycle.job.profile import Profile
from recycle.job.shape import Shape
from recycle.runs.logs import TRACE, load_trace, read_lines, read_logs
from viz.run import Run, read_or_report


def is_run_directory(path: Path) -> bool:
    return any(os.path.exists(path / name) for name in ("job.toml", "metrics.jsonl", "plans", "logs"))


def content_of(folder: Path) -> list[Path]:
    """Return what is in a folder; [] if it is gone."""
    try:
        return list(folder.iterdir())
    except OSError:
        return []


def last_written(path: Path) -> float:
    """Return the time of the last change of a file or folder; 0 if it is gone."""
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def runs_in(folder: Path) -> list[Path]:
    """Return the run directories of a folder, newest first, without links such as `latest`."""
    runs = [path for path in content_of(folder) if not path.is_symlink() and is_run_directory(path)]
    return sorted(runs, key=last_written, reverse=True)


def describe_folder(folder: Path) -> str:
    """Explain that a folder is not a run directory, and name the newest run in it."""
    runs = runs_in(folder)
    if not runs:
        return "is a folder but not a run directory: it has no job.toml, metrics.jsonl, plans or logs"
    return f"contains {len(runs)} run(s): pass a path, the newest is {runs[0]}"


def _shape_of_plans(folder: Path) -> Shape | None:
    for file in sorted(folder.glob("*.json")):
        with suppress(RecycleError):
            return Schedule.load(file).shape
    return None


def read_objects(path: Path, problems: list[str]) -> list[dict[str, Any]]:
    return read_or_report(lambda: [line for _, line in read_lines(path)], problems, [])


def read_metrics(path: Path, problems: list[str]) -> list[dict[str, Any]]:
    """Read the lines with a step; of several lines of one step, the last counts."""
    by_step: dict[int, dict[str, Any]] = {}
    for line in read_objects(path / "metrics.jsonl", problems):
        if isinstance(line.get("step"), int):
            by_step[line["step"]] = line
        else:
            problems.append(f"{path / 'metrics.jsonl'}: a line without a step is left out")
    return [by_step[step] for step in sorted(by_step)]


def read_executed(path: Path, shape: Shape, problems: list[str]) -> Trace | None:
    """Read the executed instructions from the merged trace or the workers' logs; None if there are none."""
    unread = len(problems)
    trace = read_or_report(lambda: load_trace(path, shape), problems, None)
    if len(problems) > unread and (path / TRACE).exists():  # the logs behind a broken trace may still be whole
        trace = read_or_report(lambda: read_logs(path, shape), problems, None)
    return trace if trace is not None and len(trace) else None


def load_run(path: str | Path) -> Run:
    """Read a run directory. Raises RecycleError if the folder does not exist or holds nothing of a run."""
    path = Path(path)
    if not is_run_directory(path):
        raise RecycleError(f"{path}: {describe_folder(path) if path.is_dir() else 'no such run directory'}")
    problems: list[str] = []
    job = read_or_report(lambda: Job.of_run(path), problems, None)
    shape, profile = job.shape if job else _shape_of_plans(path / "plans"), Profile.uniform()
    if job is not None:
        suffix = "; plans are drawn with every instruction taking 1"
        profile = read_or_report(job.profile, problems, profile, suffix)
    metrics = read_metrics(path, problems)
    events = read_objects(path / "events.jsonl", problems)
    trace = read_executed(path, shape, problems) if shape is not None else None
    return Run(path, job, shape, profile, metrics, events, trace, problems, live=not (path / TRACE).exists())


REFRESH_SECONDS = 4.0
"""Seconds between two reads of a live run."""


class LiveRun:
    """A run directory that is read again while the run is live, and after it was resumed or replaced.

    Attributes:
        run: the last read.
    """

    def __init__(self, run: Run) -> None:
        self.run = run
        self._ended = last_written(run.path / TRACE)
        self._read_again_at = time.monotonic() + REFRESH_SECONDS
        self._lock = threading.Lock()

    def refresh(self) -> None:
        """Read the run again, at most every `REFRESH_SECONDS` and for a tenth of the time, for all browsers."""
        with self._lock:
            start, ended = time.monotonic(), last_written(self.run.path / TRACE)
            if (self.run.live or ended != self._ended) and start >= self._read_again_at:
                try:
                    self.run, self._ended = load_run(self.run.path), ended
                except RecycleError as error:
                    self.run.problems[:] = [str(error)]
                end = time.monotonic()
                self._read_again_at = end + max(REFRESH_SECONDS, 10 * (end - start))
