"""The files of a run directory, and the run directories of a folder.

Whatever is missing or broken becomes a line in `problems`, which the readers are given.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

from recycle.errors import RecycleError
from recycle.ir.schedule import Schedule
from recycle.ir.trace import Trace
from recycle.job import Job
from recycle.profile import Profile
from recycle.runs import TRACE, load_trace, read_lines, read_logs
from recycle.shape import Shape

_NAMED_RUNS = 5
"""Of a folder of runs, in the line that asks for one of them."""


def is_run_directory(path: Path) -> bool:
    """Whether a folder holds anything of a run."""
    return path.is_dir() and any((path / name).exists() for name in ("job.toml", "metrics.jsonl", "plans", "logs"))


def runs_in(folder: Path) -> list[Path]:
    """The run directories of a folder, the newest first; links, such as `latest`, are left out."""
    runs = [path for path in folder.iterdir() if not path.is_symlink() and is_run_directory(path)]
    return sorted(runs, key=lambda path: path.stat().st_mtime, reverse=True)


def what_it_is(folder: Path) -> str:
    """Says of a folder that it is not a run directory, and which it holds, the newest first."""
    runs = runs_in(folder)
    if not runs:
        return "is a folder but not a run directory: it has no job.toml, metrics.jsonl, plans or logs"
    names = ", ".join(str(path) for path in runs[:_NAMED_RUNS])
    more = f" and {len(runs) - _NAMED_RUNS} more" if len(runs) > _NAMED_RUNS else ""
    what = "a run; name it" if len(runs) == 1 else "several runs; name those to see"
    return f"holds {what}: {names}{more}"


def read_job(path: Path, problems: list[str]) -> tuple[Job | None, Shape | None, Profile]:
    """The job with its shape and profile; the shape of any plan when the job file does not say."""
    try:
        job = Job.of_run(path)
    except RecycleError as error:
        problems.append(str(error))
        return None, _shape_of_plans(path / "plans"), Profile.uniform()
    try:
        return job, job.shape, job.profile()
    except RecycleError as error:
        problems.append(f"{error}; plans are drawn with every instruction taking 1")
        return job, job.shape, Profile.uniform()


def _shape_of_plans(folder: Path) -> Shape | None:
    for file in sorted(folder.glob("*.json")):
        with suppress(RecycleError):
            return Schedule.load(file).shape
    return None


def read_or_complain(path: Path, problems: list[str]) -> list[dict[str, Any]]:
    """The lines of a file; none, and a problem, where it cannot be read."""
    try:
        return [line for _, line in read_lines(path)]
    except RecycleError as error:
        problems.append(str(error))
        return []


def read_metrics(path: Path, problems: list[str]) -> list[dict[str, Any]]:
    """The lines that say their step; a step that was written twice counts as last written."""
    by_step: dict[int, dict[str, Any]] = {}
    for line in read_or_complain(path / "metrics.jsonl", problems):
        if isinstance(line.get("step"), int):
            by_step[line["step"]] = line
        else:
            problems.append(f"{path / 'metrics.jsonl'}: a line without a step is left out")
    return [by_step[step] for step in sorted(by_step)]


def read_executed(path: Path, shape: Shape, problems: list[str]) -> Trace | None:
    """What ran, from the merged trace or else from the workers' logs; None where nothing did."""
    trace = None
    try:
        trace = load_trace(path, shape)
    except RecycleError as error:
        problems.append(str(error))
        if (path / TRACE).exists():  # the logs it was merged from may still be whole
            try:
                trace = read_logs(path, shape)
            except RecycleError as another:
                problems.append(str(another))
    return trace if trace is not None and len(trace) else None
