"""A worker that becomes slow: iteration time before, while it is slow under the old plan, and under a new plan.

    python benchmarks/drift.py [--runs N] [--factor F]

Real processes with emulated stages that take exactly the times of their profile. The figures show what a new plan gains
and costs, not the speed of a model. "within" is the number of iterations from the first slow one to the first under the
new plan; the planner runs in a separate process meanwhile. Ratios are to the iterations before the worker is slow;
"simulated" is the ratio of the plans' periods.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
from pathlib import Path

from recycle import Job
from recycle.cli.planner import plan_for_training
from recycle.exec.faults.faults import parse_fault
from recycle.exec.launch.launcher import RunResult, train
from recycle.exec.processes.forkserver import ForkServer

JOB = """
[shape]
pipelines = 3
ranks = 2
micro_batches = 4
[memory]
limit = 4
[planner]
seconds = 1
[model]
kind = "emulated"
seconds_per_unit = 0.02
[train]
clip = 1e9
[membership]
drift = {drift}
"""
SLOW_FROM, STEPS = 8, 48


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=3, help="runs of each kind")
    parser.add_argument("--factor", type=float, default=3.0, help="how many times as long the worker takes")
    arguments = parser.parse_args()
    server = ForkServer("emulated")
    print(
        f"D=3 P=2 m=4, 20 ms per F, I and W; from step {SLOW_FROM} on worker 1.1 takes {arguments.factor:g} times that"
    )
    print("  drift   before     slow       ratio  simulated  within")
    try:
        for _ in range(arguments.runs):
            for drift in (0.0, 0.15):
                print(f"  {'on ' if drift else 'off'}   {one(server, drift, arguments.factor)}", flush=True)
    finally:
        server.close()


def one(server: ForkServer, drift: float, factor: float) -> str:
    """Medians of one run."""
    folder = Path(tempfile.mkdtemp(prefix="recycle-benchmark-"))
    os.environ["RECYCLE_CACHE"] = str(folder / "cache")  # plans of earlier runs must not help
    try:
        result = train(
            Job.from_toml(JOB.format(drift=drift)),
            folder / "run",
            steps=STEPS,
            faults=[parse_fault(f"slow={factor:g}:1.1@{SLOW_FROM}-{STEPS - 1}")],
            planner=plan_for_training,
            server=server,
        )
    finally:
        shutil.rmtree(folder)
    changes = [event for event in result.events if event["kind"] == "replanned"]
    taken = [event for event in changes if "worker 1.1" in event["cause"]]
    since = taken[-1]["step"] if taken else SLOW_FROM
    before, slow = seconds(result, 0, SLOW_FROM), seconds(result, since, STEPS)
    periods = [line["period"] for line in result.metrics]
    simulated = f"{taken[-1]['period'] / periods[SLOW_FROM - 1]:>9.2f}" if taken else "        –"
    within = f"{taken[0]['step'] - SLOW_FROM:>6}" if taken else "     –"
    return f"{before:6.3f} s   {slow:6.3f} s   {slow / before:5.2f}  {simulated}  {within}"


def seconds(result: RunResult, first: int, end: int) -> float:
    """Median time from one commit to the next, of the steps `first` + 2 to `end` - 1, inside generations."""
    lines = result.metrics
    return statistics.median(
        lines[n]["time"] - lines[n - 1]["time"]
        for n in range(first + 2, end)
        if lines[n]["generation"] == lines[n - 1]["generation"]
    )


if __name__ == "__main__":
    main()
