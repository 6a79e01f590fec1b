"""`recycle convert`: a schedule from one file format to another."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(convert)


def convert(
    source: Annotated[Path, typer.Argument(metavar="IN", help="File to read.")],
    target: Annotated[Path, typer.Argument(metavar="OUT", help="File to write.")],
    from_format: Annotated[str | None, typer.Option("--from", metavar="NAME", help="Format of IN.")] = None,
    to_format: Annotated[str | None, typer.Option("--to", metavar="NAME", help="Format of OUT.")] = None,
) -> None:
    """Convert a schedule file. Formats not named are known by suffix, then by content.

    Example: **recycle convert plan.json copy.json --to native**
    """
    from recycle.ir import formats

    schedule = formats.read(source, from_format)
    formats.write(schedule, target, to_format)
    print(f"{target}: {schedule.shape}, {len(schedule.columns)} instructions")
