"""`recycle plan`: one schedule around dead workers, or the library of all failure vectors."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from recycle.errors import JobError, PlanError

if TYPE_CHECKING:
    from recycle.job import Job
    from recycle.plans import Plan, Vector
    from recycle.shape import Worker
    from recycle.solve.improve import Progress


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(plan)


def plan(
    job: Annotated[Path, typer.Argument(help="Job file: [shape], [times] and [memory] are enough.")],
    failed: Annotated[str | None, typer.Option(metavar="K.R,…", help="Dead workers, for example 1.2,0.3.")] = None,
    failures: Annotated[
        int | None, typer.Option(metavar="N", help="Plan every failure vector with up to N dead workers.")
    ] = None,
    library: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Keep plans in DIR, one file per failure vector.")
    ] = None,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="Write the schedule to this file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Plan the schedule of a job around its dead workers, with a proven lower bound and the gap to it.

    Without --failed it is the fault-free plan. With --failures N all failure vectors with up to N dead workers are
    planned, likeliest first; a library that was interrupted goes on where it stopped.

    Example: **recycle plan job.toml --failed 1.2 -o plan.json**

    Example: **recycle plan job.toml --failures 2 --library plans**
    """
    from recycle.job import Job

    if failed is not None and failures is not None:
        raise PlanError("plan: give --failed or --failures, not both")
    if failures is not None and failures < 0:
        raise PlanError(f"plan: --failures: must be at least 0, got {failures}")
    loaded = Job.load(job)
    if failures is None:
        _one(loaded, _workers(loaded, failed or ""), library, output, as_json)
        return
    if output is not None:
        raise PlanError("plan: --failures makes many plans: give --library DIR instead of -o")
    _all(loaded, failures, library, as_json)


def _workers(job: Job, text: str) -> list[Worker]:
    from recycle.shape import Worker

    try:
        return [job.shape.require(Worker.parse(name), "plan: --failed") for name in text.split(",") if name.strip()]
    except JobError as error:
        raise PlanError(str(error) if "--failed" in str(error) else f"plan: --failed: {error}") from None


def _one(job: Job, failed: list[Worker], library: Path | None, output: Path | None, as_json: bool) -> None:
    from recycle.plans import PlanLibrary, failure_vector
    from recycle.solve.planner import plan as plan_one
    from recycle.solve.planner import plan_vector

    if output is not None and not output.parent.is_dir():
        raise PlanError(f"{output}: cannot be written (the folder {output.parent} does not exist)")
    with _progress() as report:
        if library is None or job.profile().speed:
            made = plan_one(job, failed, progress=report)
        else:
            shelf = PlanLibrary(library, job)
            shelf.prepare()
            kept = shelf.get(failure_vector(job.shape, failed))
            if kept is None:
                kept = plan_vector(job, failure_vector(job.shape, failed), progress=report)
                shelf.add(kept)
            made = kept.for_processes(failed)
    if output is not None:
        made.save(output)
    if as_json:
        print(json.dumps(made.summary()))
        return
    _table([made], "Plan" + (f" without {', '.join(map(str, sorted(set(failed))))}" if failed else ""))
    if output is not None:
        print(f"{output}: written, hash {made.hash}")


def _all(job: Job, failures: int, library: Path | None, as_json: bool) -> None:
    from recycle.plans import PlanLibrary, cache_directory, likely_vectors
    from recycle.solve.planner import plan_library

    total = sum(1 for _ in likely_vectors(job.shape, failures))
    cache = cache_directory(os.environ)
    if library is not None:
        PlanLibrary(library, job).prepare()
    with _bar(total) as report:
        plans = plan_library(job, failures, library, report, cache=cache)
    if as_json:
        print(json.dumps({"failures": failures, "plans": [p.summary() for p in plans]}))
        return
    _table(plans, f"{len(plans)} plans in {library or cache}")


def _table(plans: list[Plan], title: str) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    table.add_column("vector")
    for column in ("period", "makespan", "bound", "gap", "seconds"):
        table.add_column(column, justify="right")
    for made in plans:
        table.add_row(
            " ".join(map(str, made.vector)),
            f"{made.period:g}",
            f"{made.makespan:g}",
            f"{made.lower_bound:g}",
            f"{made.gap:.1%}" if made.gap else "optimal",
            f"{made.seconds:.1f}",
        )
    Console().print(table)


@contextmanager
def _progress() -> Iterator[Progress | None]:
    """A line on the terminal's standard error that says what is being done; nothing where that is no terminal."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console

    with Console(stderr=True).status("planning") as status:

        def report(stage: str, period: float) -> None:
            status.update(stage if period == float("inf") else f"{stage}, period {period:g}")

        yield report


@contextmanager
def _bar(total: int) -> Iterator[Callable[[Vector, Plan | None], None]]:
    """A bar on the terminal's standard error that moves on with each planned vector."""
    if not sys.stderr.isatty():
        yield lambda vector, made: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("planning", total=total)

        def report(vector: Vector, made: Plan | None) -> None:
            bar.update(task, advance=int(made is not None), description="vector " + " ".join(map(str, vector)))

        yield report
