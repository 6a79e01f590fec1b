"""`recycle simulate`: the figures of a schedule under given times."""

from __future__ import annotations

import json
import math
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from recycle.errors import JobError

if TYPE_CHECKING:
    from recycle.ir.simulate import Timeline
    from recycle.profile import Profile

DRAWN = 32
"""Workers up to which the timeline is drawn."""


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(simulate)


def simulate(
    file: Annotated[Path, typer.Argument(help="Schedule file.")],
    times: Annotated[str | None, typer.Option(metavar="F,I,W", help="Times of one chunk; 1,1,1 if left out.")] = None,
    overlap: Annotated[str | None, typer.Option(metavar="FB", help="Time of an overlapped pair; F+I+W.")] = None,
    comm: Annotated[str | None, typer.Option(metavar="SECONDS", help="Time of a transfer; 0.")] = None,
    profile: Annotated[Path | None, typer.Option(help="Profile file, instead of --times.")] = None,
    serialised: Annotated[
        bool, typer.Option("--serialised", help="One transfer per worker at a time, unbuffered, in program order.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Time a schedule: makespan, period, bubbles, peaks per worker, critical path.

    Example: **recycle simulate 1f1b.json --times 1,1,1 --comm 0.5**
    """
    from recycle.ir import formats
    from recycle.ir.check import check
    from recycle.ir.simulate import simulate as timed

    priced = _profile(times, overlap, comm, profile)
    schedule = formats.read(file)
    timeline = timed(schedule, priced, serialised=serialised)
    errors = sum(finding.severity == "error" for finding in check(schedule, profile=priced))
    if errors:
        print(f"recycle: {file} breaks {errors} rule(s), see recycle check {file}", file=sys.stderr)
    if as_json:
        print(json.dumps(figures(timeline)))
    else:
        _print(timeline)


def _profile(times: str | None, overlap: str | None, comm: str | None, file: Path | None) -> Profile:
    from recycle.profile import Profile

    if file is not None and times is not None:
        raise JobError("simulate: give either --times or --profile, not both")
    if file is not None:
        profile = Profile.load(file)
    else:
        forward, backward_input, backward_weight = _numbers("--times", "1,1,1" if times is None else times, "F,I,W", 3)
        profile = Profile(forward, backward_input, backward_weight)
    if overlap is not None:
        profile = replace(profile, overlapped_pair=_numbers("--overlap", overlap, "FB", 1)[0])
    if comm is not None:
        profile = replace(profile, latency=_numbers("--comm", comm, "SECONDS", 1)[0], bandwidth=None, links={})
    return profile


def _numbers(option: str, text: str, form: str, count: int) -> list[float]:
    try:
        values = [float(word) for word in text.split(",")]
    except ValueError:
        values = []
    if len(values) != count or not all(math.isfinite(value) and value >= 0 for value in values):
        raise JobError(f"{option} {text!r}: write {form}, {count} finite number(s) of at least 0")
    return values


def figures(timeline: Timeline) -> dict[str, Any]:
    """What `--json` prints. Per-worker lists run over all workers by pipeline, then rank; None for a failed one."""
    schedule = timeline.schedule
    path = [
        {
            "worker": str(schedule.position(row)[0]),
            "instruction": str(schedule.instruction(row)),
            "start": float(timeline.start[row]),
            "end": float(timeline.end[row]),
        }
        for row in timeline.critical_path
    ]
    return {
        "makespan": timeline.makespan,
        "period": timeline.period,
        "bubble_ratio": timeline.bubble_ratio,
        "bubble": timeline.bubble,
        "inner_bubble": timeline.inner_bubble,
        "peak_activations": timeline.peak_activations,
        "peak_bytes": timeline.peak_bytes,
        "critical_path": path,
    }


def _print(timeline: Timeline) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    from recycle.ir.text_grid import text_grid

    schedule = timeline.schedule
    if schedule.shape.worker_count <= DRAWN and timeline.makespan:
        print(text_grid(timeline, shutil.get_terminal_size((120, 24)).columns))
    table = Table(box=box.SIMPLE)
    for title in ("worker", "busy", "bubble", "inner bubble", "peak activations", "peak bytes"):
        table.add_column(title, justify="right")
    lists = (timeline.busy, timeline.bubble, timeline.inner_bubble, timeline.peak_activations, timeline.peak_bytes)
    for w, worker in enumerate(schedule.shape.workers()):
        cells = ["failed" if column[w] is None else f"{column[w]:g}" for column in lists]
        table.add_row(str(worker), *cells)
    Console().print(table)
    path = [schedule.instruction(row) for row in timeline.critical_path]
    ends = f"{path[0]} to {path[-1]}" if path else "none"
    print(f"makespan {timeline.makespan:g}   period {timeline.period:g}   bubble ratio {timeline.bubble_ratio:.4g}")
    print(f"critical path: {len(path)} instructions, {ends}")
