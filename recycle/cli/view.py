"""`recycle view`: the timelines of runs, schedules and plans, in a browser or in a file."""

from __future__ import annotations

import importlib.util
import os
import threading
import webbrowser
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from recycle.cli import pricing
from recycle.errors import RecycleError
from recycle.ir.families import one_f_one_b
from recycle.ir.schedule import Schedule
from recycle.job import Job, PricedJob, price
from recycle.job.profile import Profile
from recycle.job.shape import Shape, Worker
from recycle.plans import PlanLibrary
from recycle.plans.library import MANIFEST
from recycle.solve.planner import plan
from viz.run import Run
from viz.run_files import is_run_directory, runs_in
from viz.sources import (
    ScheduleFile,
    Source,
    family_sources,
    is_comparison,
    load_comparison,
    load_sources,
    schedule_source,
)
from viz.what_if import WhatIf

DEFAULT_PORT = 8050
RUNS_OPENED = 4
"""Newest runs of a folder that get their own pages."""
MOVING_SECONDS = 4.0
"""Search time of an answer in which layers may move."""
_NEEDED: dict[str, tuple[str, ...]] = {".svg": (), ".png": ("PIL",)}
"""Export suffix -> required modules of the `viz` extra; other exports need all of them."""


def view(
    paths: Annotated[list[Path] | None, typer.Argument()] = None,
    port: int = DEFAULT_PORT,
    open_browser: bool = False,
    allow_host: list[str] | None = None,
    times: pricing.TimesOption = None,
    overlap: pricing.Overlap = None,
    comm: pricing.Comm = None,
    profile: pricing.ProfileFile = None,
    priced_by: Path | None = None,
    families: bool = False,
    ranks: int = 4,
    micro_batches: int = 8,
    pipelines: int = 1,
    export_to: Path | None = None,
) -> None:
    """Show runs, schedules and plans: timelines, losses, failures, what-if. Serves on loopback until Ctrl-C.

    Example: recycle view runs/latest --open

    Example: recycle view fault-free.json adaptive.json

    Example: recycle view job.toml plans

    Example: recycle view plan.json --export plan.svg

    Example: recycle view 1f1b.json zb-h1.json --times 1,1,0.8 --comm 0.1

    Example: recycle view --families -P 4 -m 8

    Args:
        paths ([FILE | RUN_DIR | JOB | LIBRARY]...): schedule files, runs or folders of them, a job file (.toml), a plan
            library; examples if left out.
        port: port on loopback; 0 takes any free port.
        open_browser (--open): open the page in the browser.
        allow_host (NAME): further host name to answer under, for access through a proxy.
        priced_by (--job JOB): job file with the times of the schedule files.
        families: show every family that fits -P and -m, side by side.
        ranks (-P): with --families: workers per pipeline.
        micro_batches (-m): with --families.
        pipelines (-D): with --families.
        export_to (--export FILE): write a .html, .svg or .png instead of serving.
    """
    _require_viewer(_NEEDED.get(export_to.suffix.lower() if export_to is not None else "", ("dash", "plotly", "PIL")))

    job, library, others = _sort_paths(paths or [])
    others = [saved if is_comparison(saved := path / "comparison.json") else path for path in others]
    folders = [path for path in others if _is_folder_of_runs(path)]
    others = [source for path in others for source in (runs_in(path)[:RUNS_OPENED] if path in folders else [path])]
    compared = [path for path in others if is_comparison(path)]
    comparisons = {path.name if len(compared) == 1 else str(path): load_comparison(path) for path in compared}
    pricing.require_one("view", times=times, profile=profile, job=priced_by)
    is_priced = any(option is not None for option in (times, overlap, comm, profile, priced_by))

    def prices(file: Path, schedule: Schedule) -> Profile:
        stated = (lambda: None) if priced_by is None else (lambda: pricing.job_limits(schedule, file, priced_by)[0])
        return pricing.resolve_profile(times, profile, overlap, comm, stated)

    sources = load_sources([path for path in others if path not in compared], prices if is_priced else None)
    if families:
        sources += family_sources(Shape(pipelines, ranks, micro_batches), prices if is_priced else None)
    if export_to is not None:
        if not sources and not comparisons and job is None and library is None:
            raise RecycleError("view: --export: name a schedule file, run directory, job or comparison to draw")
        from viz.export import export

        export(export_to, sources, _what_if(job, library, sources) if job or library else None, comparisons)
        for source in sources:
            if isinstance(source, ScheduleFile) and source.timeline is None:
                typer.echo(f"{source.name}: deadlocks, and is drawn up to there; see recycle check", err=True)
        typer.echo(f"wrote {export_to}")
        return
    from viz.app import build_app, serve

    what_if = _what_if(job, library, sources)
    is_example = not paths and not families
    if is_example:
        sources, what_if = _examples()
        typer.echo("No file was given: these are examples. To see your own: recycle view FILE | RUN_DIR | JOB.toml")

    if what_if is not None:
        _warm_up(what_if)

    def ready(address: str) -> None:
        typer.echo(f"{address}  (Ctrl-C ends it)")
        if open_browser:
            webbrowser.open(address)

    application = build_app(
        sources,
        what_if,
        comparisons=comparisons,
        is_example=is_example,
        allowed_hosts=allow_host or (),
        run_folders=folders,
    )
    serve(application, port, ready)


