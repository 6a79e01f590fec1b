"""Finds the checkpoint and records from which a job can resume a run.

Metrics count up to the first missing step: one line per step from step 0, or from the step after an imported checkpoint
(event `imported`). The run resumes from the newest complete checkpoint within them, so each step has exactly one line.
The checkpoint of the next step also counts if its evaluation was pending. Without one, the newest of all is used.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import msgspec

from recycle.errors import JobError, RecycleError
from recycle.exec.checkpoint import checkpoint
from recycle.exec.checkpoint.checkpoint import Checkpoint
from recycle.exec.data.samples import samples_of
from recycle.files import read_whole
from recycle.ir.formats.run_trace import MOST_BYTES
from recycle.job import Job
from recycle.job.manifest import Damaged
from recycle.job.sections import OF_DOCUMENTS
from recycle.job.shape import Shape
from recycle.runs.logs import EVENTS, IMPORTED, is_event, read_lines

_STAMP = re.compile(r"\d{8}-\d{6}")


@dataclass(frozen=True)
class ResumePoint:
    """An earlier part of a run, up to the checkpoint.

    Attributes:
        checkpoint: None if the user's script loads its own.
        generation: the last one.
        seconds: duration of the earlier part.
        warnings: oddities that do not prevent resuming.
    """

    checkpoint: Checkpoint | None
    metrics: list[dict[str, Any]]
    events: list[dict[str, Any]]
    generation: int
    seconds: float
    shape: Shape
    warnings: list[str] = field(default_factory=list)


def find_resume_point(path: Path, job: Job, steps: int, text_digest: str | None) -> ResumePoint:
    """Find the state in run directory `path` from which `job` can resume.

    Raises JobError without a complete checkpoint, for a finished run, or if model, batch or order of data differ.
    """
    if not path.is_dir():
        raise JobError(f"{path}: no such run directory; check the path")
    for name in ("job.toml", "metrics.jsonl", "events.jsonl"):
        if not (path / name).is_file():
            raise JobError(f"{path}: is not a run directory, {name} is missing")
    before = Job.of_run(path)
    differences = checkpoint.differences(checkpoint.identity(job), checkpoint.identity(before))
    if differences:
        raise JobError(
            f"{path}: has another model, batch or optimizer, and cannot be resumed with this job: {differences[0]}"
        )
    events = [event for _, event in read_lines(path / EVENTS) if is_event(event)]
    begin = max((int(_number(event, "step")) + 1 for event in events if event.get("kind") == IMPORTED), default=0)
    metrics = whole_metrics(path / "metrics.jsonl", begin)
    done = begin + len(metrics)
    if done >= steps:
        has = f"is finished, it has all {steps} steps" if done == steps else f"has {done} steps, more than {steps}"
        raise JobError(f"{path}: {has}; give a larger --steps to continue")
    warnings: list[str] = []
    folder = path / "checkpoints"
    newest = _to_be_evaluated(folder, done)
    newest = newest or checkpoint.newest(folder, warnings.append, upto=done - 1)
    if newest is None and (newest := checkpoint.newest(folder, (damaged := list[str]()).append)) is not None:
        warnings = [*damaged, f"metrics.jsonl lacks steps {done} to {newest.manifest.step}"]
    if newest is None:
        why = "; ".join(damaged) or f"its [train] checkpoint_every was {before.train.checkpoint_every}"
        raise JobError(f"{path}: has no complete checkpoint to resume from; {why}")
    manifest = newest.manifest
    differences = checkpoint.differences(checkpoint.identity(job), manifest.identity)
    if differences:
        differs = f"another model, batch or optimizer, and cannot be loaded by this job: {differences[0]}"
        raise JobError(f"{newest.folder}: has {differs}")
    if job.data.kind == before.data.kind == "gpt-dataset" and manifest.course.get("[data] text") != text_digest:
        _require_order(path, job, before)
    for difference in checkpoint.differences(checkpoint.course(job, text_digest), manifest.course):
        warnings.append(f"settings differ from the original run: {difference}")
    point = _part(before, metrics, events)
    return replace(point, checkpoint=newest, metrics=metrics[: max(0, manifest.step + 1 - begin)], warnings=warnings)


def find_script_part(path: Path) -> ResumePoint | None:
    """What a run directory holds of a user's script, which loads its own checkpoint; None if it holds no run."""
    metrics = path / "metrics.jsonl"
    if not metrics.is_file():
        return None
    events = [event for _, event in read_lines(path / EVENTS) if is_event(event)]
    return _part(Job.of_run(path), whole_metrics(metrics), events)


