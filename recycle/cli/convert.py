"""`recycle convert`: a schedule from one file format to another."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from recycle.cli import pricing
from recycle.cli.terminal import JsonOption, print_result
from recycle.errors import JobError
from recycle.ir import formats


def convert(
    source: Annotated[Path, typer.Argument(metavar="IN", help="File to read, or directory of traces.")],
    target: Annotated[Path, typer.Argument(metavar="OUT", help="File to write.")],
    from_format: Annotated[str | None, typer.Option("--from", metavar="NAME", help="Format of IN.")] = None,
    to_format: Annotated[str | None, typer.Option("--to", metavar="NAME", help="Format of OUT.")] = None,
    times: pricing.TimesOption = None,
    overlap: pricing.Overlap = None,
    comm: pricing.Comm = None,
    profile: pricing.ProfileFile = None,
    as_json: JsonOption = False,
) -> None:
    """Convert a schedule file. Formats not named are known by suffix, then by content.

    Times are for a timeline (chrome-trace) alone; the other formats hold an order. Those that are not given are as in
    IN where that is a timeline or trace: of what ran, the medians of each stage.

    Example: **recycle convert plan.json plan.trace.json --times 1,2,1**
    """

    named = {"--times": times, "--overlap": overlap, "--comm": comm, "--profile": profile}
    given = [option for option, value in named.items() if value is not None]
    written = formats.written_as(target, to_format)
    if given and not formats.FORMATS[written].timed:
        timed = ", ".join(name for name, entry in formats.FORMATS.items() if entry.timed)
        raise JobError(f"convert: {given[0]} is for timelines ({timed}), and {target} is written as {written}")
    read = formats.read_input(source, from_format)
    if formats.FORMATS[written].timed:
        pricing.require_one("convert", times=times, profile=profile)
        schedule = read.schedule
        formats.write(schedule, target, written, pricing.priced(times, profile, overlap, comm, read.profile))
    else:
        schedule = read.order()
        formats.write(schedule, target, written)
    count = len(schedule.columns)
    figures = {"file": str(target), "format": written, "shape": schedule.shape.to_json(), "instructions": count}
    print_result(as_json, figures, f"{target}: {schedule.shape}, {count} instructions")
