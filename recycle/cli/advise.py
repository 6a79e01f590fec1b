"""`recycle advise`: which configuration to run on a number of GPUs, and what it will deliver."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import Annotated, Any

import typer
from msgspec import to_builtins

from recycle.advice import advise as advice
from recycle.advice.advise import Advice, Sensitivity, Setting
from recycle.advice.expectation import FailureModel
from recycle.cli.compare import comparison_as_json
from recycle.cli.terminal import Result, print_table, progress_bars
from recycle.errors import JobError, errors_as
from recycle.files import write_whole, writing
from recycle.job import Job, analytic
from recycle.job.sections import AUTO
from recycle.systems.cluster import CAUSES
from recycle.systems.comparison import system_names
from recycle.systems.failure_files import read_trace


def advise(
    job: Path,
    gpus: Annotated[int, typer.Option(min=1, max=2**20)],
    gpus_per_node: Annotated[int, typer.Option(min=1, max=64)] = 8,
    failures: str | None = None,
    days: Annotated[float, typer.Option(min=0.01, max=3650)] = 60.0,
    count: Annotated[int, typer.Option(min=1, max=50)] = 5,
    seeds: Annotated[int, typer.Option(min=0, max=100)] = 3,
    systems: str | None = None,
    changes: list[str] | None = None,
    output: Path | None = None,
    save: Path | None = None,
) -> Result:
    """Choose the configuration of a job for a number of GPUs, and compute what it delivers through failures.

    Data, pipeline and tensor parallelism, chunks, micro-batches, recomputation, a sharded optimizer and spare nodes are
    chosen by samples per second over the whole run. The global batch and the model stay. No GPU is needed.

    Example: **recycle advise benchmarks/paper/gpt3_medium.toml --gpus 64 --failures 4.2 -o chosen.toml**

    Args:
        job: job file; its [model], [data], [analytic] and [pauses] count, and its global batch.
        gpus: GPUs, spares included.
        gpus_per_node: GPUs that fail together.
        failures (FILE|RATE): failure trace, or failures per 1,000 node-days; 4.2 if left out.
        days: length of the run.
        count: configurations to print.
        seeds: simulations of each configuration, over other failures of the same rates; 0 for no simulation at all,
            which a cluster of tens of thousands of GPUs needs.
        systems (A,B): systems to simulate with the first configuration, as in recycle compare; all but recycle's own
            if left out.
        changes (--set KEY=VALUE): change an assumption: a key of the job file such as pauses.detect, or failures.rate,
            failures.repair_median and others; repeat for more.
        output (-o FILE): write the job file of the first configuration.
        save (DIR): write the simulations of the configurations and the other systems, for recycle view.
    """
    if gpus % gpus_per_node:
        raise JobError(f"--gpus {gpus}: is not a multiple of --gpus-per-node {gpus_per_node}")
    setting = Setting(Job.load(job), gpus, gpus_per_node, days, FailureModel())
    setting = _with_failures(setting, failures)
    for change in changes or []:
        key, equals, value = change.partition("=")
        if not equals:
            raise JobError(f"--set {change}: write KEY=VALUE, for example pauses.detect=30")
        setting = advice.with_value(setting, key.strip(), value.strip())
    names = [name for name in system_names(systems) if systems or not name.startswith("recycle")]
    with progress_bars(transient=True) as show, errors_as(JobError, str(job)):
        advised = advice.advise(
            setting, count, range(seeds), lambda phase, done, total: show(phase, done, total, phase)
        )
        effects = advice.sensitivity(setting, advised)
        compared = [advice.compare_with(setting, advised[0], names)] if seeds else []
    best = advised[0]
    assumptions = [*analytic.assumptions(best.job), *_assumptions(setting)]
    if rate := any(each.copied for each in advised) and best.job.prices.host_bandwidth:
        source = "four fifths of PCIe with 16 lanes" if setting.job.memory.host_bandwidth is None else "as set"
        assumptions.append(f"offload: memory.host_bandwidth {rate:g} bytes per second per GPU and direction ({source})")
    if output is not None:
        write_whole(output, best.job.to_toml())
    figures_of_systems, tables = comparison_as_json(best.job, compared, []), _tables(setting, advised, effects)
    if save is not None:
        named = [
            replace(each.simulated[0], system=f"{n}: {_shape(each)}") for n, each in enumerate(advised, 1) if seeds
        ]
        saved = [replace(each, outcomes=(*named, *each.outcomes[1:])) for each in compared]
        with writing(save):
            save.mkdir(parents=True, exist_ok=True)
        page = comparison_as_json(best.job, saved, []) | {"tables": tables, "assumptions": assumptions}
        write_whole(save / "comparison.json", json.dumps(page) + "\n")
    figures = {
        "format": "recycle-advice",
        "gpus": gpus,
        "days": days,
        "assumptions": assumptions,
        "configurations": [_as_json(each) for each in advised],
        "sensitivity": [
            {"change": e.change, "samples_per_second": e.samples_per_second, "best": e.best._asdict()} for e in effects
        ],
        "systems": figures_of_systems["systems"],
    }

    def show_all() -> None:
        for table in tables:
            print(table["title"])
            print_table(table["head"], table["rows"], left=("T x P x D", "optimizer", "if", "best"))
            print()
        for comparison in compared:
            print("Other systems on the same workers and failures")
            rows = [
                (o.system, o.layout or "does not fit", f"{o.goodput:.4g}", f"{o.ettr:.2%}") for o in comparison.outcomes
            ]
            print_table(("system", "runs", "samples/s", "effective"), rows, left=("system", "runs"))
            print()
        print("Assumptions")
        print("\n".join(f"  {line}" for line in assumptions))
        if output is not None:
            print(f"\nwrote {output}")

    return Result(figures, show_all)


def _with_failures(setting: Setting, failures: str | None) -> Setting:
    if failures is None:
        return setting
    try:
        rate = float(failures)
    except ValueError:
        return replace(setting, trace=read_trace(Path(failures)).fitted(setting.nodes))
    if not 0 <= rate <= 1e6:
        raise JobError(f"--failures {failures}: write failures per 1,000 node-days from 0 to 1e6, or a file")
    return advice.with_value(setting, "failures.rate", rate)


def _as_json(each: Advice) -> dict[str, Any]:
    expected = each.expected
    return {
        **each.candidate._asdict(),
        "micro_batches": each.job.shape.micro_batches,
        "staggered": each.job.planner.staggered,
        "undo": each.job.train.undo,
        "spare_nodes": each.spares,
        "period": each.period,
        "memory": each.memory,
        "offload": each.job.memory.offload == AUTO,
        "bytes_to_host": each.copied,
        "samples_per_second": expected.samples_per_second,
        "fault_free": expected.fault_free,
        "effective": expected.effective,
        "restarts": expected.restarts,
        "lost": dict(expected.lost),
        "simulated": [{"samples_per_second": o.goodput, "effective": o.ettr} for o in each.simulated],
    }


def _tables(setting: Setting, advised: Sequence[Advice], effects: Sequence[Sensitivity]) -> list[dict[str, Any]]:
    days = setting.trace.end / 86400 if setting.trace else setting.days
    lost = [each.expected.lost for each in advised]
    causes = [cause for cause in CAUSES if any(each.get(cause, 0) >= 5e-5 for each in lost)]
    numbers = {each.candidate: str(number) for number, each in enumerate(advised, 1)}
    now = advised[0].expected.samples_per_second or inf
    tables = {
        f"{setting.gpus} GPUs, {setting.nodes} nodes, {days:g} days": list(map(_row, numbers.values(), advised)),
        "Lost time, in percent": [
            {"": number, **{cause: f"{100 * each[cause]:.2f}" for cause in causes}}
            for number, each in zip(numbers.values(), lost, strict=True)
        ],
        "If the input changes: the first configuration, and the best of these": [
            {
                "if": each.change,
                "samples/s": f"{each.samples_per_second:.4g}",
                "change": f"{each.samples_per_second / now - 1:+.1%}",
                "best": numbers[each.best],
            }
            for each in effects
        ],
    }
    return [
        {"title": title, "head": list(rows[0]), "rows": [list(row.values()) for row in rows]}
        for title, rows in tables.items()
        if rows and len(rows[0]) > 1
    ]


def _shape(each: Advice) -> str:
    return f"{each.candidate.tensor_parallel} x {each.candidate.ranks} x {each.candidate.pipelines}"


def _row(number: str, each: Advice) -> dict[str, str]:
    candidate, job, expected = each.candidate, each.job, each.expected
    seen = sorted(outcome.goodput for outcome in each.simulated)
    optimizer = ("staggered" if job.planner.staggered else "barrier") + (", sharded" if candidate.sharded else "")
    optimizer += ", undo on the host" if job.planner.staggered and job.train.undo == "host" else ""
    return {
        "": number,
        "T x P x D": _shape(each),
        "V": str(candidate.chunks) if candidate.placement == "loop" else f"{candidate.chunks} (v)",
        "micro-batches": f"{job.shape.micro_batches} of {candidate.micro_batch}",
        "recompute": f"offload {each.copied / 2**30:.0f} GiB" if each.copied else candidate.recompute,
        "optimizer": optimizer,
        "spares": str(each.spares),
        "period": f"{each.period:.4g} s",
        "GiB": f"{each.memory / 2**30:.1f}",
        "samples/s": f"{expected.samples_per_second:.4g}",
        "effective": f"{expected.effective:.2%}",
        "simulated": f"{seen[0]:.4g} to {seen[-1]:.4g}" if seen else "",
    }


def _assumptions(setting: Setting) -> list[str]:
    stated = ", ".join(f"{key} {value:g}" for key, value in to_builtins(setting.job.pauses).items())
    model = ", ".join(f"{key} {value:g}" for key, value in to_builtins(setting.failures).items())
    source = (
        f"trace {setting.trace.name}" if setting.trace else f"failures: {model} (defaults from the InfiniteHBD trace)"
    )
    return [f"pauses: {stated} (seconds, bytes per second; [pauses] of the job file)", source]
