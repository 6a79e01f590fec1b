"""What a run executed, held against what its plans counted on: times per stage and kind, speeds of workers, periods.

From a run directory alone: `job.toml`, `metrics.jsonl` and the trace. F, I, W and B are in the trace without waits for
peers; a reduce is not, so of each step and stage the shortest one counts, that of the host which came last.

Where a stage is reduced in buckets, a W that ran in parts counts as their sum, and a reduce as that of the last bucket
times their number.

Limits: a stage whose backward only ran whole has I and W in the profile's ratio. Bytes and links are not in a trace,
and stay those of the job's profile.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from recycle.errors import RecycleError
from recycle.ir.instruction import GatherParameters, Instruction, ReduceGradients
from recycle.ir.lower import buckets_of
from recycle.ir.schedule import Schedule
from recycle.ir.trace import Trace, WorkerTimes, stage_times, worker_times
from recycle.job import Job, price
from recycle.job.profile import Link, Profile
from recycle.runs.logs import load_trace, plan_file, read_lines


@dataclass(frozen=True)
class ExecutedRun:
    """What a run took.

    Attributes:
        profile: in seconds, from medians over all that was executed.
        planned: the job's profile in seconds; None where its unit of time is not known.
        period, planned_period: seconds from commit to commit inside generations, medians over the same steps; None
            where there are none or the unit is not known.
        period_error: median over the steps of (executed - planned) / planned.
    """

    profile: Profile
    planned: Profile | None
    period: float | None
    planned_period: float | None
    period_error: float | None


def executed(directory: str | Path) -> ExecutedRun:
    """What the run in `directory` took.

    Raises:
        RecycleError: it is no run directory, or no iteration was executed in it.
    """
    directory = Path(directory)
    if not (directory / "job.toml").is_file():
        raise RecycleError(f"{directory}: is no run directory (it has no job.toml): give a job file or a run directory")
    job = price(Job.of_run(directory))
    profile = job.prices
    unit = job.seconds_per_unit
    ran = load_trace(directory, job.shape)
    base = _in_seconds(profile, unit or 0.0)
    measured = _measured(ran.without(_cut_anew(directory, ran)), job, base)
    if measured is None:
        raise RecycleError(
            f"{directory}: no iteration was executed in it, of the job's own stages, so there is nothing to profile"
        )
    lines = [line for _, line in read_lines(directory / "metrics.jsonl")]
    periods = _periods(lines)
    planned = [line["period"] * unit for line, _ in periods] if unit is not None else []
    errors = [line["period_error"] for line, _ in periods if line.get("period_error") is not None]
    return ExecutedRun(
        replace(
            base, **measured, measured={"run": directory.name, "steps": len(lines), "job_profile": profile.digest()}
        ),
        None if unit is None else base,
        median(seconds for _, seconds in periods) if periods else None,
        median(planned) if planned else None,
        median(errors) if errors else None,
    )


def _cut_anew(directory: Path, ran: Trace) -> set[int]:
    """The generations in which the model was cut into other stages than the job's."""
    found: set[int] = set()
    for event in ran.events:
        if event.get("kind") == "generation":
            with contextlib.suppress(RecycleError):  # the plan of a run is not always kept
                if Schedule.load(plan_file(directory / "plans", event.get("plan"))).shape.cut:
                    found.add(int(event["generation"]))
    return found


def _periods(lines: Iterable[Mapping[str, Any]]) -> list[tuple[Mapping[str, Any], float]]:
    """Each committed step that follows another of its generation, with the seconds between the two commits."""
    found = []
    before: Mapping[str, Any] | None = None
    for line in lines:
        if before is not None and before["generation"] == line["generation"]:
            found.append((line, line["time"] - before["time"]))
        before = line
    return found


def _measured(ran: Trace, job: Job, profile: Profile) -> dict[str, Any] | None:
    """The fields of a profile that the trace tells; None when some stage did not run."""
    stages = job.shape.stages
    per_worker = worker_times(ran, stages)
    found: dict[str, list[float]] = {name: [] for name in ("forward", "backward_input", "backward_weight", "step")}
    for stage in range(stages):
        usual = stage_times(per_worker, stage, profile, stages)
        if any(name not in usual for name in found):
            return None
        for name, values in found.items():
            values.append(usual[name])
    buckets, latency = buckets_of(ran.columns), profile.per_stage("reduce_latency", stages)
    last = _joint(ran, stages, ReduceGradients)
    together = {
        "reduce": [b + (buckets - 1) * max(0.0, b - fixed) for b, fixed in zip(last, latency, strict=True)],
        "gather": _joint(ran, stages, GatherParameters),
    }
    return {**found, **together, "speed": _speeds(per_worker, found, job)}


def _joint(ran: Trace, stages: int, cls: type[Instruction]) -> list[float]:
    """Seconds of what the hosts of each stage do together: of whoever comes last to it. 0 where it did not run."""
    c, seconds = ran.columns, ran.end - ran.start
    found = []
    for stage in range(stages):
        rows = np.flatnonzero((c.kind == cls.kind) & (c.stage == stage))
        steps, place = np.unique(ran.step[rows], return_inverse=True)
        shortest = np.full(len(steps), np.inf)
        np.minimum.at(shortest, place, seconds[rows])
        found.append(float(np.median(shortest)) if len(shortest) else 0.0)
    return found


def _speeds(per_worker: WorkerTimes, usual: Mapping[str, list[float]], job: Job) -> dict[str, float]:
    """Factors of the workers that departed from their peers by more than the job's threshold."""
    ratios: dict[int, list[float]] = {}
    for (name, stage, worker), seconds in per_worker.items():
        if name in ("forward", "backward_input", "backward_weight") and usual[name][stage] > 0:
            ratios.setdefault(worker, []).append(seconds / usual[name][stage])
    threshold = job.membership.drift or type(job.membership)().drift
    return {
        str(job.shape.worker_at(worker)): float(f"{median(found):.3g}")
        for worker, found in sorted(ratios.items())
        if abs(np.log(median(found))) > np.log1p(threshold)
    }


def _in_seconds(profile: Profile, unit: float) -> Profile:
    """A profile whose times are in units of `unit` seconds, in seconds."""

    def scaled(value: Any) -> Any:
        return [unit * entry for entry in value] if isinstance(value, list) else unit * value

    times = ("forward", "backward_input", "backward_weight", "reduce", "reduce_latency", "step", "gather")
    changed: dict[str, Any] = {name: scaled(getattr(profile, name)) for name in times}
    bandwidth = profile.bandwidth / unit if profile.bandwidth and unit else None
    links = {
        pair: Link(link.latency * unit, link.bandwidth / unit if link.bandwidth and unit else None)
        for pair, link in profile.links.items()
    }
    pair_time = None if profile.overlapped_pair is None else scaled(profile.overlapped_pair)
    return replace(
        profile, **changed, latency=profile.latency * unit, bandwidth=bandwidth, links=links, overlapped_pair=pair_time
    )
