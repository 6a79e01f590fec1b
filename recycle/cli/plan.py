"""`recycle plan`: one schedule around dead workers, a plan library, or a library under a new profile."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from msgspec.structs import replace
from rich.console import Console

from recycle.cli.terminal import Result, print_table, progress_bars
from recycle.errors import PlanError, errors_as
from recycle.files import require_writable
from recycle.job import Job, PricedJob, price
from recycle.job.job import EvenedJob
from recycle.job.sections import ANALYTIC
from recycle.job.shape import Shape, Worker
from recycle.plans import Entry, Plan, PlanLibrary, Vector, cache_directory, failure_vector
from recycle.plans.plan import figures
from recycle.solve.effort import Progress
from recycle.solve.filling import LibraryProgress, library_vectors, plan_library
from recycle.solve.planner import plan as plan_one, plan_vector
from recycle.solve.problem import Problem
from recycle.solve.refreshing import PlanDrift, refresh

INTERRUPTED = 130
UNEVEN = 1.1
"""Work of a rank, relative to the mean, above which another split is suggested."""


def plan(
    job: Path,
    failed: str | None = None,
    failures: Annotated[int | None, typer.Option(min=0)] = None,
    library: Path | None = None,
    output: Path | None = None,
    profile: Path | None = None,
    threshold: Annotated[float, typer.Option(min=0)] = 0.02,
    within: float = 600.0,
    processes: Annotated[int | None, typer.Option(min=1)] = None,
    again: bool = False,
    no_cache: bool = False,
    move: bool | None = None,
    layout: Literal["fixed", "elastic"] | None = None,
) -> Result:
    """Plan the schedule of a job around its dead workers, with a proven lower bound and the gap to it.

    Ctrl-C ends a search with the best plan so far. Without --failed the result is the fault-free plan. With --failures
    N the result is a library for up to N dead workers, likeliest first. An interrupted library continues where it
    stopped; --again repeats the search for plans that do not meet their bound, with the job's present effort. With
    --library and --profile the library's plans are timed under the new profile, and plans whose gap has grown are
    planned again.

    Example: **recycle plan job.toml --failed 1.2 -o plan.json**

    Example: **recycle plan job.toml --failures 2 --library plans**

    Example: **recycle plan job.toml --library plans --profile measured.json**

    Args:
        job: job file: [shape], [times] and [memory] are enough.
        failed (K.R,…): dead workers, for example 1.2,0.3.
        failures (N): plan for up to N dead workers: every failure vector if few enough.
        library (DIR): keep plans in DIR, a file each, and a manifest.
        output (-o): write the schedule to this file.
        profile (FILE): profile to plan with; with --library, re-plan stale plans.
        threshold (SHARE): growth of a plan's gap from which --profile re-plans it.
        within (SECONDS): time for all plans of --failures or --profile together.
        processes (N): plans or searches at the same time; the number of CPUs if left out.
        again: repeat the search for plans of --library that do not meet their bound.
        no_cache: neither read nor write the plans of other runs in the user's cache.
        move (--move/--no-move): whether live workers may change stage; else as in the job.
        layout: whether the model may be repartitioned across the live workers; else as in the job.
    """

    if failed is not None and failures is not None:
        raise PlanError("plan: give --failed or --failures, not both")
    if not within > 0:
        raise PlanError(f"plan: --within: must be above 0 seconds, got {within:g}")
    if again and (failures is None or library is None):
        raise PlanError("plan: --again: needs --failures N and --library DIR, whose plans it searches once more")
    loaded = Job.load(job)
    if layout is not None:
        loaded = replace(loaded, planner=replace(loaded.planner, layout=layout))
    if move is not None:
        loaded = replace(loaded, planner=replace(loaded.planner, move=move))
    if profile is not None:
        loaded = replace(loaded, times=replace(loaded.times, profile=str(profile)))
    _require_bearable(loaded.shape, failures)
    priced = price(loaded)
    with errors_as(PlanError, f"{job} with {loaded.times.profile}" if loaded.times.profile else str(job)):
        Problem.from_job(priced)
    with errors_as(PlanError, "plan: --failed"):
        named = [Worker.parse(name) for name in (failed or "").split(",") if name.strip()]
    dead = [priced.shape.require(worker, "plan: --failed") for worker in named]
    with errors_as(PlanError, "plan: --failed"):
        Problem.from_job(priced, dead)
    if priced.planner.layout == "elastic" and (failures is not None or library is not None):
        what = "--library" if failures is None else "--failures"
        raise PlanError(f"plan: {what}: elastic layouts are planned for one set of dead workers: give --failed alone")
    processes = processes or len(os.sched_getaffinity(0))
    drifting = profile is not None and library is not None and failed is None
    if failures is None and not drifting:
        return _plan_one(loaded, priced, dead, library, output, processes)
    if output is not None:
        raise PlanError("plan: --failures makes many plans: give --library DIR instead of -o")
    effort = {"processes": processes, "seconds": within}
    cache = None if no_cache else cache_directory(os.environ)
    return _plan_many(priced, failures, library, threshold if drifting else None, effort, again, cache)


def _require_bearable(shape: Shape, failures: int | None) -> None:
    most = shape.ranks * (shape.pipelines - 1)
    if failures is not None and failures > most:
        raise PlanError(
            f"plan: --failures: at most {most} of the {shape.worker_count} workers can be dead while every stage has a"
            f" host, got {failures}"
        )


def _plan_one(
    stated: Job, job: PricedJob, failed: list[Worker], library: Path | None, output: Path | None, processes: int
) -> Result:
    if output is not None:
        require_writable(output)
    with _progress() as report, _ended_by_interrupt() as stop:
        if library is None or not job.prices.are_peers_alike or job.planner.move:
            open_job = stated if library is None else job  # all plans of a library have one placement
            result = plan_one(open_job, failed, processes=processes, stop=stop, progress=report)
        else:
            plans = PlanLibrary(library, job)
            plans.prepare()
            vector = failure_vector(job.shape, failed)
            kept = plans.proven(plans.entry(vector))
            if kept is None:
                kept = plan_vector(job, vector, processes=processes, stop=stop, progress=report)
                plans.add(kept)
            result = kept.for_processes(failed)
    if output is not None:
        result.save(output)
    figures = result.summary()
    if isinstance(stated, EvenedJob) and result.schedule.placing is not None:
        figures["split"] = price(stated.placed(result.schedule.placing)).model.split
    return Result(figures, partial(_print_plan, job, result, failed, figures.get("split"), output))


def _print_plan(
    job: PricedJob, result: Plan, failed: list[Worker], split: list[int] | None, output: Path | None
) -> None:
    print("Plan" + (f" without {', '.join(map(str, sorted(set(failed))))}" if failed else ""))
    figures = (
        f"{result.period:g}",
        f"{result.makespan:g}",
        f"{result.lower_bound:g}",
        _certified(result.certified_bound),
        _gap(result.gap),
        f"{result.seconds:.1f}",
    )
    _table(
        ("vector", "period", "makespan", "bound", "certified", "gap", "seconds"), [(_vector(result.vector), *figures)]
    )
    if (other := result.other_placement) is not None:
        found = f"a period of {other.period:g} after a short search, at best {other.lower_bound:g}"
        print(f'placement "{result.schedule.placing}"; "{other.placement}" gives {found}')
    if split is not None:
        print(f"layers of the stages, as [model] split: {split}")
    _print_unevenness(job)
    _print_layout(result)
    if count := result.summary().get("offloads"):
        print(f"{count} activations leave for the host and return, on lines `out` and `back` of recycle simulate")
    if output is not None:
        print(f"{output}: written, hash {result.hash}")


def _print_unevenness(job: PricedJob) -> None:
    if job.times.profile != ANALYTIC or job.model.split is not None:
        return
    shape, names = job.shape, ("forward", "backward_input", "backward_weight")
    stages = [sum(times) for times in zip(*(job.prices.per_stage(name, shape.stages) for name in names), strict=True)]
    ranks = [sum(stages[stage] for stage in shape.stages_of_rank(rank)) for rank in range(shape.ranks)]
    ratio = max(ranks) * len(ranks) / sum(ranks)
    if ratio > UNEVEN:
        print(
            f'rank {ranks.index(max(ranks))} has {ratio:.2f} times the mean work: try [model] split = "auto", which'
            " chooses the layers of the stages"
        )


def _print_layout(result: Plan) -> None:
    by_pipeline = groupby(result.schedule.metadata.get("layout", {}).items(), lambda item: item[0].split(".")[0])
    for pipeline, hosts in by_pipeline:
        parts = []
        for worker, ends in hosts:
            ranges = (f"{begin}-{end - 1}" for begin, end in zip(ends[::2], ends[1::2], strict=True))
            parts.append(f"{worker}: {' and '.join(ranges)}")
        print(f"pipeline {pipeline}, units by worker: {', '.join(parts)}")
    if result.fixed_bound is not None:
        print(
            f"no schedule of the given stages is faster than {result.fixed_bound:g}, no schedule of any layout than"
            f" {result.lower_bound:g}"
        )
    if result.layout_limit is not None:
        print(f"no layer moves: {result.layout_limit}")
    for step in result.moves:
        copied = f"copies {step.bytes:g} bytes from {step.source}"
        if step.units:
            print(f"{step.worker} takes on units {step.units[0]}-{step.units[1] - 1}: {copied}")
        else:
            print(f"{step.worker} takes over {step.role}: {copied}")


@contextmanager
def _ended_by_interrupt() -> Iterator[threading.Event]:
    stop = threading.Event()

    def end(*_: object) -> None:
        if stop.is_set():
            raise KeyboardInterrupt
        stop.set()
        print("recycle: interrupted; ending with the best plan so far", file=sys.stderr)

    before = signal.signal(signal.SIGINT, end)
    try:
        yield stop
    finally:
        signal.signal(signal.SIGINT, before)


def _plan_many(
    job: PricedJob,
    failures: int | None,
    library: Path | None,
    threshold: float | None,
    effort: dict[str, Any],
    again: bool,
    cache: Path | None,
) -> Result:
    drifts: list[PlanDrift] = []
    entries: list[Entry] = []
    complete = True
    try:
        with _bar() as report:
            if library is not None and failures is not None:
                PlanLibrary(library, job).prepare()
            if library is not None and threshold is not None:
                is_new = failures is not None and not PlanLibrary(library, job).entries()
                if not is_new:
                    drifts, entries = refresh(job, library, threshold, report, cache=cache, **effort)
            if failures is not None:
                _, complete = library_vectors(job, failures)
                entries = plan_library(job, failures, library, report, cache=cache, again=again, **effort)
    except KeyboardInterrupt:
        print(
            f"recycle: interrupted; finished plans are kept {_where(library, cache)}: run it again to continue",
            file=sys.stderr,
        )
        raise typer.Exit(INTERRUPTED) from None
    table = _rows(job.shape, entries)
    now = {entry.vector: entry.period for entry in entries}
    stated: dict[str, Any] = {} if failures is None else {"failures": failures, "complete": complete}
    if threshold is not None:
        stated |= {"profile": job.prices.digest(), "threshold": threshold}
        stated["drift"] = [
            {**drift.summary(), "stale": drift.is_stale(threshold), "period_now": now.get(drift.vector)}
            for drift in drifts
        ]

    def show() -> None:
        if threshold is not None:
            _drift_table(drifts, threshold, now)
        _library_table(table, f"{len(entries)} plans, kept {_where(library, cache)}")
        _print_unevenness(job)
        if not complete:
            print(
                f"Up to {failures} dead workers have too many failure vectors to plan each. Planned are the likeliest,"
                f" (k … k), which serve all others, and the normalized vector of each number of dead workers."
            )

    return Result({**stated, "plans": [entry.summary() for entry in entries], "table": table}, show)


def _where(library: Path | None, cache: Path | None) -> str:
    kept = library or cache
    return "nowhere; --library DIR keeps them" if kept is None else f"in {kept}"


def _rows(shape: Shape, entries: list[Entry]) -> list[dict[str, Any]]:
    fault_free = next((entry.period for entry in entries if entry.failures == 0), None)
    rows = []
    for entry in entries:
        live = 1 - entry.failures / shape.worker_count
        throughput = None if fault_free is None else fault_free / entry.period
        rows.append(
            {
                **figures(entry),
                "failures": entry.failures,
                "throughput": throughput,
                "of_ideal": None if throughput is None else throughput / live,
                "searched": not entry.quick,
                "hash": entry.hash,
                "file": entry.file,
            }
        )
    return rows


def _library_table(rows: list[dict[str, Any]], title: str) -> None:
    print(title)
    _table(
        ("vector", "failures", "period", "bound", "certified", "gap", "throughput", "of ideal", "seconds"),
        [
            (
                _vector(row["vector"]),
                str(row["failures"]),
                f"{row['period']:g}",
                f"{row['lower_bound']:g}",
                _certified(row["certified_bound"]),
                _gap(row["gap"]),
                _share(row["throughput"]),
                _share(row["of_ideal"]),
                f"{row['seconds']:.1f}",
            )
            for row in rows
        ],
    )
    print("throughput: of fault-free; of ideal: of fault-free times live workers / all workers")
    hurried = sum(not row["searched"] for row in rows)
    if hurried:
        print(f"{hurried} plans are the list scheduler's, not searched: allow more time for a search")


def _drift_table(drifts: list[PlanDrift], threshold: float, now: Mapping[Vector, float]) -> None:
    if not drifts:
        print("all plans were made for this profile")
        return
    stale = sum(drift.is_stale(threshold) for drift in drifts)
    print(f"{stale} of {len(drifts)} plans made for another profile are stale (gap grown by more than {threshold:.1%})")
    _table(
        ("vector", "was", "is", "bound", "gap was", "gap is", "", "now"),
        [
            (
                _vector(drift.vector),
                f"{drift.stored_period:g}",
                "not valid" if drift.period is None else f"{drift.period:g}",
                f"{drift.lower_bound:g}",
                _gap(drift.stored_gap),
                "" if drift.gap is None else _gap(drift.gap),
                "stale" if drift.is_stale(threshold) else "kept",
                f"{now[drift.vector]:g}" if drift.vector in now else "",
            )
            for drift in drifts
        ],
    )


def _gap(gap: float) -> str:
    return f"{gap:.1%}" if gap > 1e-9 else "optimal"


def _certified(bound: float | None) -> str:
    return "none" if bound is None else f"{bound:g}"


def _share(share: float | None) -> str:
    return "" if share is None else f"{share:.1%}"


def _vector(vector: Sequence[int]) -> str:
    if len(vector) <= 16:
        return " ".join(map(str, vector))
    return " ".join(f"{dead}×{len(list(run))}" for dead, run in groupby(vector))


_table = partial(print_table, left=("vector",))


@contextmanager
def _progress() -> Iterator[Progress | None]:
    if not sys.stderr.isatty():
        yield None
        return

    with Console(stderr=True).status("planning") as status:

        def report(stage: str, period: float) -> None:
            status.update(stage if period == float("inf") else f"{stage}, period {period:g}")

        yield report


@contextmanager
def _bar() -> Iterator[Callable[[LibraryProgress], None]]:
    with progress_bars() as advance:

        def report(progress: LibraryProgress) -> None:
            done = progress.done if progress.entry else None
            advance(progress.phase, done, progress.total, f"{progress.phase}, vector {_vector(progress.vector)}")

        yield report
