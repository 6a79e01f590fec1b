"""`recycle schedule`: build a known family."""

from __future__ import annotations

import sys
from dataclasses import replace
from inspect import signature
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from recycle.cli import pricing
from recycle.cli.terminal import JsonOption, print_result, width
from recycle.errors import ScheduleError
from recycle.ir import formats
from recycle.ir.families import FAMILIES, TWO_CHUNKS
from recycle.ir.lower import forward_only as forwards_of
from recycle.ir.lower import lower as lowered
from recycle.ir.replays import MOST_ROUNDS, with_replays
from recycle.ir.schedule import Schedule
from recycle.ir.simulate import DRAWN, simulate
from recycle.job.shape import MOST_BUCKETS, Shape


def schedule(
    family: Annotated[str, typer.Argument(help="Name of the family, for example 1f1b.")],
    ranks: Annotated[int, typer.Option("-P", "--ranks", help="Workers per pipeline.")],
    micro_batches: Annotated[int, typer.Option("-m", "--micro-batches", help="Micro-batches per pipeline.")],
    pipelines: Annotated[int, typer.Option("-D", "--pipelines", help="Data-parallel pipelines.")] = 1,
    chunks: Annotated[
        int | None, typer.Option("-V", "--chunks", help="Stages per worker; 2 for families on the V, else 1.")
    ] = None,
    group_size: Annotated[
        int | None, typer.Option("--group-size", metavar="N", help="Interleaved: micro-batches per turn of a chunk; P.")
    ] = None,
    times: Annotated[
        str | None, typer.Option("--times", metavar="F,I,W", help="zb-v, v-half, v-min: what to make the order for.")
    ] = None,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="File to write; else print it.")] = None,
    lower: Annotated[bool, typer.Option("--lower", help="Write sends, receives, reduces and steps too.")] = False,
    optimizer: Annotated[
        Literal["staggered", "barrier"], typer.Option(help="Each stage steps by itself, or all together.")
    ] = "staggered",
    buckets: Annotated[
        int, typer.Option(min=1, max=MOST_BUCKETS, metavar="N", help="Sum each stage's gradients in N buckets.")
    ] = 1,
    gather: Annotated[
        bool, typer.Option("--gather", help="Gather parameters behind the steps of a sharded optimizer.")
    ] = False,
    replays: Annotated[
        str | None,
        typer.Option(
            "--replays",
            metavar="N|gaps",
            help="Replay all work on peers once in N iterations, or where gaps hold it: the first iteration, lowered.",
        ),
    ] = None,
    forward_only: Annotated[
        bool, typer.Option("--forward-only", help="Its forwards alone, as an evaluation runs them.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Build a schedule of a known family: into a file, as a picture on a terminal, or as the file's text elsewhere.

    Example: **recycle schedule 1f1b -D 3 -P 4 -m 6 -o 1f1b.json**
    """

    if family not in FAMILIES:
        raise ScheduleError(f"{family!r} is not a family: known are {', '.join(FAMILIES)}")
    if chunks is None:
        chunks = 2 if family in TWO_CHUNKS else 1
    shape = Shape(pipelines, ranks, micro_batches, chunks)
    given = {"group_size": group_size, "times": None if times is None else pricing.times_of(times)}
    options: dict[str, Any] = {option: value for option, value in given.items() if value is not None}
    for option in options:
        takers = [known for known, build in FAMILIES.items() if option in signature(build).parameters]
        if family not in takers:
            raise ScheduleError(f"--{option.replace('_', '-')}: {family} takes none, it is for {', '.join(takers)}")
    built = replace(FAMILIES[family](shape, optimizer=optimizer, **options), buckets=buckets, gathers=gather)
    if forward_only:
        if buckets > 1:
            raise ScheduleError(f"--buckets: {buckets}, but with --forward-only no gradient is summed; leave out one")
        if gather:
            raise ScheduleError("--gather: with --forward-only no parameter is stepped; leave out one")
        if replays is not None:
            raise ScheduleError("--replays: with --forward-only there is no backward to replay; leave out one")
        built = forwards_of(built)
    if replays is not None:
        built = _with_replays(built, replays)
    if lower:
        built = lowered(built)
    if output is not None:
        formats.write(built, output)
        count = len(built.columns)
        figures = {"file": str(output), "family": family, "shape": shape.to_json(), "instructions": count}
        print_result(as_json, figures, f"{output}: {family}, {shape}, {count} instructions")
    elif as_json or not sys.stdout.isatty():
        print(built.dumps(), end="")
    else:
        _show(built)


def _with_replays(schedule: Schedule, every: str) -> Schedule:
    if schedule.shape.pipelines < 2:
        raise ScheduleError("--replays: with 1 pipeline no worker has a peer; give -D 2 or more")
    if every == "gaps":
        return with_replays(schedule, "gaps").schedule(0)
    if not every.isdecimal() or not 1 <= int(every) <= MOST_ROUNDS:
        raise ScheduleError(f"--replays: {every!r} is neither gaps nor a number of iterations up to {MOST_ROUNDS}")
    return with_replays(schedule, int(every)).schedule(0)


def _show(schedule: Schedule) -> None:
    timeline = simulate(schedule)
    if schedule.shape.worker_count <= DRAWN:
        print(timeline.text(width()))
    print(f"{schedule.metadata['family']}, {schedule.shape}, {len(schedule.columns)} instructions")
    print(f"makespan {timeline.makespan:g}   period {timeline.period:g}   bubble ratio {timeline.bubble_ratio:.4g}")
    print("times 1,1,1; -o FILE writes the schedule, --json prints the file")
