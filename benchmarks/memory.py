"""Memory of worker processes: counted against measured.

    python -m benchmarks.memory [--layers L] [--hidden H] [--sequence S] [--steps N] [--only TEXT] [--buckets N]
    python -m benchmarks.memory --copies K --hosts D [...]          # with a sharded optimizer, K copies over D hosts

A job of D=2 P=2 m=4 runs in worker processes over gloo in every setting: precision x accumulation x staggered steps or
a barrier x recomputation. Measured is a worker's peak from its first iteration on, minus its memory before its stage
was built. Memory is anonymous resident memory (VmHWM of /proc/self/status, reset with /proc/self/clear_refs, without
pages of files). Allocations of 64 KiB or more have pages that are returned when freed (MALLOC_MMAP_THRESHOLD_), so
resident memory is memory in use, apart from Python's. For each of the two stages the worker with the most counts.

The matrix library generates and keeps code for every shape of a product: in bf16 0.5 to 1 MB each, independent of the
matrices' sizes. A separate process that only multiplies matrices of the stage's shapes measures this part, the column
"products".

Counted, and divided by the measured memory without that part:

- profile: the peak that `simulate` gives the worker with the measurements of `recycle profile`;
- analytic: the same with the analytic model, in the pieces that a CPU works in;
- limit: the smallest `[memory] limit` in bytes with which the planner allows the schedule: static bytes, workspace and
  as many activations as `simulate` counts.

With recomputation the backward is one instruction (`decoupled = false`), as its documentation advises.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import os
import platform
import tempfile
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

import torch

from recycle import Job, Link, Profile, Schedule, simulate
from recycle.exec.launch.launcher import train
from recycle.exec.model.build import build_stages
from recycle.exec.processes.forkserver import ForkServer
from recycle.exec.profile.measure import measure_stage
from recycle.exec.profile.profiler import assemble
from recycle.exec.transport.gloo import Gloo
from recycle.exec.transport.groups import GroupsOfGeneration, GroupTransport
from recycle.exec.transport.plugin import TransportSettings
from recycle.ir.families import one_f_one_b, zb_h1
from recycle.ir.lower import lower
from recycle.job import analytic
from recycle.job.footprint import ON_CPU

FOLDER = "RECYCLE_MEASURED_MEMORY"
JOB = """
[shape]
pipelines = {hosts}
ranks = 2
micro_batches = 4
[model]
layers = {layers}
hidden = {hidden}
heads = 8
sequence = {sequence}
vocabulary = 1024
{family}
recompute = "{recompute}"
[train]
precision = "{precision}"
accumulation = "{accumulation}"
clip = 1e9
reduce_buckets = {buckets}
checkpoint_every = 0
{sharded}
[planner]
staggered = {staggered}
decoupled = {decoupled}
ahead = 0
[data]
path = "{text}"
[membership]
transport = "benchmarks.memory:Measured"
start_deadline = 3600.0
warm_up = 600.0
hung_after = 600.0
"""
FAMILIES = {
    "gpt": "",
    "llama": 'kind = "llama"\nconfig = {num_query_groups = 4}',
    "qwen": 'kind = "qwen"\nconfig = {num_query_groups = 4}',
    "mixtral": 'kind = "mixtral"\nconfig = {num_query_groups = 4, num_moe_experts = 4}',
}
"""Family -> its keys of `[model]`."""


class Measured(Gloo):
    """Gloo in a process that notes the most memory that it had, in a file of the folder that the environment names."""

    environment: ClassVar[dict[str, str]] = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}

    def __init__(self, settings: TransportSettings) -> None:
        super().__init__(settings)
        self._before, self._role = _resident()["RssAnon"], ""

    def open(self, groups: GroupsOfGeneration) -> GroupTransport:
        self._role = str(groups.role)
        Path("/proc/self/clear_refs").write_text("5")
        return super().open(groups)

    def end(self) -> None:
        now = _resident()
        peak = now["VmHWM"] - now["RssFile"] - now["RssShmem"] - self._before
        (Path(os.environ[FOLDER]) / self._role).write_text(json.dumps(peak))
        super().end()


def _resident() -> dict[str, int]:
    """Bytes of the lines of /proc/self/status that are about resident memory."""
    lines = (line.split() for line in Path("/proc/self/status").read_text().splitlines())
    return {words[0][:-1]: 1024 * int(words[1]) for words in lines if words[-1:] == ["kB"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--sequence", type=int, default=64)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--family", choices=FAMILIES, default="gpt")
    parser.add_argument("--only", default="", help="settings whose line holds this text")
    parser.add_argument("--buckets", type=int, default=1, help="of each stage's reduce, where nothing is recomputed")
    parser.add_argument("--hosts", type=int, default=2, help="D, the hosts of each stage")
    parser.add_argument("--copies", type=int, default=0, help="of each shard of the optimizer's state; 0: not sharded")
    options = parser.parse_args()
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # torch's profiler tells of every start and stop
    print(f"torch {torch.__version__}, {os.cpu_count()} cores, {platform.machine()}; MB, and counted / measured")
    head = f"{'setting':44}{'stage':>6}{'measured':>10}{'products':>10}{'profile':>9}{'analytic':>9}{'limit':>7}"
    print(head, flush=True)
    with tempfile.TemporaryDirectory() as folder:
        os.environ[FOLDER] = folder
        text = Path(folder) / "text"
        text.write_bytes(Path(__file__).read_bytes())  # a corpus of little memory, which no profile counts
        server = ForkServer("gpt", environment=Measured.environment)
        try:
            table(options, text, server)
        finally:
            server.close()


def table(options: argparse.Namespace, text: Path, server: ForkServer) -> None:
    """Print a line per setting and stage, and at last how far each account is off at most."""
    worst: dict[str, float] = {}
    for setting in itertools.product(("fp32", "bf16"), ("exact", "fast"), (True, False), ("none", "full")):
        precision, accumulation, staggered, recompute = setting
        steps = "staggered" if staggered else "barrier"
        name = f"{precision} {accumulation} {steps} {'recompute' if recompute == 'full' else ''}"
        if options.only not in name:
            continue
        job = Job.from_toml(
            JOB.format(
                family=FAMILIES[options.family],
                layers=options.layers,
                hidden=options.hidden,
                sequence=options.sequence,
                recompute=recompute,
                precision=precision,
                accumulation=accumulation,
                staggered=str(staggered).lower(),
                decoupled=str(recompute == "none").lower(),
                hosts=options.hosts,
                sharded=f"sharded_optimizer = true\noptimizer_copies = {options.copies}" if options.copies else "",
                buckets=options.buckets if recompute == "none" else 1,
                text=text,
            )
        )
        for stage, (measured, counted) in enumerate(compared(job, options.steps, server)):
            products = kept_by_products(job.to_toml(), stage)
            ratios = {by: each / (measured - products) for by, each in counted.items()}
            print(
                f"{name:44}{stage:6}{measured / 1e6:10.1f}{products / 1e6:10.1f}"
                + "".join(f"{ratio:{width}.3f}" for ratio, width in zip(ratios.values(), (9, 9, 7), strict=True)),
                flush=True,
            )
            for by, ratio in ratios.items():
                worst[by] = max(worst.get(by, 0.0), abs(ratio - 1))
    print("farthest from 1: " + ", ".join(f"{by} {100 * share:.1f} %" for by, share in worst.items()))


def compared(job: Job, steps: int, server: ForkServer) -> list[tuple[float, dict[str, float]]]:
    """(bytes measured, bytes counted by each account) of the fullest worker of each stage."""
    optimizer = "staggered" if job.planner.staggered else "barrier"
    family = zb_h1 if job.planner.decoupled else one_f_one_b
    schedule = lower(replace(family(job.shape, optimizer=optimizer), buckets=job.train.reduce_buckets))
    with tempfile.TemporaryDirectory() as folder:
        run = train(job, Path(folder) / "run", steps=steps, schedule=schedule, server=server)
        assert optimizer in run.modes, f"no iteration was {optimizer}: {run.modes}"
    peaks = {str(worker): json.loads((Path(os.environ[FOLDER]) / str(worker)).read_text()) for worker in schedule.live}
    figures = [measure_stage(job, stage, 1) for stage in range(job.shape.stages)]
    by_profile = assemble(job, figures, Link(), 1)
    by_model = analytic.profile(job, job.layers_per_stage(), ON_CPU)
    found = []
    for rank in range(job.shape.ranks):
        counted = {
            "profile": counted_bytes(schedule, by_profile, rank),
            "analytic": counted_bytes(schedule, by_model, rank),
            "limit": least_limit(schedule, by_profile, rank),
        }
        found.append((max(peaks[f"{k}.{rank}"] for k in range(job.shape.pipelines)), counted))
    return found


@cache
def kept_by_products(job: str, stage: int) -> float:
    """Bytes that the matrix library keeps after the products of a stage."""
    environment = os.environ | Measured.environment
    with mock.patch.dict(os.environ, environment), ProcessPoolExecutor(1, get_context("spawn")) as process:
        return process.submit(_multiply, job, stage).result()


@torch.no_grad()
def _multiply(text: str, index: int) -> float:
    torch.set_num_threads(1)
    job = Job.from_toml(text)
    stage: Any = build_stages(job, [index], torch.device("cpu"))[index]
    (sequence, micro_batch, _), dtype = stage.message_spec()
    shapes = {tuple(one.shape) for name, one in stage.parameters.items() if one.dim() == 2 and "embedding" not in name}
    del stage
    gc.collect()
    found = 0.0
    for outputs, inputs in sorted(shapes):
        weight = torch.ones(outputs, inputs).to(dtype)
        given, gradient = (torch.ones(sequence * micro_batch, size).to(dtype) for size in (inputs, outputs))
        before = _resident()["RssAnon"]
        for _ in range(2):
            torch.nn.functional.linear(given, weight)
            gradient @ weight
            gradient.t() @ given
        found += _resident()["RssAnon"] - before
    return found


def counted_bytes(schedule: Schedule, profile: Profile, rank: int) -> float:
    """What `simulate` says that the workers of a rank hold at most."""
    peaks = [peak for peak in simulate(schedule, profile).peak_bytes[rank :: schedule.shape.ranks] if peak is not None]
    return max(peaks)


def least_limit(schedule: Schedule, profile: Profile, rank: int) -> float:
    """Bytes from which on the planner's limit in activations allows what the schedule holds on a rank."""
    shape = schedule.shape
    held = [peak for peak in simulate(schedule, profile).peak_activations[rank :: shape.ranks] if peak is not None]
    fixed = profile.fixed_bytes(range(rank, shape.stages, shape.ranks), shape.stages)
    return fixed + max(held) * max(profile.per_stage("activation", shape.stages)[rank :: shape.ranks])


if __name__ == "__main__":
    main()
