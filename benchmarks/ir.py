"""The IR at scale: build, lower, check, simulate, write and read ten thousand to a million instructions.

    python benchmarks/ir.py [--rounds N] [--family NAME]

Each size runs in a separate process, so that peak memory is per size; figures are medians over rounds. "simulate cold"
is the first call in a process, which loads the compiled loops (and compiles them on the first run after an
installation). torch's validator, lowering and simulator support one pipeline. They are compared on one pipeline, in one
process with recycle's, alternating.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))
from recycle import Schedule, Shape, check, lower, simulate
from recycle.ir.families import FAMILIES
from recycle.ir.formats import torch_csv

SIZES = ((1, 32, 52), (1, 64, 96), (3, 64, 96), (8, 64, 96), (24, 64, 96))
"""(D, P, m)."""
Step = tuple[Callable[[Any], Any], Any]
STEPS = ("build", "lower", "check", "simulate cold", "simulate", "write", "read")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--family", default="zb-h1", choices=FAMILIES)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        print(json.dumps(measured(arguments.family, Shape(*map(int, arguments.one.split(","))))))
        return
    head = ["instructions", *(f"{step} s" for step in STEPS), "peak MB", "us each"]
    print(f"{arguments.family}, medians of {arguments.rounds} rounds\n" + "".join(f"{title:>16}" for title in head))
    for size in SIZES:
        rounds = [in_a_process(arguments.family, size) for _ in range(arguments.rounds)]
        row = {key: statistics.median(r[key] for r in rounds) for key in rounds[0]}
        each = 1e6 * sum(row[step] for step in STEPS if step != "simulate cold") / row["instructions"]
        cells = [f"{row['instructions']:,.0f}", *(f"{row[s]:.3f}" for s in STEPS), f"{row['peak']:.0f}", f"{each:.2f}"]
        print("".join(f"{cell:>16}" for cell in cells), f"  D={size[0]} P={size[1]} m={size[2]}", flush=True)
    beside_torch(arguments.rounds, Shape(1, 64, 96))


def in_a_process(family: str, size: tuple[int, int, int]) -> dict[str, float]:
    command = [sys.executable, __file__, "--family", family, "--one", ",".join(map(str, size))]
    printed: dict[str, float] = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return printed


def measured(family: str, shape: Shape) -> dict[str, float]:
    """Seconds of each step, and the process's peak memory in MB."""
    seconds: dict[str, float] = {}
    build = FAMILIES[family]
    schedule = timed(seconds, "build", lambda: build(shape))
    lowered = timed(seconds, "lower", lambda: lower(schedule))
    findings = timed(seconds, "check", lambda: check(lowered, about_to_run=True))
    assert findings == [], findings[:3]
    timed(seconds, "simulate cold", lambda: simulate(lowered))
    timed(seconds, "simulate", lambda: simulate(lowered))
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, "schedule.json")
        timed(seconds, "write", lambda: lowered.save(path))
        again = timed(seconds, "read", lambda: Schedule.load(path))
    assert again == lowered
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3
    return {**seconds, "instructions": len(lowered.columns), "peak": peak}


def timed(seconds: dict[str, float], step: str, function: Callable[[], Any]) -> Any:
    began = time.perf_counter()
    result = function()
    seconds[step] = time.perf_counter() - began
    return result


def beside_torch(rounds: int, shape: Shape) -> None:
    """The same one-pipeline schedule through torch's lowering, validator and communication simulator."""
    import torch.distributed.pipelining.schedules as torch_schedules

    schedule = FAMILIES["zb-h1"](shape)
    text = torch_csv.dumps(schedule)
    rows = [[cell for cell in line.split(",") if cell] for line in text.splitlines()]
    read = torch_schedules._Action.from_str
    ranks, stages = shape.ranks, shape.stages
    seconds: dict[str, list[float]] = {}

    def pair(step: str, ours: Step, theirs: Step) -> tuple[Any, Any]:
        results = []
        for side, (function, argument) in (("ours", ours), ("torch", theirs)):
            once: dict[str, float] = {}
            results.append(timed(once, step, lambda work=function, on=argument: work(on)))
            seconds.setdefault(f"{side} {step}", []).append(once[step])
        return results[0], results[1]

    def validate(actions: Any) -> Any:
        return torch_schedules._validate_schedule(actions, ranks, stages, shape.micro_batches)

    def add_send_recv(actions: Any) -> Any:
        return torch_schedules._add_send_recv(actions, lambda stage: stage, stages)

    def simulate_comms(actions: Any) -> Any:
        return torch_schedules._simulate_comms_compute(actions, lambda stage: stage, stages)

    def read_cells(rows: list[list[str]]) -> Any:
        return {rank: [read(cell) for cell in row] for rank, row in enumerate(rows)}

    for _ in range(rounds):
        mine, actions = pair("read CSV", (torch_csv.loads, text), (read_cells, rows))
        pair("check", (check, mine), (validate, actions))
        lowered, communicating = pair("lower", (lower, mine), (add_send_recv, actions))
        pair("simulate", (simulate, lowered), (simulate_comms, communicating))
    print(f"\nbeside torch, zb-h1, {shape}: {len(schedule.columns):,} instructions, {len(lowered.columns):,} lowered")
    print(f"{'':>12}{'ours s':>12}{'torch s':>12}{'ratio':>10}")
    for step in ("read CSV", "check", "lower", "simulate"):
        mine, theirs = (statistics.median(seconds[f"{side} {step}"]) for side in ("ours", "torch"))
        print(f"{step:>12}{mine:12.3f}{theirs:12.3f}{theirs / mine:10.1f}")


if __name__ == "__main__":
    main()
