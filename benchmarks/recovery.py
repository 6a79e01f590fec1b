"""How long a fault stalls training: until it is detected, until the next generation, until the next commit.

    python benchmarks/recovery.py [--kills N] [--faults N] [--kinds KIND,…] [--drains N]

Real processes and real signals on this machine, with emulated stages that take no time, so that the figures are those
of the membership protocol. "planned" finds the plan in the library; for "unplanned" the planner's child makes a checked
list schedule immediately; "second kill" loses another worker 50 ms after the first.

The second table strikes each kind many times in one run, with the default deadlines, a rejoin in between, and stages
that take 10 ms for each F, I and W. Limits: from the fault to its detection 0.2 s if the process is gone, and 5 s if it
is frozen, hung or cut off; from there to the next commit the simulated makespan of the new plan plus 1 s. The exit
status is 1 if a median misses its limit.

The third table alternately kills a worker and asks it to leave (SIGTERM) in one run, each at a random instant, with a
rejoin in between. It shows the costs from `recycle report`: from the last commit before to the start of the next
generation, and how many micro-batches were started in vain. Limits for workers that leave: half the median of a kill,
no such micro-batch, and the losses and final states of a calm run.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import re
import shutil
import statistics
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from recycle import Job
from recycle.cli.planner import plan_for_training
from recycle.exec.faults.faults import parse_fault
from recycle.exec.launch.launcher import RunResult, train
from recycle.exec.processes.forkserver import ForkServer
from recycle.runs.logs import LineTail, new_iterations, trace_logs
from recycle.runs.read_report import load_report
from recycle.runs.report import RunReport, TimePart

JOB = """
[shape]
pipelines = 3
ranks = 2
micro_batches = 2
[memory]
limit = 3
[planner]
seconds = 1
ahead = {ahead}
[model]
kind = "emulated"
"""
CASES = {
    "planned": (2, ["kill:1.1@20"]),
    "unplanned": (0, ["kill:1.1@20"]),
    "second kill": (2, ["kill:1.1@20", "kill=0.05:0.0@20"]),
}
STEPS = 24
TIMED_JOB = (
    JOB
    + """
seconds_per_unit = {seconds}
[train]
clip = 1e9
"""
)
UNIT_SECONDS = 0.01
GONE_SECONDS, FROZEN_SECONDS, AGAIN_SECONDS = 0.2, 5.0, 1.0
GONE = ("kill", "segfault", "exception", "oom")
FROZEN = ("stop", "hang", "stall", "cut")
APART_DRAINS, DRAINED_UNIT_SECONDS, ITERATION_SECONDS = 10, 0.02, 0.25
"""Iterations from one change of the third table to the next, F = I = W, and about how long an iteration takes."""
FORWARD = re.compile(r"\(?[0-9]+F[0-9]")
APART = 4
"""Iterations from one fault to the next: the worker is away for two, back in the third, staggered in the fourth."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=10, help="runs per case of the first table; 0 for none")
    parser.add_argument("--faults", type=int, default=50, help="faults per kind of the second table; 0 for none")
    parser.add_argument("--drains", type=int, default=50, help="SIGTERMs of the third table, and kills; 0 for none")
    parser.add_argument("--kinds", default=",".join((*GONE, *FROZEN)), help="of the second table")
    arguments = parser.parse_args()
    server = ForkServer("emulated")
    missed = False
    try:
        if arguments.kills:
            print("D=3 P=2 m=2, emulated stages: milliseconds, median (largest)")
            print(f"  {'case':<12}  detected        plan proposed   running again   next commit")
        for name, (ahead, faults) in CASES.items() if arguments.kills else ():
            rows = [one(server, ahead, faults) for _ in range(arguments.kills)]
            figures = [f"{statistics.median(column):6.0f} ({max(column):5.0f})" for column in zip(*rows, strict=True)]
            print(f"  {name:<12}" + "".join(f"  {figure:<14}" for figure in figures), flush=True)
        if arguments.faults:
            print(
                f"\n{arguments.faults} faults of each kind, F = I = W = {1000 * UNIT_SECONDS:g} ms: seconds, p50 / p99"
            )
            print(f"  {'kind':<10}  fault to detection    limit  detection to next commit  limit (makespan + 1 s)")
        for kind in arguments.kinds.split(",") if arguments.faults else ():
            missed |= by_kind(server, kind, arguments.faults)
        if arguments.drains:
            missed |= kills_and_drains(server, arguments.drains)
    finally:
        server.close()
    return 1 if missed else 0


def by_kind(server: ForkServer, kind: str, count: int) -> bool:
    """Strike one kind many times; print its row, and return whether a median misses its limit."""
    strikes = [f"{kind}{'=0.0' if kind == 'cut' else ''}:0.1@{APART * (place + 1)}" for place in range(count)]
    back = [f"rejoin:0.1@{APART * (place + 1) + 2}" for place in range(count)]
    result = run(server, TIMED_JOB.format(ahead=2, seconds=UNIT_SECONDS), [*strikes, *back], APART * (count + 1) + 1)
    rows = []
    for strike in strikes:
        struck = next(event["time"] for event in result.events if event.get("fault") == strike)
        found = next(e["time"] for e in result.events if e["kind"] == "detected" and e["time"] >= struck)
        line = next(line for line in result.metrics if line["time"] > found and line["live_workers"] == 5)
        assert line["mode"] == "barrier", "the first of a generation, so its period is the plan's makespan"
        rows.append((found - struck, line["time"] - found, line["period"] * UNIT_SECONDS + AGAIN_SECONDS))
    detected, again, limits = (sorted(column) for column in zip(*rows, strict=True))
    limit = GONE_SECONDS if kind in GONE else FROZEN_SECONDS
    print(
        f"  {kind:<10}  {median(detected):6.3f} / {last(detected):6.3f}  {limit:9.1f}"
        f"     {median(again):6.3f} / {last(again):6.3f}  {limits[0]:14.2f}",
        flush=True,
    )
    return median(detected) > limit or median(again) > limits[0]


