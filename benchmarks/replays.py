"""What replays cost: iterations of a run whose hosts replay each other's work, against those of one without.

    python -m benchmarks.replays [--every N] [--pipelines D] [--ranks P] [--micro-batches M] [--unit SECONDS]
                                 [--repeats R] [--family 1f1b|zb-h1]

Runs on emulated stages, a process per worker, of `every` iterations behind the first few, in turn with and without
replays. Printed is the mean iteration, in which everything was replayed once, over that without (medians of the
repeats), and what the simulator says of both. An iteration's time is that between two commits.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile

from recycle import Job, Schedule
from recycle.exec.launch.launcher import train
from recycle.ir.families import FAMILIES
from recycle.ir.simulate import simulate
from recycle.job import PricedJob, price
from recycle.plans.replaying import rotation_of

SKIPPED = 5
"""Iterations at the beginning, which form and settle."""
JOB = """
[shape]
pipelines = {pipelines}
ranks = {ranks}
micro_batches = {micro_batches}
[memory]
limit = {ranks}
[model]
kind = "emulated"
layers = {ranks}
seconds_per_unit = {unit}
[train]
clip = 1e9
checkpoint_every = 0
trace = "off"
[membership]
drift = 0.0
dead_after = 20.0
hung_after = 20.0
[integrity]
every = {every}
"""


def seconds(job: PricedJob, schedule: Schedule, iterations: int) -> float:
    """Seconds of an iteration on average."""
    with tempfile.TemporaryDirectory() as directory:
        run = train(job, directory, steps=SKIPPED + iterations, schedule=schedule)
    times = [line["time"] for line in run.metrics]
    if unexpected := [event for event in run.events if event["kind"] != "generation"]:
        raise SystemExit(f"something happened, so times mean nothing: {unexpected[0]}")
    return float(times[-1] - times[SKIPPED - 1]) / iterations


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--every", type=int, default=100)
    parser.add_argument("--pipelines", type=int, default=8)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument("--unit", type=float, default=0.02)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--family", default="1f1b", choices=("1f1b", "zb-h1"))
    given = parser.parse_args()

    jobs = {every: price(Job.from_toml(JOB.format(**vars(given) | {"every": every}))) for every in (0, given.every)}
    schedule = FAMILIES[given.family](jobs[0].shape)
    rotation = rotation_of(schedule, jobs[given.every])
    assert rotation is not None
    plain = simulate(schedule, jobs[0].prices).period
    each = [simulate(rotation.schedule(n), jobs[0].prices).period for n in range(given.every)]
    print(
        f"{given.family}, D={given.pipelines} P={given.ranks} m={given.micro_batches}, all replayed in {given.every}"
        f" iterations ({len(rotation.turns)} replays in {sum(one > plain for one in each)} longer iterations):"
        f" simulated {statistics.fmean(each) / plain - 1:.2%} longer on average"
    )
    found: dict[int, list[float]] = {every: [] for every in jobs}
    for _ in range(given.repeats):
        for every, job in jobs.items():
            found[every].append(seconds(job, schedule, given.every))
    usual, replayed = (statistics.median(of) for of in found.values())
    print(
        f"executed: {1000 * usual:.1f} ms without, {1000 * replayed:.1f} ms with, {replayed / usual - 1:.2%} longer"
        f" (medians of {given.repeats}; all: {found})"
    )


if __name__ == "__main__":
    main()
