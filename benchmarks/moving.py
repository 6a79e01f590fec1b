"""Layers that move in a running job: executed periods beside the simulated ones, and what the pause of a move costs.

    python benchmarks/moving.py                  # 8 x 4 emulated workers, two of them killed; two minutes on 2 cores
    python benchmarks/moving.py --shape 4,4,16 --dead 1.2

A run of real processes on emulated stages: two workers are killed, their micro-batches are re-routed, layers move, and
training goes on. The executed period is the median over the steps of each plan, but for the first of its generation. A
pause is the time between the commits around a change, less a period of the plan that follows; the target is at most
two iterations and bytes / bandwidth.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Iterable
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
kind = "emulated"
layers = {layers}
seconds_per_unit = {unit}
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
    options = parser.parse_args()
    D, P, m = map(int, options.shape.split(","))
    values = {"layers": options.layers, "unit": options.unit, "seconds": options.seconds, "limit": 2 * P}
    job = Job.from_toml(JOB.format(D=D, P=P, m=m, **values))
    faults = [parse_fault(f"kill:{worker}@3.forward") for worker in options.dead.split(",")]
    result = train(
        job, tempfile.mkdtemp(prefix="recycle-"), steps=options.steps, faults=faults, planner=plan_for_training
    )
    (layout,) = (event for event in result.events if event["kind"] == "layout")
    moves = [event for event in result.events if event["kind"] == "moved"]
    print(f"{D} x {P} workers, {m} micro-batches, {options.layers} layers, without {options.dead}")
    for name, lines in by_plan(result.metrics):
        print_line(name, lines, options.unit)
    print(
        f"layout: period {layout['period_before']:g} -> {layout['period']:g}; {len(moves)} copies,"
        f" {sum(event['bytes'] for event in moves):,} bytes"
    )
    for before, after in zip(result.metrics, result.metrics[1:], strict=False):
        if before["generation"] != after["generation"]:
            period = after["period"] * options.unit
            pause = after["time"] - before["time"] - period
            print(f"change before step {after['step']}: pause {pause:.2f} s = {pause / period:.2f} iterations")


def by_plan(lines: Iterable[dict[str, Any]]) -> list[tuple[str, list[dict[str, Any]]]]:
    """(plan, its lines of metrics) in the order of the run."""
    found: dict[str, list[dict[str, Any]]] = {}
    for line in lines:
        found.setdefault(line["plan"], []).append(line)
    return list(found.items())


def print_line(plan: str, lines: list[dict[str, Any]], unit: float) -> None:
    errors = [line["period_error"] for line in lines if line["period_error"] is not None]
    simulated = lines[-1]["period"] * unit
    if errors:
        error = statistics.median(errors)
        print(f"plan {plan[:8]}: simulated {simulated:.3f} s, executed {simulated * (1 + error):.3f} s ({error:+.1%})")


if __name__ == "__main__":
    main()