def kills_and_drains(server: ForkServer, count: int, seed: int = 0) -> bool:
    """Kill worker 0.1 and tell it to leave in turn; print what each cost, and return whether a limit is missed."""
    draw, names = random.Random(seed), ("kill", "drain") * count
    struck = [APART_DRAINS * (place + 1) for place in range(2 * count)]
    faults = [
        f"{kind}={draw.random() * ITERATION_SECONDS:.4f}:0.1@{step}" for kind, step in zip(names, struck, strict=True)
    ]
    back = [f"rejoin:0.1@{step + APART_DRAINS - 4}" for step in struck]
    job, steps = TIMED_JOB.format(ahead=2, seconds=DRAINED_UNIT_SECONDS), APART_DRAINS * (2 * count + 1)
    reports: list[tuple[RunReport, Mapping[tuple[int, int], int]]] = []
    result = run(server, job, [*faults, *back], steps, lambda folder: reports.append(reported(folder)))
    calm = run(server, job, [], steps)
    ((report, begun),) = reports
    kinds = {"failure": "kill", "drain": "drain"}
    changes = {kind: [one for one in report.changes if kinds.get(one.kind) == kind] for kind in kinds.values()}
    counted = {line["step"]: line["generation"] for line in result.metrics}
    print(f"\n{count} kills and {count} SIGTERMs of worker 0.1 at random instants of iterations of")
    print(f"{ITERATION_SECONDS:g} s: milliseconds, median (largest)")
    print("  kind     how many  until the next generation runs  of it redone  micro-batches in vain")
    for kind, found in changes.items():
        near = {step for change in found for step in range(change.step - 3, change.step + 1)}
        vain = sum(n for (g, step), n in begun.items() if step in near and counted[step] != g)
        pauses = [1000 * change.seconds for change in found]
        redone = statistics.median(1000 * change.costs.get(TimePart.REDONE, 0.0) for change in found)
        pause = f"{statistics.median(pauses):10.0f} ({max(pauses):5.0f})"
        print(f"  {kind:<7}  {len(found):8}  {pause} {redone:26.0f} {vain:22}")
    kill, drain = (statistics.median(change.seconds for change in changes[kind]) for kind in ("kill", "drain"))
    ratio = drain / kill
    same = result.losses == calm.losses and result.digests == calm.digests
    print(
        f"  ratio {ratio:.2f} (limit 0.50); losses and final states {'identical' if same else 'DIFFERENT'}", flush=True
    )
    near = {step for change in changes["drain"] for step in range(change.step - 3, change.step + 1)}
    vain = sum(n for (g, step), n in begun.items() if step in near and counted[step] != g)
    return ratio > 0.5 or vain > 0 or not same or len(changes["drain"]) < count


def reported(folder: Path) -> tuple[RunReport, Mapping[tuple[int, int], int]]:
    """A run's report, and (generation, step) -> how many forwards of it were logged."""
    begun: Counter[tuple[int, int]] = Counter()
    shape = Job.of_run(folder).shape
    for one in (one for path in trace_logs(folder) for one in new_iterations(LineTail(path), shape)):
        begun[one.generation, one.step] += sum(FORWARD.match(text) is not None for text, _, _ in one.instructions)
    return load_report(folder), begun


def median(ordered: Sequence[float]) -> float:
    """The 50th percentile."""
    return statistics.median(ordered)


def last(ordered: Sequence[float]) -> float:
    """The 99th percentile: with up to 100 figures the largest."""
    return ordered[math.ceil(0.99 * len(ordered)) - 1]


def run(
    server: ForkServer,
    job: str,
    faults: Sequence[str],
    steps: int,
    look: Callable[[Path], object] = lambda folder: None,
) -> RunResult:
    """One run through these faults, whose directory `look` gets; plans of earlier runs do not help."""
    folder = Path(tempfile.mkdtemp(prefix="recycle-benchmark-"))
    os.environ["RECYCLE_CACHE"] = str(folder / "cache")
    try:
        result = train(
            Job.from_toml(job),
            folder / "run",
            steps=steps,
            faults=[parse_fault(fault) for fault in faults],
            planner=plan_for_training,
            server=server,
        )
        look(folder / "run")
        return result
    finally:
        shutil.rmtree(folder)


def one(server: ForkServer, ahead: int, faults: list[str]) -> tuple[float, ...]:
    """Milliseconds from the first SIGKILL to each milestone."""
    result = run(server, JOB.format(ahead=ahead), faults, STEPS)
    killed = first(result, "fault")
    commit = next(line["time"] for line in result.metrics if line["time"] > first(result, "recovered"))
    proposed = [event["time"] for event in result.events if event["kind"] == "generation"][-1]
    milestones = (first(result, "detected"), proposed, first(result, "recovered"), commit)
    return tuple((milestone - killed) * 1000 for milestone in milestones)


def first(result: RunResult, kind: str) -> float:
    """When an event of this kind happened first, in seconds."""
    return next(float(event["time"]) for event in result.events if event["kind"] == kind)


if __name__ == "__main__":
    sys.exit(main())
