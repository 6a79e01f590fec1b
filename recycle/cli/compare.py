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
from recycle.errors import JobError, RecycleError, errors_as
from recycle.files import write_whole
from recycle.job import Job, analytic
from recycle.job.sections import ANALYTIC
from recycle.systems import Running, comparison
from recycle.systems.cluster import CAUSES
from recycle.systems.comparison import Compared, DeadShare
from recycle.systems.failure_files import read_trace
from recycle.systems.failure_generator import Generator
from recycle.systems.setting import Setting


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
        setting = Setting.of(loaded)
    traces = [read_trace(path, population=population, seed=seed) for path in trace or []]
    if not traces:
        traces = [Generator(days=days, rate=rate, seed=seed).trace(population or setting.nodes)]
    with _bar(len(names) * len(traces)) as report:
        found = comparison.compare(setting, traces, names, seed, report)
    dead = comparison.at_dead_shares(setting, names, seed=seed)
    figures = _comparison_as_json(loaded, found, dead)
    if save is not None:
        _save(save, found[0], after)
        write_whole(save / "comparison.json", json.dumps(figures) + "\n")

    def show() -> None:
        for one in found:
            _print(one)
        _print_dead(dead, setting.nodes, names)

    return Result(figures, show)


def _save(folder: Path, compared: Compared, failures: int) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RecycleError(f"{folder}: cannot be written ({error.strerror})") from None
    for outcome in compared.outcomes:
        state = outcome.state_after(failures)
        if not isinstance(state, Running):
            why = "had fewer failures" if state is None else f"has stopped: {state.reason}"
            print(f"recycle: {outcome.system} {why}, so there is no schedule after {failures}", file=sys.stderr)
            continue
        for number, (schedule, profile) in enumerate(state.schedules()):
            stem = outcome.system if not number else f"{outcome.system}-{number + 1}"
            schedule.with_metadata(system=outcome.system).save(folder / f"{stem}.json")
            profile.save(folder / f"{stem}.profile.json")


def _comparison_as_json(job: Job, found: list[Compared], dead: list[DeadShare]) -> dict[str, Any]:
    return {
        "format": "recycle-comparison",
        "shape": str(job.shape),
        "assumptions": analytic.assumptions(job) if job.times.profile == ANALYTIC else [],
        "pauses": to_builtins(job.pauses),
        "traces": [
            {
                "name": one.trace.name,
                "nodes": one.trace.nodes,
                "failures": one.trace.failures,
                "seconds": one.trace.end,
                "live": one.live,
                "alive": one.trace.alive(),
                "notes": list(one.trace.notes),
                "references": {r.name: {"goodput": r.samples_per_second, "layout": r.layout} for r in one.references},
                "fault_scaled": {r.name: r.samples_per_second * one.live for r in one.references},
            }
            for one in found
        ],
        "systems": [comparison.outcome_as_json(outcome, one) for one in found for outcome in one.outcomes],
        "dead": [to_builtins(one) for one in dead],
    }


def _print(one: Compared) -> None:
    trace, references = one.trace, one.references
    fitting = [outcome for outcome in one.outcomes if outcome.misfit is None]
    print(
        f"{trace.name}: {trace.nodes} nodes, {trace.end / 86400:.3g} days, {trace.failures} failures,"
        f" {one.live:.2%} alive on average"
    )
    for note in trace.notes:
        print(f"  {note}")
    columns = ("system", "runs", "samples/s", "fault-free", "ETTR", *(f"/ {r.name}" for r in references), "GPU s each")
    rows: list[Sequence[str] | None] = []
    for reference in references:
        healthy = reference.samples_per_second
        rows.append((f"fault-free {reference.name}", reference.layout, f"{healthy:.4g}"))
        rows.append((f"fault-scaled {reference.name}", "", f"{healthy * one.live:.4g}"))
    rows.append(None)
    for outcome in one.outcomes:
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
    print("share of the time that was lost, in per cent")
    _table(
        ("system", *causes),
        [
            (name, *(f"{share[cause]:.2f}" if abs(share[cause]) >= 0.005 else "" for cause in causes))
            for name, share in shares.items()
        ],
    )
    print("throughput over time, as a share of the best fault-free one; nodes alive below")
    best = max((outcome.fault_free for outcome in one.outcomes), default=0.0)
    for outcome in fitting if best else ():
        print(f"  {outcome.system:20} {spark(outcome.rates(WIDE), best)}")
    print(f"  {'alive':20} {spark(trace.shares_alive(WIDE), 1.0)}\n")
    for outcome in one.outcomes:
        if outcome.misfit is not None:
            print(f"{outcome.system} does not fit: {outcome.misfit.reason}")
    for copies in sorted({outcome.copies for outcome in one.outcomes} if any(o.copies for o in one.outcomes) else ()):
        held = f"{copies} host(s) each" if copies else "every host of a stage"
        print(f"optimizer state on {held}: {', '.join(o.system for o in one.outcomes if o.copies == copies)}")


def _print_dead(dead: list[DeadShare], nodes: int, names: list[str]) -> None:
    for reference in dead[0].of_scaled:
        print(f"throughput with nodes dead, over fault-free {reference} times the live share")
        _table(
            ("system", *(f"{100 * one.share:g} %: {one.dead} of {nodes}" for one in dead)),
            [(name, *(f"{one.of_scaled[reference][name]:.3f}" for one in dead)) for name in names],
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
