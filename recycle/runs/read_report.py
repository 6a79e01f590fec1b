"""Reads the input of a run's report (report.py) from the run directory, of a live, finished or killed run."""

from __future__ import annotations

import re
from functools import lru_cache
from pathlib import Path
from typing import Any

from recycle.errors import JobError, RecycleError
from recycle.ir.instruction import OptimizerStep
from recycle.ir.kinds import Compute, Part, kind_of_token
from recycle.job import Job
from recycle.job.shape import Shape
from recycle.runs.logs import EVENTS, TRACE, read_iterations, read_lines
from recycle.runs.report import Activity, RunReport, report_of

_TOKEN = re.compile(r"\(?\d+([A-Z_]+)")
"""Kind of an instruction's text; for an overlapped pair the kind of its forward, as both halves compute."""


def load_report(run_dir: str | Path) -> RunReport:
    """Return the report of a run directory.

    Raises RecycleError if the directory does not hold a run, or a file is invalid.
    """
    path = Path(run_dir)
    if not (path / "job.toml").is_file() or not (path / "metrics.jsonl").exists():
        raise JobError(f"{path}: is not a run directory; give the directory of --run")
    job = Job.of_run(path)
    events = [event for _, event in read_lines(path / EVENTS) if "kind" in event]
    metrics = steps_of(line for _, line in read_lines(path / "metrics.jsonl"))
    try:
        attempts = read_attempts(path, job.shape)
    except RecycleError:
        attempts = {}
    is_over = (path / TRACE).exists() or any(event["kind"] in ("finished", "stopped") for event in events[-2:])
    return report_of(metrics, events, attempts, job.seconds_per_unit, is_over)


def steps_of(lines: Any) -> list[dict[str, Any]]:
    """Return the lines with a step and a time, ascending; of several lines of one step, the last."""
    by_step: dict[int, dict[str, Any]] = {}
    for line in lines:
        if isinstance(line.get("step"), int) and isinstance(line.get("time"), int | float):
            by_step[line["step"]] = line
    return [by_step[step] for step in sorted(by_step)]


def read_attempts(run_dir: str | Path, shape: Shape) -> dict[tuple[int, int], Activity]:
    """Return (generation, step) -> activity of the workers without evaluations; the logs are read line by line.

    Raises RecycleError if a complete line is invalid.
    """
    attempts: dict[tuple[int, int], Activity] = {}
    for iteration in read_iterations(run_dir, shape):
        if iteration.evaluation is not None or not iteration.instructions:
            continue
        activity = attempts.setdefault((iteration.generation, iteration.step), Activity())
        activity.workers += 1
        for text, start, end in iteration.instructions:
            activity.first, activity.last = min(activity.first, start), max(activity.last, end)
            computes, is_replay = _classify_token(_token(text))
            if is_replay:
                activity.replayed += end - start
            elif computes:
                activity.busy += end - start
    return attempts


def _token(text: str) -> str:
    match = _TOKEN.match(text)
    return match[1] if match else ""


@lru_cache(maxsize=256)
def _classify_token(token: str) -> tuple[bool, bool]:
    try:
        kind = kind_of_token(token)
    except (KeyError, RecycleError):
        return False, False
    is_replay = issubclass(kind, Compute) and not issubclass(kind, Part) and not kind.row.required
    return issubclass(kind, Compute | OptimizerStep), is_replay
