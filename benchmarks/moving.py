"""Layers that move in a running job: executed periods against simulated ones, and the pause of a move.

    python benchmarks/moving.py                  # 8 x 4 emulated workers, two of them killed; two minutes on 2 cores
    python benchmarks/moving.py --shape 4,4,16 --dead 1.2
    python benchmarks/moving.py --shape 3,2,4 --dead 1.1 --layers 8 --hidden 512    # a real GPT, whose bytes count

A run of real processes, with emulated stages or a GPT: workers are killed, their micro-batches are re-routed, layers
move, and training continues. The executed period is the median over the steps of each plan without the first step of
its generation. A pause is the time between the commits around a change, minus an executed period of the next plan. The
target is at most two iterations plus bytes / bandwidth, the copy time of the worker that copies most.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

from recycle.cli.planner import plan_for_training
from recycle.exec.faults.faults import parse_fault
from recycle.exec.launch.launcher import train
from recycle.job import Job

JOB = """
[shape]
pipelines = {D}
ranks = {P}
micro_batches = {m}
[memory]
limit = {limit}
[model]
layers = {layers}
{model}
[planner]
layout = "elastic"
move_when = "always"
seconds = {seconds}
[membership]
drift = 0.0
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="8,4,16", help="pipelines, ranks, micro-batches")
    parser.add_argument("--dead", default="1.2,5.0", help="workers that are killed in step 3")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--unit", type=float, default=0.05, help="seconds of a fault-free stage's F, I or W")
    parser.add_argument("--steps", type=int, default=26)
    parser.add_argument("--seconds", type=float, default=10.0, help="for the plan of the layout")
    parser.add_argument("--hidden", type=int, default=0, help="train a GPT of this width, on the processor")
    options = parser.parse_args()
    D, P, m = map(int, options.shape.split(","))
    model = f'kind = "emulated"\nseconds_per_unit = {options.unit}'
    if options.hidden:
        model = f'kind = "gpt"\nhidden = {options.hidden}\nheads = 8\nsequence = 32'
    values = {"layers": options.layers, "model": model, "seconds": options.seconds, "limit": 2 * P}
    job = Job.from_toml(JOB.format(D=D, P=P, m=m, **values))
    faults = [parse_fault(f"kill:{worker}@3.forward") for worker in options.dead.split(",")]
    result = train(
        job, tempfile.mkdtemp(prefix="recycle-"), steps=options.steps, faults=faults, planner=plan_for_training
    )
    (layout,) = (event for event in result.events if event["kind"] == "layout")
    moves = [event for event in result.events if event["kind"] == "moved"]
    print(f"{D} x {P} workers, {m} micro-batches, {options.layers} layers, without {options.dead}")
    periods: dict[str, float] = {}
    for name, lines in by_plan(result.metrics):
        periods[name] = executed_period(lines)
        errors = [line["period_error"] for line in lines if line["period_error"] is not None]
        error = f", {statistics.median(errors):+.1%} over the simulated one" if errors else ""
        print(f"plan {name[:8]}: executed period {periods[name]:.3f} s{error}")
    copying: Counter[str] = Counter()
    for event in moves:
        copying[event["worker"]] += event["seconds"]
    print(
        f"layout: period {layout['period_before']:g} -> {layout['period']:g}; {len(moves)} copies,"
        f" {sum(event['bytes'] for event in moves):,} bytes, {max(copying.values(), default=0.0):.2f} s"
    )
    for before, after in zip(result.metrics, result.metrics[1:], strict=False):
        if before["generation"] != after["generation"]:
            period = periods[after["plan"]]
            pause = after["time"] - before["time"] - period
            print(f"change before step {after['step']}: pause {pause:.2f} s = {pause / period:.2f} iterations")


def by_plan(lines: Iterable[dict[str, Any]]) -> list[tuple[str, list[dict[str, Any]]]]:
    """(plan, its lines of metrics) in the order of the run."""
    found: dict[str, list[dict[str, Any]]] = {}
    for line in lines:
        found.setdefault(line["plan"], []).append(line)
    return list(found.items())


def executed_period(lines: Sequence[dict[str, Any]]) -> float:
    """Median seconds between the commits of a plan's iterations; of a single iteration what its workers took."""
    between = [
        after["time"] - before["time"]
        for before, after in pairwise(lines)
        if after["step"] == before["step"] + 1 and after["generation"] == before["generation"]
    ]
    return statistics.median(between) if between else lines[-1]["time"] - lines[-1]["began"]


if __name__ == "__main__":
    main()