def _is_folder_of_runs(path: Path) -> bool:
    return path.is_dir() and not is_run_directory(path) and not (path / MANIFEST).is_file() and bool(runs_in(path))


def _sort_paths(paths: list[Path]) -> tuple[PricedJob | None, PlanLibrary | None, list[Path]]:
    jobs = [path for path in paths if path.suffix.lower() == ".toml" and not path.is_dir()]
    libraries = [path for path in paths if (path / MANIFEST).is_file()]
    for files, what in ((jobs, "job file"), (libraries, "plan library")):
        if len(files) > 1:
            raise RecycleError(f"view: {files[1]}: is a second {what}, after {files[0]}: give one")
    job = price(Job.load(jobs[0])) if jobs else None
    library = PlanLibrary(libraries[0], job) if libraries else None
    return job, library, [path for path in paths if path not in (*jobs, *libraries)]


def _what_if(job: PricedJob | None, library: PlanLibrary | None, sources: list[Source]) -> WhatIf | None:
    runs = [source for source in sources if isinstance(source, Run)]
    if job is None and library is None and len(runs) == 1:
        with suppress(RecycleError):  # the job cannot be read or priced any more; the run's page says why
            job = price(Job.of_run(runs[0].path))
    if job is None and library is None:
        return None
    return WhatIf(job, library, None) if job is None else _what_if_of(job, library)


def _what_if_of(job: PricedJob, library: PlanLibrary | None = None) -> WhatIf:
    moves = job.planner.layout == "elastic"
    # With the job's search time and as many processes the plan equals the plan of `recycle plan`.
    search = partial(plan, job, processes=len(os.sched_getaffinity(0)))
    quick = partial(plan, job, quick=True)
    planner = partial(plan, job, seconds=MOVING_SECONDS) if moves else quick
    return WhatIf(job, library, planner, quick if moves else None, search, _what_if_of)


def _warm_up(what_if: WhatIf) -> None:
    def ask() -> None:
        for failed in ([], [Worker(0, 0)]):
            with suppress(RecycleError):
                what_if.outcome(failed)

    threading.Thread(target=ask, name="warm-up", daemon=True).start()


def _examples() -> tuple[list[Source], WhatIf]:
    job = price(Job.from_toml("[shape]\npipelines = 3\nranks = 4\nmicro_batches = 6\n[memory]\nlimit = 6\n", "example"))
    what_if = _what_if_of(job)
    adaptive = what_if.outcome([Worker(1, 2)]).plan.schedule
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