def _part(job: Job, metrics: list[dict[str, Any]], events: list[dict[str, Any]]) -> ResumePoint:
    generation = int(max((_number(event, "generation") for event in events), default=0))
    seconds = max((_number(line, "time") + _number(line, "eval_seconds") for line in [*events, *metrics]), default=0.0)
    return ResumePoint(None, metrics, events, generation, seconds, job.shape)


def find_optional_resume_point(path: Path, job: Job, steps: int, text_digest: str | None) -> ResumePoint | None:
    """As `find_resume_point`; None for a directory with neither a trained step nor a checkpoint."""
    if not holds_steps(path) and not checkpoint.folders(path / "checkpoints"):
        return None
    return find_resume_point(path, job, steps, text_digest)


def holds_steps(path: Path) -> bool:
    metrics = path / "metrics.jsonl"
    return metrics.is_file() and metrics.stat().st_size > 0


def _require_order(path: Path, job: Job, before: Job) -> None:
    if (ours := samples_of(job)) != (theirs := samples_of(before)):
        raise JobError(
            f"{path}: [data] samples: the order of the data depends on the number of samples, {theirs} in this run and"
            f" {ours} with this job ([train] steps count if samples is not given); write [data] samples = {theirs} to"
            f" keep the order, and give enough for all steps when a run starts"
        )
    for key in ("seed", "split", "weights"):
        if (value := getattr(job.data, key)) != (other := getattr(before.data, key)):
            raise JobError(
                f"{path}: [data] {key}: is {value}, but {other} in the run, which changes the order of the data"
            )
    contents = ("end_of_document", *OF_DOCUMENTS)
    if all(getattr(job.data, key) == getattr(before.data, key) for key in contents):
        raise JobError(f"{path}: [data] path: the files differ from those that this run has used so far")


def _to_be_evaluated(folder: Path, step: int) -> Checkpoint | None:
    with contextlib.suppress(Damaged):
        candidate = checkpoint.verify(checkpoint.folder_of(folder, step))
        return candidate if candidate.manifest.commit.evaluate else None
    return None


class _Line(msgspec.Struct):
    """What every line of `metrics.jsonl` has."""

    step: int
    loss: float | None
    mode: Literal["barrier", "staggered"]
    time: float = 0.0


def whole_metrics(path: Path, begin: int = 0) -> list[dict[str, Any]]:
    """The lines of steps `begin`, `begin` + 1, … up to the first that is missing, damaged or out of order."""
    lines: list[dict[str, Any]] = []
    for text in read_whole(path, RecycleError, MOST_BYTES).split(b"\n")[:-1]:
        try:
            line = msgspec.json.decode(text, type=dict[str, Any])
            step = msgspec.convert(line, _Line).step
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            break
        if step != begin + len(lines):
            break
        lines.append(line)
    return lines


def newest_run(folder: Path, name: str) -> Path:
    """The newest run directory of `recycle train` for a job of this name. Raises JobError if there is none."""
    runs = [path for path in folder.glob(f"{name}-*") if _STAMP.fullmatch(path.name.removeprefix(f"{name}-"))]
    trained = [path for path in runs if (path / "metrics.jsonl").is_file()]
    if not trained:
        raise JobError(f"{folder / name}-*: no run to resume; give its directory with --run")
    return max(trained, key=lambda path: path.name)


def _number(line: Mapping[str, Any], key: str) -> float:
    value = line.get(key, 0)
    return value if isinstance(value, int | float) else 0
