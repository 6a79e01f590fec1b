"""A tiny GPT under many random faults: whether its results are equal, and what it leaves behind.

    python benchmarks/soak.py [--steps N] [--mean STEPS] [--seed N] [--kind gpt|emulated|script]

The kind `script` is examples/megatron_loop/survive.py in a session.

Faults of every kind that ends a worker, and rejoins, at a mean distance of `mean` iterations. Kinds that end the
process are six times as frequent as those that are found by a deadline. The exit status is 1 unless every loss and the
final state of every live worker equal those of the run without faults, bit for bit, and no process, socket, file
descriptor or shared memory remains. Shared memory of other programs that appears meanwhile counts, too. Memory is
sampled at every tenth commit, of the launcher and of the largest worker: the slope is a least-squares line over the
run without its first fifth. The parts of `recycle report` must add up to the wall clock within 0.1 %: all of them to
the run's, and those between the first and the last commit to this process's clock.
"""

from __future__ import annotations

import argparse
import gc
import os
import resource
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from recycle import Job
from recycle.cli.planner import plan_for_training
from recycle.exec.faults.faults import Fault, punish
from recycle.exec.faults.kinds import KINDS
from recycle.exec.launch.launcher import RunResult, train
from recycle.exec.launch.trackers import Observer
from recycle.exec.processes.forkserver import ForkServer
from recycle.runs.read_report import load_report
from recycle.runs.report import Span

JOB = """
[shape]
pipelines = 3
ranks = 2
micro_batches = 2
[memory]
limit = 3
[planner]
seconds = 1
[model]
kind = "{kind}"
layers = 4
hidden = 32
heads = 2
sequence = 16
[train]
clip = 1e9
[membership]
heartbeat = 0.1
dead_after = 4.0
hung_after = 4.0
transport_timeout = 15.0
"""
SCRIPT = Path(__file__).parents[1] / "examples" / "megatron_loop" / "survive.py"
GONE = ("kill", "segfault", "exception", "oom")
FROZEN = tuple(name for name, kind in KINDS.items() if kind.ends and name not in GONE)
MIB = 1 << 20


class Memory(Observer):
    """Samples (step, launcher's MiB, most MiB of a worker, most descriptors and threads of a worker)."""

    def __init__(self) -> None:
        self.samples: list[tuple[float, ...]] = []
        self.commits: list[tuple[float, float]] = []

    def event(self, event: dict[str, Any]) -> None:
        """Say what was found, and by what."""
        if event["kind"] in ("fault", "detected"):
            print(
                f"  {event['time']:8.2f} s  {event.get('fault') or event['worker']} {event.get('cause', '')}",
                flush=True,
            )

    def committed(self, line: dict[str, Any]) -> None:
        """A sample at every tenth commit; of all commits the run's clock and this process's."""
        self.commits.append((line["time"], time.monotonic()))
        if line["step"] % 10 == 0:
            workers = [pid for pid in descendants(os.getpid()) if "/logs/" in _output(pid)]
            rows = [(resident(pid), descriptors(pid), threads(pid)) for pid in workers]
            most = [float(max(column)) for column in zip(*rows, strict=True)] if rows else [0.0] * 3
            self.samples.append((float(line["step"]), resident(os.getpid()), *most))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--mean", type=float, default=5.0, help="iterations between two faults")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kind", choices=("gpt", "emulated", "script"), default="gpt")
    arguments = parser.parse_args()
    is_script = arguments.kind == "script"
    job = Job.from_toml(JOB.format(kind="gpt" if is_script else arguments.kind))
    command = [sys.executable, str(SCRIPT), "--micro-batches=2", "--dropout=0.1"] if is_script else []
    faults = punish(job.shape, arguments.steps, arguments.mean, arguments.seed, kinds=[*GONE * 6, *FROZEN])
    calm, *_ = run(job, arguments.steps, [], command)  # first, so that what a process opens once is open
    before = left()
    began = time.monotonic()
    struck, memory, spans = run(job, arguments.steps, faults, command)
    seconds = time.monotonic() - began
    after = left()
    drawn, found = Counter(fault.kind for fault in faults), Counter(event["kind"] for event in struck.events)
    print(f"{arguments.steps} iterations in {seconds:.0f} s; asked for: {_counts(drawn)}; happened: {_counts(found)}")
    same = bool(struck.digests) and struck.digests.items() <= calm.digests.items() and struck.losses == calm.losses
    print(f"losses and final states: {'identical' if same else 'differ'}")
    failures = [] if same else ["the losses or the final states differ from those of the run without faults"]
    failures += unaccounted(spans, memory.commits)
    for what in before:
        if after[what] - before[what]:
            failures.append(f"left behind: {what} {sorted(after[what] - before[what])}")
    report(np.array(memory.samples))
    for failure in failures:
        print(f"FAILED: {failure}", file=sys.stderr)
    return 1 if failures else 0


