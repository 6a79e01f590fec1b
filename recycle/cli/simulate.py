"""`recycle simulate`: the figures of a schedule under given times."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Any

from rich import box

from recycle.cli import pricing
from recycle.cli.terminal import Result, print_table, width
from recycle.ir import formats
from recycle.ir.check import check
from recycle.ir.gaps import GapCause, Gaps
from recycle.ir.schedule import Schedule
from recycle.ir.simulate import DRAWN, Timeline, timeline_of
from recycle.job.shape import Worker

HINTS = 3
"""Number of the longest usable gaps to print."""


def simulate(
    file: Path,
    times: pricing.TimesOption = None,
    overlap: pricing.Overlap = None,
    comm: pricing.Comm = None,
    profile: pricing.ProfileFile = None,
    job: Path | None = None,
    link: list[str] | None = None,
    serialised: bool = False,
    shared: bool = False,
) -> Result:
    """Time a schedule: makespan, period, bubbles, peaks per worker, critical path, what each worker waits for.

    A trace of executed instructions keeps its times, in seconds, unless options replace them. Values that the options
    leave out come from the timeline or trace.

    Example: **recycle simulate 1f1b.json --times 1,1,1 --comm 0.5**

    Example: **recycle simulate traces/iteration_4**

    Args:
        file: schedule file, or folder of traces.
        job: job file: its times, and its memory limits in the gaps.
        link (WORKER,WORKER=FACTOR): multiply the time of transfers between two workers, as in 1.0,1.1=4; repeatable.
        serialised: one transfer per worker at a time, unbuffered, in program order.
        shared: the same on communicators that several lanes share, as over NCCL.
    """
    source = formats.read_input(file)
    pricing.require_one("simulate", times=times, profile=profile, job=job)
    schedule, limits, byte_limit = source.schedule, None, None
    is_priced = serialised or shared or any(option is not None for option in (times, profile, job, overlap, comm, link))
    ran = None if is_priced else source.executed()
    if ran is not None:
        timeline = ran
        if ran.clocks is not None and ran.clocks.differed:
            print(f"recycle: {file}: {ran.clocks}", file=sys.stderr)
    else:
        if job is not None:
            prices, limits, byte_limit = pricing.job_limits(schedule, file, job)
        given = pricing.resolve_profile(
            times, profile, overlap, comm, source.profile if job is None else lambda: prices
        )
        given = pricing.with_slow_links(given, schedule.shape, link or ())
        timeline = timeline_of(schedule, given, serialised=serialised, shared=shared)
    gaps = timeline.gaps(limits, byte_limit)
    errors = check(schedule, profile=timeline.profile).number("error")
    if errors:
        print(f"recycle: {file} breaks {errors} rule(s), see recycle check {file}", file=sys.stderr)
    return Result(lambda: figures(timeline, gaps) | {"executed": ran is not None}, partial(_print, timeline, gaps))


def figures(timeline: Timeline, gaps: Gaps) -> dict[str, Any]:
    """Return the output of `--json`. Per-worker lists go by pipeline, then rank, with None for a failed worker."""
    schedule = timeline.schedule
    path = [
        {
            **_name_instruction(schedule, row),
            "start": float(timeline.start[row]),
            "end": float(timeline.end[row]),
            "cause": None if cause is None else cause.name.lower(),
        }
        for row, cause in zip(timeline.critical_path, timeline.critical_causes, strict=True)
    ]
    names = ("makespan", "period", "bubble_ratio", "bubble", "inner_bubble", "peak_activations", "peak_bytes")
    return {
        **{name: getattr(timeline, name) for name in names},
        "peak_at": [
            None
            if row is None
            else {"instruction": str(schedule.instruction(row)), "start": float(timeline.start[row])}
            for row in timeline.peak_row
        ],
        "gaps": _gaps(schedule, gaps),
        "critical_path": path,
    }


def _name_instruction(schedule: Schedule, row: int) -> dict[str, Any]:
    return {"worker": str(schedule.position(row)[0]), "instruction": str(schedule.instruction(row))}


def _gaps(schedule: Schedule, gaps: Gaps) -> list[list[dict[str, Any]] | None]:
    per_worker: dict[Worker, list[dict[str, Any]]] = {worker: [] for worker in schedule.live}
    for gap in gaps:
        entry = {
            "start": gap.start,
            "end": gap.end,
            "cause": gap.cause.name.lower(),
            "before": None if gap.row < 0 else str(schedule.instruction(gap.row)),
            "waits_for": None if gap.waits_for < 0 else _name_instruction(schedule, gap.waits_for),
            "ready": None if gap.ready < 0 else str(schedule.instruction(gap.ready)),
        }
        per_worker[gap.worker].append(entry)
    return [per_worker.get(worker) for worker in schedule.shape.workers()]


def _print(timeline: Timeline, gaps: Gaps) -> None:
    schedule = timeline.schedule
    if schedule.shape.worker_count <= DRAWN and timeline.makespan:
        print(timeline.text(width()))
    _print_table(schedule, _load_columns(timeline))
    print("idle seconds of each worker, by what it waits for")
    idle = {cause.name.lower().replace("_", " "): gaps.seconds[:, cause].tolist() for cause in GapCause}
    _print_table(schedule, {cause: [f"{seconds:g}" for seconds in column] for cause, column in idle.items()})
    for gap in gaps.longest(GapCause.ORDER, HINTS):
        row, ready = schedule.instruction(gap.row), schedule.instruction(gap.ready)
        print(
            f"worker {gap.worker} waits {gap.end - gap.start:g} from {gap.start:g} for {row}: {ready} could run there"
        )
    path = [schedule.instruction(row) for row in timeline.critical_path]
    ends = f"{path[0]} to {path[-1]}" if path else "none"
    print(f"makespan {timeline.makespan:g}   period {timeline.period:g}   bubble ratio {timeline.bubble_ratio:.4g}")
    print(f"critical path: {len(path)} instructions, {ends}")


def _load_columns(timeline: Timeline) -> dict[str, list[str]]:
    cells = {}
    for name in ("busy", "bubble", "inner_bubble", "peak_activations", "peak_bytes"):
        cells[name.replace("_", " ")] = ["" if v is None else f"{v:g}" for v in getattr(timeline, name)]
    cells["peak at"] = [
        "-" if row is None else f"{timeline.schedule.instruction(row)} at {timeline.start[row]:g}"
        for row in timeline.peak_row
    ]
    return cells


def _print_table(schedule: Schedule, columns: dict[str, list[str]]) -> None:
    rows = []
    for worker, *cells in zip(schedule.shape.workers(), *columns.values(), strict=True):
        rows.append((str(worker), *(["failed"] * len(cells) if worker in schedule.failed else cells)))
    print_table(("worker", *columns), rows, box=box.SIMPLE)
