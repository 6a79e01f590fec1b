"""How long a killed worker stalls training: from SIGKILL to detection, to the next generation, to the next commit.

    python benchmarks/recovery.py [--kills N]

Real processes and real signals on this machine; emulated stages that take no time, so that what is measured is the
membership protocol and not the model. "planned" finds the plan in the library, "unplanned" has the planner's child
make a checked list schedule on the spot; "second kill" loses another worker 50 ms after the first.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
from pathlib import Path

from recycle import Job
from recycle.exec.faults import parse_fault
from recycle.exec.launcher import RunResult, train
from recycle.exec.processes import ForkServer
from recycle.solve.planner import plan_for_training

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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=10, help="runs per case")
    arguments = parser.parse_args()
    server = ForkServer("emulated")
    try:
        print("D=3 P=2 m=2, emulated stages: milliseconds, median (largest)")
        print(f"  {'case':<12}  detected        plan proposed   running again   next commit")
        for name, (ahead, faults) in CASES.items():
            rows = [one(server, ahead, faults) for _ in range(arguments.kills)]
            figures = [f"{statistics.median(column):6.0f} ({max(column):5.0f})" for column in zip(*rows, strict=True)]
            print(f"  {name:<12}" + "".join(f"  {figure:<14}" for figure in figures), flush=True)
    finally:
        server.close()


def one(server: ForkServer, ahead: int, faults: list[str]) -> tuple[float, ...]:
    """Milliseconds from the first SIGKILL to each milestone."""
    folder = Path(tempfile.mkdtemp(prefix="recycle-benchmark-"))
    os.environ["RECYCLE_CACHE"] = str(folder / "cache")  # plans of earlier runs must not help
    try:
        result = train(
            Job.from_toml(JOB.format(ahead=ahead)),
            folder / "run",
            steps=STEPS,
            faults=[parse_fault(fault) for fault in faults],
            planner=plan_for_training,
            server=server,
        )
    finally:
        shutil.rmtree(folder)
    killed = first(result, "fault")
    commit = next(line["time"] for line in result.metrics if line["time"] > first(result, "recovered"))
    proposed = [event["time"] for event in result.events if event["kind"] == "generation"][-1]
    milestones = (first(result, "detected"), proposed, first(result, "recovered"), commit)
    return tuple((milestone - killed) * 1000 for milestone in milestones)


def first(result: RunResult, kind: str) -> float:
    """When an event of this kind happened first, in seconds."""
    return next(float(event["time"]) for event in result.events if event["kind"] == kind)


if __name__ == "__main__":
    main()
