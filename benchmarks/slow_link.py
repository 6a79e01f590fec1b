"""One link becomes four times slower: throughput before, under the old plan, and under a new plan.

    python benchmarks/slow_link.py [--runs N] [--factor F] [--link UNITS]

Real processes with emulated stages, whose computations and messages take exactly the times of their profile. In the
third kind of run the link is slow from the start and the job's profile states it: the plan made for the true times.
"throughput" is that of the iterations after the change, over that of the third kind in the same round; "within" counts
the iterations from the first slow one to the first under the new plan. "simulated" is the period of the plan in use, in
units, with the true times.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
from pathlib import Path

from recycle import Job, Profile, Schedule, Worker, simulate
from recycle.cli.planner import plan_for_training
from recycle.exec.faults.faults import parse_fault
from recycle.exec.launch.launcher import RunResult, train
from recycle.exec.processes.forkserver import ForkServer

JOB = """
[shape]
pipelines = 4
ranks = 4
micro_batches = 6
[times]
{times}
[memory]
limit = 8
[planner]
seconds = 2
[model]
kind = "emulated"
seconds_per_unit = {unit}
[train]
clip = 1e9
[membership]
drift = {drift}
"""
SLOW_FROM, BEHIND, STEPS = 8, 12, 40
"""First slow iteration; how many of these do not count yet; iterations of a run."""
ENDS = Worker(1, 0), Worker(1, 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=3, help="rounds of one run of each kind")
    parser.add_argument("--factor", type=float, default=4.0, help="how many times as long messages over the link take")
    parser.add_argument("--link", type=float, default=0.5, help="of a message, in the time of an F")
    parser.add_argument("--unit", type=float, default=0.04, help="seconds of an F")
    arguments = parser.parse_args()
    usual = Profile(latency=arguments.link)
    shape = Job.from_toml(JOB.format(times="", unit=0, drift=0)).shape
    true = usual.with_slow_link(shape, *ENDS, arguments.factor)
    server = ForkServer("emulated")
    print(
        f"D=4 P=4 m=6, {1000 * arguments.unit:g} ms per F, I and W, {1000 * arguments.unit * arguments.link:g} ms per"
        f" message; from step {SLOW_FROM} on {arguments.factor:g} times that between {ENDS[0]} and {ENDS[1]}"
    )
    print("  links              seconds per iteration   throughput   simulated   within")
    try:
        for _ in range(arguments.runs):
            runs = {
                "known": run(server, true, 0.0, arguments, None),
                "unwatched": run(server, usual, 0.0, arguments, arguments.factor),
                "watched": run(server, usual, 0.15, arguments, arguments.factor),
            }
            best = seconds(runs["known"])
            for name, result in runs.items():
                print(f"  {name:<9} {line(result, best, true)}", flush=True)
                assert result.directory is not None
                shutil.rmtree(result.directory.parent)
    finally:
        server.close()


def run(
    server: ForkServer, profile: Profile, drift: float, arguments: argparse.Namespace, factor: float | None
) -> RunResult:
    """One run of a job with this profile; the link is slow by a fault if there is a factor."""
    folder = Path(tempfile.mkdtemp(prefix="recycle-benchmark-"))
    os.environ["RECYCLE_CACHE"] = str(folder / "cache")  # plans of earlier runs must not help
    profile.save(folder / "profile.json")
    job = Job.from_toml(JOB.format(times=f'profile = "{folder}/profile.json"', unit=arguments.unit, drift=drift))
    fault = f"slow-link={factor}:{ENDS[0]},{ENDS[1]}@{SLOW_FROM}-{STEPS - 1}"
    return train(
        job,
        folder / "run",
        steps=STEPS,
        faults=[parse_fault(fault)] if factor else [],
        planner=plan_for_training,
        server=server,
    )


def line(result: RunResult, best: float, true: Profile) -> str:
    """Figures of one run, given the seconds of the run whose links were known."""
    slow, pair = seconds(result), "messages from {} to {}".format(*ENDS)
    changes = [event for event in result.events if event["kind"] == "replanned" and pair in event["cause"]]
    assert result.directory is not None
    plan = Schedule.load(result.directory / "plans" / f"{result.metrics[-1]['plan']}.json")
    within = f"{changes[0]['step'] - SLOW_FROM:>6}" if changes else "     –"
    return f"{slow:>26.3f} s   {best / slow:>10.3f}   {simulate(plan, true).period:>9g}   {within}"


def seconds(result: RunResult) -> float:
    """Median time from one commit to the next, of the iterations that count, inside generations."""
    lines = result.metrics
    return statistics.median(
        lines[n]["time"] - lines[n - 1]["time"]
        for n in range(SLOW_FROM + BEHIND, STEPS)
        if lines[n]["generation"] == lines[n - 1]["generation"]
    )


if __name__ == "__main__":
    main()
