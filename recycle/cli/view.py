"""`recycle view`: the timelines of runs, schedules and plans, in a browser or in a file."""

from __future__ import annotations

import importlib.util
import threading
import webbrowser
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from recycle.errors import RecycleError
from recycle.ir.families import one_f_one_b
from recycle.job import Job, PricedJob, price
from recycle.plans import PlanLibrary
from recycle.plans.library import MANIFEST
from recycle.shape import Worker
from recycle.solve.planner import plan
from viz.comparison import is_comparison, load_comparison
from viz.run import Run
from viz.sources import ScheduleFile, load_source, schedule_source
from viz.what_if import Planner, WhatIf

DEFAULT_PORT = 8050
MOVING_SECONDS = 4.0
"""For an answer where layers may move."""
_NEEDED: dict[str, tuple[str, ...]] = {".svg": (), ".png": ("PIL",)}
"""Modules of the `viz` extra that an export needs, by its suffix; everything else needs all of them."""


def view(
    paths: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="[FILE | RUN_DIR | JOB | LIBRARY]...",
            help="Schedule files, run directories, a job file (.toml), a plan library; examples if left out.",
        ),
    ] = None,
    port: Annotated[int, typer.Option(help="Port on loopback; 0 takes any free one.")] = DEFAULT_PORT,
    open_browser: Annotated[bool, typer.Option("--open", help="Open the page in the browser.")] = False,
    allow_host: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Answer under this name too, where a proxy brings the page elsewhere."),
    ] = None,
    export_to: Annotated[
        Path | None, typer.Option("--export", metavar="FILE", help="Write a .html, .svg or .png instead of serving.")
    ] = None,
) -> None:
    """Show runs, schedules and plans: timelines, losses, failures, what-if. Serves on loopback until Ctrl-C.

    Example: recycle view runs/latest --open

    Example: recycle view fault-free.json adaptive.json

    Example: recycle view job.toml plans

    Example: recycle view plan.json --export plan.svg
    """
    _require_viewer(_NEEDED.get(export_to.suffix.lower() if export_to is not None else "", ("dash", "plotly", "PIL")))

    job, library, others = _sorted(paths or [])
    comparisons = {path.name: load_comparison(path) for path in others if is_comparison(path)}
    sources = [load_source(path) for path in others if not is_comparison(path)]
    if export_to is not None:
        if not sources:
            raise RecycleError("view: --export: name a schedule file or a run directory to draw")
        from viz.export import export

        export(export_to, sources)
        for source in sources:
            if isinstance(source, ScheduleFile) and source.problem:
                typer.echo(f"{source.name}: {source.problem}", err=True)
        typer.echo(f"wrote {export_to}")
        return
    from viz.app import build_app, serve

    what_if = _what_if(job, library, sources)
    if not paths:
        sources, what_if = _examples()
        typer.echo("No file was given: these are examples. To see your own: recycle view FILE | RUN_DIR | JOB.toml")

    if what_if is not None:
        _warm_up(what_if)

    def ready(address: str) -> None:
        typer.echo(f"{address}  (Ctrl-C ends it)")
        if open_browser:
            webbrowser.open(address)

    application = build_app(
        sources, what_if, comparisons=comparisons, is_example=not paths, allowed_hosts=allow_host or ()
    )
    serve(application, port, ready)


def _sorted(paths: list[Path]) -> tuple[PricedJob | None, PlanLibrary | None, list[Path]]:
    """(job, library, whatever else was named). Raises RecycleError for a second job or library."""
    jobs = [path for path in paths if path.suffix.lower() == ".toml" and not path.is_dir()]
    libraries = [path for path in paths if (path / MANIFEST).is_file()]
    for found, what in ((jobs, "job file"), (libraries, "plan library")):
        if len(found) > 1:
            raise RecycleError(f"view: {found[1]}: is a second {what}, after {found[0]}: give one")
    job = price(Job.load(jobs[0])) if jobs else None
    library = PlanLibrary(libraries[0], job) if libraries else None
    return job, library, [path for path in paths if path not in (*jobs, *libraries)]


def _what_if(job: PricedJob | None, library: PlanLibrary | None, sources: list[Run | ScheduleFile]) -> WhatIf | None:
    """What can answer for dead workers: a job, a library, or the job of the only run; None without any."""
    runs = [source for source in sources if isinstance(source, Run)]
    if job is None and library is None and len(runs) == 1:
        with suppress(RecycleError):  # its job cannot be read or priced any more: the page of the run says why
            job = price(Job.of_run(runs[0].path))
    if job is None and library is None:
        return None
    if job is None:
        return WhatIf(job, library, None)
    moves = job.planner.layout == "elastic"
    return WhatIf(job, library, _planner(job), partial(plan, job, quick=True) if moves else None)


def _planner(job: PricedJob) -> Planner:
    """The list scheduler for `job`, which answers within a second; where layers may move, a search of a few."""
    return (
        partial(plan, job, seconds=MOVING_SECONDS)
        if job.planner.layout == "elastic"
        else partial(plan, job, quick=True)
    )


def _warm_up(what_if: WhatIf) -> None:
    """Plan with one worker dead while nobody asks yet: what a first plan loads and compiles is then there."""

    def ask() -> None:
        for failed in ([], [Worker(0, 0)]):
            with suppress(RecycleError):
                what_if.answer(failed)

    threading.Thread(target=ask, name="warm-up", daemon=True).start()


def _examples() -> tuple[list[Run | ScheduleFile], WhatIf]:
    """The published worked example of adaptive pipelining: fault-free 1F1B, and the plan without worker 1.2."""
    job = price(Job.from_toml("[shape]\npipelines = 3\nranks = 4\nmicro_batches = 6\n[memory]\nlimit = 6\n", "example"))
    what_if = WhatIf(job, None, _planner(job))
    adaptive = what_if.answer([Worker(1, 2)]).plan.schedule
    return [
        schedule_source(Path("1F1B, all workers"), one_f_one_b(job.shape)),
        schedule_source(Path("without worker 1.2"), adaptive),
    ], what_if


def _require_viewer(packages: tuple[str, ...]) -> None:
    for package in packages:
        if importlib.util.find_spec(package) is None:
            raise RecycleError(
                f"view: the module {package} is missing; install the viewer: pip install 'recycle-pipeline[viz]'"
            )
