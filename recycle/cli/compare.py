"""`recycle compare`: all resilience systems on one job and one failure trace."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from msgspec import to_builtins
from msgspec.structs import replace
from rich import box

from recycle.cli.terminal import WIDE, Result, print_table, progress_bars, spark
from recycle.errors import JobError, errors_as
from recycle.files import write_whole, writing
from recycle.job import Job, analytic
from recycle.job.sections import ANALYTIC
from recycle.systems import ActiveConfiguration, comparison
from recycle.systems.cluster import CAUSES
from recycle.systems.comparison import Comparison, DeadShare
from recycle.systems.failure_files import read_trace
from recycle.systems.failure_generator import Generator
from recycle.systems.scenario import Scenario


def compare(
    job: Path,
    trace: list[Path] | None = None,
    systems: str | None = None,
    days: Annotated[float, typer.Option(min=0.001, max=36525)] = 30.0,
    rate: Annotated[float, typer.Option(min=0, max=1e6)] = 4.2,
    seed: int = 0,
    population: Annotated[int | None, typer.Option(min=1, max=2**20)] = None,
    pause: Annotated[float | None, typer.Option(min=0)] = None,
    save: Path | None = None,
    after: Annotated[int, typer.Option(min=0)] = 1,
) -> Result:
    """Run every resilience system over a failure trace: committed samples per second, and where time went.

    All systems get the same nodes, layers, links, memory, batch and pauses. Systems that do not fit into memory are
    marked.

    Example: **recycle compare benchmarks/paper/gpt3_6_7b.toml --days 90 --systems recycle,oobleck**

    Args:
        job: job file; its times count as seconds.
        trace (FILE): failure trace; repeat for more. Generated if left out.
        systems (A,B): systems, and variants of them; all systems if left out.
        days: length of the generated trace.
        rate: failures per 1,000 node-days of the generated trace.
        seed: seed of the generated trace, and of the nodes selected from a larger trace.
        population: nodes that the trace covers, including nodes that never fail.
        pause (SECONDS): time to detect, plan and rebuild groups, instead of [pauses].
        save (DIR): write comparison.json, and the schedules of each system on the first trace.
        after (N): with --save: number of failures before those schedules.
    """

    loaded = Job.load(job)
    if pause is not None:
        loaded = replace(loaded, pauses=replace(loaded.pauses, detect=pause, plan=0.0, rebuild=0.0))
    names = comparison.system_names(systems)
    with errors_as(JobError, str(job)):
        scenario = Scenario.of(loaded)
    traces = [read_trace(path, population=population, seed=seed) for path in trace or []]
    if not traces:
        traces = [Generator(days=days, rate=rate, seed=seed).trace(population or scenario.nodes)]
    with _bar(len(names) * len(traces)) as report:
        results = comparison.compare(scenario, traces, names, seed, report)
    dead = comparison.at_dead_shares(scenario, names, seed=seed, fault_free=results[0].references)
    figures = comparison_as_json(loaded, results, dead)
    if save is not None:
        _save(save, results[0], after)
        write_whole(save / "comparison.json", json.dumps(figures) + "\n")

    def show() -> None:
        for result in results:
            _print(result)
        _print_dead(dead, scenario.nodes, names)

    return Result(figures, show)


def _save(folder: Path, compared: Comparison, failures: int) -> None:
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    for outcome in compared.outcomes:
        state = outcome.state_after(failures)
        if not isinstance(state, ActiveConfiguration):
            why = "had fewer failures" if state is None else f"has stopped: {state.reason}"
            print(f"recycle: {outcome.system} {why}: no schedule after {failures} failures is saved", file=sys.stderr)
            continue
        for number, (schedule, profile) in enumerate(state.schedules()):
            stem = outcome.system if not number else f"{outcome.system}-{number + 1}"
            schedule.with_metadata(system=outcome.system).save(folder / f"{stem}.json")
            profile.save(folder / f"{stem}.profile.json")


def comparison_as_json(job: Job, results: list[Comparison], dead: list[DeadShare]) -> dict[str, Any]:
    return {
        "format": "recycle-comparison",
        "shape": str(job.shape),
        "assumptions": analytic.assumptions(job) if job.times.profile == ANALYTIC else [],
        "pauses": to_builtins(job.pauses),
        "traces": [
            {
                "name": result.trace.name,
                "nodes": result.trace.nodes,
                "failures": result.trace.failures,
                "seconds": result.trace.end,
                "live": result.live,
                "alive": result.trace.alive(),
                "notes": list(result.trace.notes),
                "references": {
                    r.name: {"goodput": r.samples_per_second, "layout": r.layout} for r in result.references
                },
                "fault_scaled": {r.name: r.samples_per_second * result.live for r in result.references},
            }
            for result in results
        ],
        "systems": [comparison.outcome_as_json(outcome, result) for result in results for outcome in result.outcomes],
        "dead": [to_builtins(result) for result in dead],
    }


def _print(result: Comparison) -> None:
    trace, references = result.trace, result.references
    fitting = [outcome for outcome in result.outcomes if outcome.misfit is None]
    print(
        f"{trace.name}: {trace.nodes} nodes, {trace.end / 86400:.3g} days, {trace.failures} failures,"
        f" {result.live:.2%} alive on average"
    )
    for note in trace.notes:
        print(f"  {note}")
    columns = (
        "system",
        "runs",
        "samples/s",
        "fault-free",
        "ETTR",
        *(f"/ {r.name}" for r in references),
        "GPU s/sample",
    )
    rows: list[Sequence[str] | None] = []
    for reference in references:
        healthy = reference.samples_per_second
        rows.append((f"fault-free {reference.name}", reference.layout, f"{healthy:.4g}"))
        rows.append((f"fault-scaled {reference.name}", "", f"{healthy * result.live:.4g}"))
    rows.append(None)
    for outcome in result.outcomes:
        if outcome.misfit is not None:
            rows.append((outcome.system, "does not fit", *["-"] * (len(columns) - 2)))
            continue
        ratios = [reference.ratio(outcome) for reference in references]
        rows.append(
            (
                outcome.system,
                outcome.layout,
                f"{outcome.goodput:.4g}",
                f"{outcome.fault_free:.4g}",
                f"{outcome.ettr:.2%}",
                *("-" if ratio is None else f"{ratio:.3f}" for ratio in ratios),
                f"{outcome.gpu_seconds_per_sample:.4g}",
            )
        )
    _table(columns, rows)
    shares = {
        outcome.system: {cause: 100 * outcome.lost[cause] / outcome.seconds for cause in CAUSES}
        for outcome in fitting
        if outcome.seconds
    }
    causes = [cause for cause in CAUSES if any(abs(share[cause]) >= 0.005 for share in shares.values())]
    print("lost time, in percent of the trace")
    _table(
        ("system", *causes),
        [
            (name, *(f"{share[cause]:.2f}" if abs(share[cause]) >= 0.005 else "" for cause in causes))
            for name, share in shares.items()
        ],
    )
    print("throughput over time, relative to the best fault-free one; share of live nodes below")
    best = max((outcome.fault_free for outcome in result.outcomes), default=0.0)
    for outcome in fitting if best else ():
        print(f"  {outcome.system:20} {spark(outcome.rates(WIDE), best)}")
    print(f"  {'alive':20} {spark(trace.shares_alive(WIDE), 1.0)}\n")
    for outcome in result.outcomes:
        if outcome.misfit is not None:
            print(f"{outcome.system} does not fit: {outcome.misfit.reason}")
    for copies in sorted(
        {outcome.copies for outcome in result.outcomes} if any(o.copies for o in result.outcomes) else ()
    ):
        held = f"{copies} host(s) each" if copies else "every host of a stage"
        print(f"optimizer state on {held}: {', '.join(o.system for o in result.outcomes if o.copies == copies)}")


def _print_dead(dead: list[DeadShare], nodes: int, names: list[str]) -> None:
    for reference in dead[0].of_scaled:
        print(f"throughput with dead nodes, over fault-free {reference} times the live share")
        _table(
            ("system", *(f"{100 * share.share:g} %: {share.dead} of {nodes}" for share in dead)),
            [(name, *(f"{share.of_scaled[reference][name]:.3f}" for share in dead)) for name in names],
        )


_table = partial(print_table, left=("system", "runs"), box=box.SIMPLE, least=100)


@contextmanager
def _bar(runs: int) -> Iterator[comparison.SystemProgress]:
    with progress_bars(transient=True) as advance:
        done = 0

        def report(name: str, share: float) -> None:
            nonlocal done
            advance("systems", done + share, runs, f"{name:18}")
            done += share >= 1

        yield report
