"""What sharding the optimizer's state costs a run: iteration time, pause after a death, time with missing copies.

    python -m benchmarks.sharded_runs [--steps N] [--rounds N] [--deaths N] [--layers N] [--hidden N] [--kind KIND]

Worker processes of this machine, D = 4 hosts of one stage, two copies of each shard. Sharded and replicated runs
alternate. Figures are the lower quartile (least disturbed by other programs), the median and the maximum of all healthy
iterations, and of pauses from the detection of a death to the start of the next generation and to the next commit.
Copies are missing from then until the last has arrived, while training continues: the time, the number of iterations,
and the bytes of the worker that received most.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
from collections import Counter, defaultdict
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

from recycle import Job
from recycle.cli.planner import plan_for_training
from recycle.exec.faults.faults import parse_fault
from recycle.exec.launch.launcher import RunResult, train
from recycle.exec.processes.forkserver import ForkServer

JOB = """
[shape]
pipelines = 4
ranks = 1
micro_batches = 2
[memory]
limit = 4
[planner]
ahead = 1
[model]
kind = "{kind}"
layers = {layers}
hidden = {hidden}
heads = 4
sequence = 64
vocabulary = 512
[train]
clip = 1e9
precision = "{precision}"
sharded_optimizer = {sharded}
"""
APART = 5
"""Iterations from one death to the next; the worker is back after three."""


def run(server: ForkServer, text: str, steps: int, faults: Sequence[str] = ()) -> RunResult:
    """One run through these faults."""
    folder = Path(tempfile.mkdtemp(prefix="recycle-sharded-"))
    os.environ.setdefault("RECYCLE_CACHE", str(folder / "cache"))
    struck = [parse_fault(fault) for fault in faults]
    job = Job.from_toml(text)
    return train(job, folder / "run", steps=steps, faults=struck, planner=plan_for_training, server=server)


def iterations(result: RunResult) -> list[float]:
    """Seconds from commit to commit, without the first three steps."""
    times = [line["time"] for line in result.metrics]
    return [after - before for before, after in pairwise(times[3:])]


def pauses(result: RunResult) -> list[tuple[float, ...]]:
    """(from the detection of each death to the next generation's start, to its commit, to the last copy, the iterations
    that are committed by then, bytes of the worker that got most)."""
    found = []
    for at, event in enumerate(result.events):
        if event["kind"] != "detected":
            continue
        began, behind = event["time"], result.events[at:]
        back = next(one["time"] for one in behind if one["kind"] == "recovered")
        commits = [line["time"] for line in result.metrics if line["time"] > began]
        moved = []
        for one in behind:
            if one["kind"] == "rejoined":
                break
            moved += [one] if one["kind"] == "moved" else []
        last = max((one["time"] for one in moved), default=began)
        got = Counter[str]()
        for one in moved:
            got[one["worker"]] += one["bytes"]
        iterations_since = sum(commit <= last for commit in commits)
        found.append((back - began, commits[0] - began, last - began, iterations_since, max(got.values(), default=0)))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--deaths", type=int, default=8, help="in one run of each round; 0 for none")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--kind", default="gpt")
    parser.add_argument("--precision", default="fp32")
    given = parser.parse_args()
    healthy, struck = defaultdict[str, list[float]](list), defaultdict[str, list[tuple[float, ...]]](list)
    steps = APART * (given.deaths + 1)
    faults = [f"kill:1.0@{APART * (n + 1)}" for n in range(given.deaths)]
    faults += [f"rejoin:1.0@{APART * (n + 1) + 3}" for n in range(given.deaths)]
    server = ForkServer(given.kind)
    try:
        for _ in range(given.rounds):
            for mode in ("false", "true"):
                text = JOB.format(sharded=mode, **vars(given))
                healthy[mode] += iterations(run(server, text, given.steps))
                if given.deaths:
                    struck[mode] += pauses(run(server, text, steps, faults))
    finally:
        server.close()
    print(f"load {os.getloadavg()[0]:.1f}; milliseconds: lower quartile / median / longest, and the ratios of these")
    rows = {"iteration": dict(healthy)}
    names = ("death to next generation", "death to next commit", "death to last copy")
    rows |= {name: {mode: [one[n] for one in found] for mode, found in struck.items()} for n, name in enumerate(names)}
    for *_, last, iterations_since, size in struck["true"]:
        print(f"  copies complete after {1000 * last:.1f} ms, {iterations_since} commits, {size / 1e6:.2f} MB")
    for name, of in rows.items():
        if of and of["false"] and of["true"]:
            whole, parts = ([_quartile(found), statistics.median(found), max(found)] for found in of.values())
            cells = [" / ".join(f"{1000 * each:7.1f}" for each in found) for found in (whole, parts)]
            ratio = " / ".join(f"{a / b:.3f}" for a, b in zip(parts, whole, strict=True)) if all(whole) else ""
            print(f"  {name:<25} of {len(of['true']):<4} replicated {cells[0]}  sharded {cells[1]}  {ratio}")


def _quartile(found: Sequence[float]) -> float:
    return sorted(found)[len(found) // 4]


if __name__ == "__main__":
    main()
