"""What replays cost: iterations of a run whose hosts replay each other's work, against those of a run without.

    python -m benchmarks.replays [--every N] [--pipelines D] [--ranks P] [--micro-batches M] [--unit SECONDS]
                                 [--repeats R] [--family 1f1b|zb-h1]

Runs with emulated stages and a process per worker, of `every` iterations after a warm-up, in which all work is replayed
once. The figure is the mean iteration over the mean of iterations without replays: of the same run, in which most have
none, and with `--repeats` also of R runs without replays that alternate with R runs with them (medians). The simulated
ratio follows. The time of an iteration is the time between two commits.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile

from recycle import Job, Schedule
from recycle.exec.launch.launcher import train
from recycle.ir.families import FAMILIES
from recycle.ir.replays import EVERY_ITERATION, Rotation
from recycle.ir.simulate import simulate
from recycle.job import PricedJob, price
from recycle.plans.plan import rotation_of

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


def seconds(job: PricedJob, schedule: Schedule, iterations: int) -> dict[int, float]:
    """Seconds of each iteration after the first ones, by its number."""
    with tempfile.TemporaryDirectory() as directory:
        run = train(job, directory, steps=SKIPPED + iterations, schedule=schedule)
    times = [line["time"] for line in run.metrics]
    if unexpected := [event for event in run.events if event["kind"] != "generation"]:
        raise SystemExit(f"something happened, so times mean nothing: {unexpected[0]}")
    return {step: float(times[step] - times[step - 1]) for step in range(SKIPPED, len(times))}


def beside_themselves(found: dict[int, float], rotation: Rotation) -> str:
    """The mean iteration of a run with replays over the mean of those that neither have nor follow any."""
    usual = [time for step, time in found.items() if {rotation.round_of(step - k) for k in (0, 1)} == {EVERY_ITERATION}]
    mean, error = statistics.fmean(usual), statistics.stdev(usual) / len(usual) ** 0.5
    return (
        f"executed, within a run: {1000 * statistics.fmean(found.values()):.1f} ms on average, {1000 * mean:.1f} ms in"
        f" the {len(usual)} iterations without replays (standard error {error / mean:.2%}),"
        f" {statistics.fmean(found.values()) / mean - 1:.2%} longer"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--every", type=int, default=100)
    parser.add_argument("--pipelines", type=int, default=8)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument("--unit", type=float, default=0.02)
    parser.add_argument("--repeats", type=int, default=0, help="runs without replays, each paired with a run with them")
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
        f" iterations ({len(rotation.slots.worker)} replays in {sum(one > plain for one in each)} longer iterations):"
        f" simulated {statistics.fmean(each) / plain - 1:.2%} longer on average",
        flush=True,
    )
    runs = [seconds(jobs[given.every], schedule, given.every)]
    print(beside_themselves(runs[0], rotation), flush=True)
    if not given.repeats:
        return
    without = []
    for turn in range(given.repeats):
        without.append(statistics.fmean(seconds(jobs[0], schedule, given.every).values()))
        if turn:
            runs.append(seconds(jobs[given.every], schedule, given.every))
    usual, replayed = statistics.median(without), statistics.median(statistics.fmean(run.values()) for run in runs)
    print(
        f"paired with runs without: {1000 * usual:.1f} ms without, {1000 * replayed:.1f} ms with,"
        f" {replayed / usual - 1:.2%} longer (medians of {given.repeats})"
    )


if __name__ == "__main__":
    main()
