"""Memory and throughput with a sharded optimizer on 256 and 2,048 GPUs: the tables of docs/measurements/sharding.md.

    python -m benchmarks.paper.sharded [--copies N]

Settings are the job files in this folder, priced by the analytic model: 18b on 256 GPUs, 145b on 2,048 instead of
1,536. Each system chooses a shape in both modes, and recycle also how it steps. Nothing is measured on GPUs.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator

from msgspec.structs import replace

from benchmarks.paper.cases import HERE, table
from recycle.job import Job
from recycle.job.footprint import parameter_bytes
from recycle.systems import SYSTEMS
from recycle.systems.comparison import copies_of, references
from recycle.systems.recycle import ReCycle
from recycle.systems.scenario import Scenario

OTHERS = ("hot_spare", "checkpoint_restart", "oobleck", "sample_dropping")
"""Compared systems: two that shard and two that do not."""


def jobs() -> Iterator[tuple[str, Job]]:
    """(setting, job)."""
    yield "18b", Job.load(HERE / "18b.toml")
    large = Job.load(HERE / "145b.toml")
    yield "145b", replace(large, grid=replace(large.grid, pipelines=32, ranks=8, micro_batches=36))


def sharded(job: Job, copies: int) -> Job:
    """The job with a sharded optimizer; with 0 copies as it is."""
    return replace(job, train=replace(job.train, sharded_optimizer=True, optimizer_copies=copies)) if copies else job


def recycled(name: str, setting: Scenario, base: float) -> tuple[list[str], float]:
    """(the row of recycle, its samples per second)."""
    system = ReCycle(setting)
    job, shape = system.job, system.scenario.shape
    state = system.begin(setting.all_nodes)
    reached, weigh = state.rate, parameter_bytes(job)
    fixed = max(job.prices.fixed_bytes([rank], shape.stages) for rank in range(shape.ranks))
    held = min(job.limits or [float("inf")])
    steps = f"staggered, {job.train.undo}" if job.planner.staggered else "together"
    mode = f"{setting.copies} copies" if setting.copies else "replicated"
    ratio = f"{reached / base:.3f}" if base else ""
    figures = f"{weigh.total:.3g}", f"{fixed / 1e9:.1f}", f"{held:.1f}", f"{reached:.1f}", ratio
    return [name, str(setting.gpus), mode, f"{shape.pipelines} x {shape.ranks}", steps, *figures], reached


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--copies", type=int, default=2)
    options = parser.parse_args()
    begun, mine, theirs = time.process_time(), [], []
    for name, job in jobs():
        base = 0.0
        for copies in (0, options.copies):
            setting = Scenario.of(sharded(job, copies))
            row, reached = recycled(name, setting, base)
            mine.append(row)
            base = base or reached
            others = [f"{one.samples_per_second:.1f} ({one.layout})" for one in references(setting)]
            for other in OTHERS:
                system = SYSTEMS[other](setting)
                state = system.begin(setting.all_nodes)
                others.append(f"{state.rate:.1f} ({state.layout})" if state.rate else "does not fit")
                assert copies or not copies_of(system)
            theirs.append([name, row[2], f"{reached:.1f} ({row[3]})", *others])
    head = ["setting", "GPUs", "optimizer state", "D x P", "steps", "bytes per parameter", "GB fixed", "activations"]
    print(table([*head, "samples/s", "of replicated"], mine))
    print(table(["setting", "optimizer state", "recycle", "1F1B", "zero-bubble", *OTHERS], theirs))
    print(f"{time.process_time() - begun:.0f} CPU seconds")


if __name__ == "__main__":
    main()
