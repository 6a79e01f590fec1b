"""Executed periods against simulated ones: a staggered plan, and the same plan with the barrier.

    python benchmarks/staggered.py [--pipelines D] [--ranks P] [--rounds N] [--steps N] [--milliseconds T]

The default is 32 workers, and in the end 64 that lose one of them.

Real processes, transport, commits and optimizer steps, one process per worker. Emulated stages sleep for the time of
each F, I and W, so that a few cores carry all workers. The executed period is the median time from one iteration of a
worker to the next, over all workers and all iterations after a warm-up. Rounds alternate between the two modes, because
machines are noisy. Executed figures include transfers, reductions, commits and Python; in simulated ones only F, I and
W take time.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import tempfile
import time
from pathlib import Path

from recycle import Job, Schedule, Worker, simulate
from recycle.cli.planner import plan_for_training
from recycle.exec.faults.faults import parse_fault
from recycle.exec.launch.launcher import train
from recycle.exec.processes.forkserver import ForkServer
from recycle.ir.formats.run_trace import read_trace
from recycle.ir.lower import with_barrier
from recycle.solve.planner import plan

WARM_UP = 3
"""Iterations that do not count: the first runs with the barrier, and the pipeline settles in the next ones."""

JOB = """
[shape]
pipelines = {pipelines}
ranks = {ranks}
micro_batches = 8
[memory]
limit = {limit}
[planner]
seconds = {seconds}
[model]
kind = "emulated"
seconds_per_unit = {unit}
[train]
clip = 1e9
"""
CASES = {"fault-free": (), "1.2 and 2.3 dead": (Worker(1, 2), Worker(2, 3))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pipelines", type=int, default=4)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=12, help="iterations per round and mode")
    parser.add_argument("--milliseconds", type=float, default=60.0, help="time of one F, I or W")
    parser.add_argument("--planning", type=float, default=10.0, help="seconds of planning per case")
    arguments = parser.parse_args()
    job = job_of(arguments.pipelines, arguments.ranks, arguments)
    server = ForkServer("emulated")
    try:
        shape = f"D={arguments.pipelines} P={arguments.ranks} m=8"
        print(f"{shape}, F = I = W = {arguments.milliseconds:g} ms: milliseconds per iteration")
        for name, failed in CASES.items():
            staggered = plan(job, failed).schedule
            compare(job, server, name, {"staggered": staggered, "barrier": with_barrier(staggered)}, arguments)
        survive(server, arguments)
    finally:
        server.close()


def job_of(pipelines: int, ranks: int, arguments: argparse.Namespace) -> Job:
    unit, seconds = arguments.milliseconds / 1000, arguments.planning
    return Job.from_toml(JOB.format(pipelines=pipelines, ranks=ranks, limit=ranks, unit=unit, seconds=seconds))


def survive(server: ForkServer, arguments: argparse.Namespace) -> None:
    """64 workers start, run, lose one and end."""
    job = job_of(8, 8, arguments)
    folder = Path(tempfile.mkdtemp(prefix="recycle-benchmark-"))
    begun = time.monotonic()
    try:
        result = train(
            job, folder / "run", steps=8, faults=[parse_fault("kill:3.4@4")], planner=plan_for_training, server=server
        )
    finally:
        shutil.rmtree(folder)
    events = {event["kind"]: event for event in result.events}
    print(f"\n64 workers, 3.4 killed in step 4: {len(result.metrics)} steps, {len(result.digests)} digests;", end=" ")
    print(f"recovered in {events['recovered']['seconds']:.2f} s; {time.monotonic() - begun:.1f} s in all")


def compare(
    job: Job, server: ForkServer, name: str, schedules: dict[str, Schedule], arguments: argparse.Namespace
) -> None:
    """Print a line per round and the medians, for one set of dead workers."""
    unit = arguments.milliseconds
    simulated = {mode: simulate(one, job.profile()).period * unit for mode, one in schedules.items()}
    executed: dict[str, list[float]] = {mode: [] for mode in schedules}
    print(f"\n{name}: simulated {simulated['staggered']:.0f} staggered, {simulated['barrier']:.0f} with the barrier")
    print("  round  staggered  of simulated  barrier  of simulated  staggered/barrier")
    for number in range(arguments.rounds):
        for mode, one in schedules.items():
            executed[mode].append(1000 * executed_seconds(job, server, one, arguments.steps))
        print(line(f"{number:>5}", {mode: found[-1] for mode, found in executed.items()}, simulated), flush=True)
    print(line("median", {mode: statistics.median(found) for mode, found in executed.items()}, simulated))
    print(f"  simulated staggered/barrier: {simulated['staggered'] / simulated['barrier']:.3f}")


def line(title: str, executed: dict[str, float], simulated: dict[str, float]) -> str:
    """The executed periods, with ratios to the simulated ones and to each other."""
    text = f"  {title}"
    for mode, width in (("staggered", 11 if len(title) < 6 else 10), ("barrier", 9)):
        text += f"{executed[mode]:>{width}.1f}  {executed[mode] / simulated[mode]:>12.3f}"
    return text + f"  {executed['staggered'] / executed['barrier']:>17.3f}"


def executed_seconds(job: Job, server: ForkServer, schedule: Schedule, steps: int) -> float:
    """Median period of a run of `steps` iterations."""
    folder = Path(tempfile.mkdtemp(prefix="recycle-benchmark-"))
    try:
        result = train(job, folder / "run", steps=steps, schedule=schedule, server=server)
        trace = read_trace(folder / "run" / "trace.json")
    finally:
        shutil.rmtree(folder)
    assert set(result.modes) == ({"barrier", "staggered"} if schedule.optimizer == "staggered" else {"barrier"})
    period = trace.period(WARM_UP, steps - 1)
    assert period is not None
    return period


if __name__ == "__main__":
    main()
