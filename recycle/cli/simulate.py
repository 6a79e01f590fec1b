"""`recycle simulate`: the figures of a schedule under given times."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from recycle.cli import pricing

if TYPE_CHECKING:
    from recycle.ir.simulate import Timeline

DRAWN = 32
"""Workers up to which the timeline is drawn."""


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(simulate)


def simulate(
    file: Annotated[Path, typer.Argument(help="Schedule file.")],
    times: pricing.Times = None,
    overlap: pricing.Overlap = None,
    comm: pricing.Comm = None,
    profile: pricing.ProfileFile = None,
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

    priced = pricing.priced("simulate", times, overlap, comm, profile)
    schedule = formats.read(file)
    timeline = timed(schedule, priced, serialised=serialised)
    errors = sum(finding.severity == "error" for finding in check(schedule, profile=priced))
    if errors:
        print(f"recycle: {file} breaks {errors} rule(s), see recycle check {file}", file=sys.stderr)
    if as_json:
        print(json.dumps(figures(timeline)))
    else:
        _print(timeline)


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
