"""`recycle drain`: a worker, or a node, leaves a run that goes on, and nothing is done again."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def drain(
    run: Annotated[Path, typer.Argument(help="Run directory of a run that goes on.")],
    worker: Annotated[str, typer.Argument(help="Position of the worker, such as 1.1, or the number of a node.")],
    within: Annotated[
        float | None,
        typer.Option(
            "--in",
            metavar="SECONDS",
            min=0.0,
            help="Kill the worker when it has not left by then, and do the iteration again; else it has all the time.",
        ),
    ] = None,
) -> None:
    """Let a worker, or all workers of a node, leave a run without repeated work; return when they have ended.

    The plan without them is made while training goes on; they leave at the end of the iteration after that.

    Example: **recycle drain runs/tiny 1.1** (a worker)

    Example: **recycle drain runs/tiny 2 --in 60** (node 2)
    """
    from recycle.exec.launch import contact

    contact.drain(run, worker, within, lambda line: print(line, flush=True))
