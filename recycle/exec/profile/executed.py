"""Executed times of a run against its plans: times per stage and kind, speeds of workers, periods.

Reads a run directory: `job.toml`, `metrics.jsonl` and the trace. F, I, W and B in the trace exclude waits for peers. A
reduce includes them, so the shortest of each step and stage counts. With buckets, the parts of a W are added, and a
reduce counts as the last bucket's times the number of buckets.

Limits: a stage with whole backwards only gets I and W in the profile's ratio. Bytes and links are the job's profile's.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import msgspec
import numpy as np

from recycle.errors import RecycleError
from recycle.ir.instruction import GatherParameters, Instruction, ReduceGradients
from recycle.ir.lower import buckets_of
from recycle.ir.schedule import Schedule
from recycle.ir.trace import Trace, WorkerTimes, stage_times, worker_times
from recycle.job import Job, price
from recycle.job.profile import Profile
from recycle.runs.logs import load_trace, plan_file, read_lines


@dataclass(frozen=True)
class ExecutedRun:
    """Times of a run.

    Attributes:
        profile: in seconds, from medians over all executed instructions.
        planned: the job's profile in seconds; None if its unit of time is unknown.
        period, planned_period: seconds between commits inside generations, medians over the same steps; None without
            such steps or a known unit.
        period_error: median over the steps of (executed - planned) / planned.
    """

    profile: Profile
    planned: Profile | None
    period: float | None
    planned_period: float | None
    period_error: float | None


def executed(directory: str | Path) -> ExecutedRun:
    """Read the times of the run in `directory`. Raises RecycleError for a directory without executed iterations."""
    directory = Path(directory)
    if not (directory / "job.toml").is_file():
        raise RecycleError(f"{directory}: is not a run directory (no job.toml); give a job file or a run directory")
    job = price(Job.of_run(directory))
    profile = job.prices
    unit = job.seconds_per_unit
    ran = load_trace(directory, job.shape)
    base = profile.scaled(unit or 0.0)
    measured = _measured(ran.without(_repartitioned(directory, ran)), job, base)
    if measured is None:
        raise RecycleError(f"{directory}: has no iteration with the job's own stages, so there is nothing to profile")
    lines = [line for _, line in read_lines(directory / "metrics.jsonl")]
    periods = _periods(lines)
    planned = [line["period"] * unit for line, _ in periods] if unit is not None else []
    errors = [line["period_error"] for line, _ in periods if line.get("period_error") is not None]
    return ExecutedRun(
        replace(
            base,
            **measured,
            measured={
                "run": directory.name,
                "steps": len(lines),
                "job_profile": profile.digest(),
                "model": msgspec.to_builtins(job.model),
            },
        ),
        None if unit is None else base,
        median(seconds for _, seconds in periods) if periods else None,
        median(planned) if planned else None,
        median(errors) if errors else None,
    )


def _repartitioned(directory: Path, ran: Trace) -> set[int]:
    generations: set[int] = set()
    for event in ran.events:
        if event.get("kind") == "generation":
            with contextlib.suppress(RecycleError):  # the plan of a run is not always kept
                if Schedule.load(plan_file(directory / "plans", event.get("plan"))).shape.cut:
                    generations.add(int(event["generation"]))
    return generations


def _periods(lines: Iterable[Mapping[str, Any]]) -> list[tuple[Mapping[str, Any], float]]:
    periods = []
    before: Mapping[str, Any] | None = None
    for line in lines:
        if before is not None and before["generation"] == line["generation"]:
            periods.append((line, line["time"] - before["time"]))
        before = line
    return periods


def _measured(ran: Trace, job: Job, profile: Profile) -> dict[str, Any] | None:
    stages = job.shape.stages
    per_worker = worker_times(ran, stages)
    medians: dict[str, list[float]] = {name: [] for name in ("forward", "backward_input", "backward_weight", "step")}
    for stage in range(stages):
        usual = stage_times(per_worker, stage, profile, stages)
        if any(name not in usual for name in medians):
            return None
        for name, values in medians.items():
            values.append(usual[name])
    buckets, latency = buckets_of(ran.columns), profile.per_stage("reduce_latency", stages)
    last = _collective(ran, stages, ReduceGradients)
    collectives = {
        "reduce": [b + (buckets - 1) * max(0.0, b - fixed) for b, fixed in zip(last, latency, strict=True)],
        "gather": _collective(ran, stages, GatherParameters),
    }
    return {**medians, **collectives, "speed": _speeds(per_worker, medians, job)}


def _collective(ran: Trace, stages: int, cls: type[Instruction]) -> list[float]:
    c, seconds = ran.columns, ran.end - ran.start
    medians = []
    for stage in range(stages):
        rows = np.flatnonzero((c.kind == cls.kind) & (c.stage == stage))
        steps, place = np.unique(ran.step[rows], return_inverse=True)
        shortest = np.full(len(steps), np.inf)
        np.minimum.at(shortest, place, seconds[rows])
        medians.append(float(np.median(shortest)) if len(shortest) else 0.0)
    return medians


def _speeds(per_worker: WorkerTimes, usual: Mapping[str, list[float]], job: Job) -> dict[str, float]:
    ratios: dict[int, list[float]] = {}
    for (name, stage, worker), seconds in per_worker.items():
        if name in ("forward", "backward_input", "backward_weight") and usual[name][stage] > 0:
            ratios.setdefault(worker, []).append(seconds / usual[name][stage])
    threshold = job.membership.drift or type(job.membership)().drift
    return {
        str(job.shape.worker_at(worker)): float(f"{median(stage_ratios):.3g}")
        for worker, stage_ratios in sorted(ratios.items())
        if abs(np.log(median(stage_ratios))) > np.log1p(threshold)
    }
