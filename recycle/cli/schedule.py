"""`recycle schedule`: build a known family."""

from __future__ import annotations

from enum import StrEnum
from inspect import signature
from pathlib import Path
from typing import Annotated

import typer

from recycle.errors import ScheduleError


class Optimizer(StrEnum):
    """When stages step."""

    STAGGERED = "staggered"
    BARRIER = "barrier"


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(schedule)


def schedule(
    family: Annotated[str, typer.Argument(help="Name of the family, for example 1f1b.")],
    ranks: Annotated[int, typer.Option("-P", "--ranks", help="Workers per pipeline.")],
    micro_batches: Annotated[int, typer.Option("-m", "--micro-batches", help="Micro-batches per pipeline.")],
    pipelines: Annotated[int, typer.Option("-D", "--pipelines", help="Data-parallel pipelines.")] = 1,
    chunks: Annotated[int, typer.Option("-V", "--chunks", help="Stages per worker.")] = 1,
    group_size: Annotated[
        int | None, typer.Option("--group-size", metavar="N", help="Interleaved: micro-batches per turn of a chunk; P.")
    ] = None,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="File to write; else print it.")] = None,
    lower: Annotated[bool, typer.Option("--lower", help="Write sends, receives, reduces and steps too.")] = False,
    optimizer: Annotated[Optimizer, typer.Option(help="Each stage steps by itself, or all together.")] = (
        Optimizer.STAGGERED
    ),
) -> None:
    """Build a schedule of a known family.

    Example: **recycle schedule 1f1b -D 3 -P 4 -m 6 -o 1f1b.json**
    """
    from recycle.ir import formats
    from recycle.ir.families import FAMILIES
    from recycle.ir.formats import native
    from recycle.ir.lower import lower as lowered
    from recycle.shape import Shape

    if family not in FAMILIES:
        raise ScheduleError(f"{family!r} is not a family: known are {', '.join(FAMILIES)}")
    shape = Shape(pipelines, ranks, micro_batches, chunks)
    options = {} if group_size is None else {"group_size": group_size}
    if options:
        takers = [known for known, build in FAMILIES.items() if "group_size" in signature(build).parameters]
        if family not in takers:
            raise ScheduleError(f"--group-size: {family} takes none, only {', '.join(takers)} does")
    built = FAMILIES[family](shape, optimizer=optimizer.value, **options)
    if lower:
        built = lowered(built)
    if output is None:
        print(native.dumps(built), end="")
        return
    formats.write(built, output)
    print(f"{output}: {family}, {shape}, {len(built.columns)} instructions")