def run(job: Job, steps: int, faults: list[Fault], command: Sequence[str] = ()) -> tuple[RunResult, Memory, list[Span]]:
    """One run with its own fork server, and the times of its report."""
    memory = Memory()
    server = ForkServer("script" if command else job.model.kind)
    with tempfile.TemporaryDirectory(prefix="recycle-soak-") as folder:
        try:
            result = train(
                job,
                Path(folder) / "run",
                steps=steps,
                faults=faults,
                planner=plan_for_training,
                observer=memory,
                server=server,
                command=command,
            )
            spans = load_report(Path(folder) / "run").spans
        finally:
            server.close()
    return result, memory, spans


def unaccounted(spans: list[Span], commits: list[tuple[float, float]]) -> list[str]:
    """Print what the parts of a report add up to, and say where that is not the wall clock.

    Args:
        commits: the run's clock and this process's at each.
    """
    (first, _), *_, (last, _) = commits
    between = sum(max(0.0, min(span.end, last) - max(span.start, first)) for span in spans)
    # A commit is seen some milliseconds after it was decided, on a busy machine many: the least of ten tells the time.
    early, late = (min(own - run for run, own in some) for some in (commits[:10], commits[-10:]))
    wall_between = last - first + late - early
    failures = []
    for what, parts, wall in (
        ("of the run", sum(span.seconds for span in spans), spans[-1].end),
        ("between its first commit and its last, by another clock", between, wall_between),
    ):
        print(f"report {what}: parts of {parts:.3f} s, wall clock {wall:.3f} s, {abs(parts / wall - 1):.4%} apart")
        if abs(parts - wall) > 1e-3 * wall:
            failures.append(f"the parts of the report do not add up to the wall clock {what}")
    return failures


def report(samples: np.ndarray) -> None:
    """Print the first and last value of each figure, and the slope of memory."""
    steady = samples[samples[:, 0] >= samples[-1, 0] / 5]
    names = ("launcher, MiB", "largest worker, MiB", "most descriptors of a worker", "most threads of a worker")
    for column, name in enumerate(names, start=1):
        slope = np.polyfit(steady[:, 0], steady[:, column], 1)[0] * 1000 if len(steady) > 1 else 0.0
        values = samples[:, column]
        trend = f"most {values.max():7.1f}, {slope:+.2f} per 1,000 steps"
        print(f"  {name:<29} {values[0]:7.1f} -> {values[-1]:7.1f}, {trend}")


def left() -> dict[str, set[str]]:
    """What a run could leave: descendants of this process, its descriptors, shared memory."""
    gc.collect()
    return {
        "processes": {str(pid) for pid in descendants(os.getpid())},
        "descriptors": {_link(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd")} - {""},
        "shared memory": set(os.listdir("/dev/shm")),
    }


def descendants(pid: int) -> set[int]:
    """All processes below `pid`."""
    parents: dict[int, int] = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            parents[int(name)] = int(Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
    found: set[int] = set()
    frontier = {pid}
    while frontier:
        frontier = {child for child, parent in parents.items() if parent in frontier} - found
        found |= frontier
    return found


def resident(pid: int) -> float:
    """MiB of resident memory; 0 for a process that has just ended."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * resource.getpagesize() / MIB
    except (OSError, IndexError):
        return 0.0


def descriptors(pid: int) -> int:
    """Open file descriptors of a process."""
    try:
        return len(os.listdir(f"/proc/{pid}/fd"))
    except OSError:
        return 0


def threads(pid: int) -> int:
    """Threads of a process."""
    try:
        return len(os.listdir(f"/proc/{pid}/task"))
    except OSError:
        return 0


def _output(pid: int) -> str:
    return _link(f"/proc/{pid}/fd/1")


def _link(path: str) -> str:
    try:
        return os.readlink(path)
    except OSError:
        return ""


def _counts(counts: Counter[str]) -> str:
    return ", ".join(f"{count} {name}" for name, count in sorted(counts.items()))


if __name__ == "__main__":
    sys.exit(main())
