"""The profiler: a Profile from measurements of a job's real stages on this machine.

Stages are measured one after the other in a child process; sums over a stage's hosts and links are measured between
several processes over the job's transport (measure.py). Figures are medians over repeats.
Limits: links are local to this machine, and stages are measured alone.
"""

from __future__ import annotations

import os
import platform
import re
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from importlib import metadata
from itertools import islice
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import msgspec
import numpy as np
import torch

from recycle.child import Child
from recycle.errors import JobError, RunError
from recycle.exec.launch.checks import check_request
from recycle.exec.processes.forkserver import worker_environment
from recycle.exec.profile.measure import PeerFigures, PeerRequest, StageFigures
from recycle.exec.protocol import LINE_SEPARATOR, with_last_lines
from recycle.exec.transport.plugin import name_of, transport_of
from recycle.job import Job, price
from recycle.job.footprint import reducing_bytes
from recycle.job.profile import Link, Profile
from recycle.job.sections import ANALYTIC

MESSAGES = (1 << 10, 1 << 14, 1 << 18, 1 << 20, 1 << 22)
"""Bytes of the messages to which a link is fitted, in addition to the job's own."""
MeasureProgress = Callable[[str, int, int], None]
"""Called with (measurement, completed, total)."""


def measure(job: Job, repeats: int = 20, report: MeasureProgress = lambda *_: None) -> Profile:
    """Measure the profile of `job` on this machine, in seconds and bytes, from `repeats` timings.

    Raises JobError if the job cannot be run here, and RunError, with the process's last lines, if a measurement failed.
    """
    if job.times.profile in (None, ANALYTIC):
        job = price(job)  # with the placement and the split that plans will have
    check_request(job, 1, (), frozenset())
    if job.grid.tensor_parallel != 1:
        raise JobError(
            f"[shape] tensor_parallel: {job.grid.tensor_parallel}, but a stage is measured in one process; measure a"
            " run instead: recycle profile RUN_DIR -o FILE"
        )
    if job.model.kind == "emulated":
        price(job).prices.require(job.shape)
    stages = job.shape.stages
    figures: list[StageFigures] = []
    report("stages", 0, stages)
    with closing(_MeasuringProcess("stages", job, (job.to_toml(), repeats))) as child:
        for line in islice(child.lines(), stages):
            figures.append(msgspec.json.decode(line, type=StageFigures))
            report("stages", len(figures), stages)
    report("links", 0, 1)
    transport, peers = connection_of(job)
    link, sums = _links(job, figures, repeats, transport, peers)
    report("links", 1, 1)
    profile = assemble(job, figures, link, repeats)
    return replace(profile, **sums, measured={**profile.measured, "links": transport})


def assemble(job: Job, figures: Sequence[StageFigures], link: Link, repeats: int) -> Profile:
    """Assemble a profile from the figures of all stages and a link.

    A profile has one `weight_stash` for all stages: the largest share of any stage. If more memory is held between I
    and W than before I, as with recomputation, the profile has both values, but only with Decoupled BackProp.
    """
    is_split = job.planner.decoupled
    activations = [max(stage.activation, stage.stash) if is_split else stage.activation for stage in figures]
    recomputed_from = [stage.activation for stage in figures]
    shares = [stage.stash / held for stage, held in zip(figures, activations, strict=True) if held > 0]
    medians = {name: [median(stage.seconds[name]) for stage in figures] for name in figures[0].seconds}
    spread = {name: [_spread(stage.seconds[name]) for stage in figures] for name in figures[0].seconds}
    return Profile(
        forward=medians["forward"],
        backward_input=medians["backward_input"],
        backward_weight=medians["backward_weight"],
        step=medians["step"],
        latency=link.latency,
        bandwidth=link.bandwidth,
        message=[float(stage.message) for stage in figures],
        activation=activations,
        weight_stash=min(1.0, max(shares, default=1.0)),
        recomputed_from=None if recomputed_from == activations else recomputed_from,
        static=[stage.static for stage in figures],
        workspace=[
            max(stage.workspace, reducing_bytes(job, sum(size // each for size, each in stage.gradients)))
            for stage in figures
        ],
        capacity=min(stage.capacity for stage in figures),
        host_bandwidth=min((rate for stage in figures if (rate := stage.host_bandwidth) is not None), default=None),
        measured={
            **machine(),
            "repeats": repeats,
            "spread": spread,
            "backward": medians["backward"],
            "held_between": [stage.stash for stage in figures],
            "placement": placement(figures),
            "model": msgspec.to_builtins(job.model),
            "micro_batch_size": job.data.micro_batch_size,
            "accumulation": job.train.accumulation,
            "threads": job.train.threads,
        },
    )


def placement(figures: Sequence[StageFigures]) -> dict[str, list[str]]:
    """Names of parameters by the half, "I" or "W", that gives their gradient; `*` for layer numbers."""
    names_by_half: dict[str, set[str]] = {"I": set(), "W": set()}
    for name, half in (entry for stage in figures for entry in stage.placement.items()):
        names_by_half[half].add(re.sub(r"\.\d+\.", ".*.", name))
    return {half: sorted(names) for half, names in names_by_half.items() if names}


def _spread(seconds: Sequence[float]) -> float:
    if len(seconds) < 2 or not median(seconds):
        return 0.0
    low, _, high = quantiles(seconds, n=4)
    return round((high - low) / median(seconds), 4)


def machine() -> dict[str, Any]:
    devices = [torch.cuda.get_device_name(place) for place in range(torch.cuda.device_count())]
    versions = {}
    for name in ("recycle-pipeline", "torch", "megatron-core"):
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return {
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "device": devices[0] if devices else "cpu",
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "versions": versions,
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def fit_link(sizes: Sequence[int], seconds: Sequence[float]) -> Link:
    """Fit latency and bandwidth to message times by least squares of relative errors.

    If a value is out of range, the latency is the smallest message's time, and the largest gives the bandwidth.
    """
    x, t = np.array(sizes, dtype=np.float64), np.array(seconds, dtype=np.float64)
    slope, latency = np.polyfit(x, t, 1, w=1 / t)
    if latency < 0 or slope <= 0:
        latency = float(t.min())
        slope = max(0.0, (t[x.argmax()] - latency) / x.max())
    return Link(float(latency), float(1 / slope) if slope > 0 else None)


def _links(
    job: Job, figures: Sequence[StageFigures], repeats: int, transport: str, peers: int
) -> tuple[Link, dict[str, Any]]:
    shape = job.shape
    wanted = [stage.gradients for stage in figures]
    sums = sorted(set(wanted)) if shape.pipelines > 1 else []
    sizes = sorted({*MESSAGES, max(4, max(stage.message for stage in figures))}) if shape.worker_count > 1 else []
    if not sizes:
        return Link(), {}
    is_sharded = job.train.sharded_optimizer and bool(sums)
    copies = min(peers, job.train.optimizer_copies) if is_sharded else 0
    weights = sorted({stage.weights for stage in figures}) if is_sharded else []
    with ExitStack() as stack:
        store = str(Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="recycle-"))) / "store")
        children = []
        for rank in range(peers):
            timeout = job.membership.transport_timeout
            request = PeerRequest(rank, peers, store, transport, sizes, sums, repeats, timeout, copies, weights)
            children.append(stack.enter_context(closing(_MeasuringProcess("peer", job, request))))
        stage, *_ = [msgspec.json.decode(next(child.lines()), type=PeerFigures) for child in children]
    if not sums:
        return fit_link(sizes, stage.messages), {}
    by_buffers = dict(zip(sums, zip(stage.sums, stage.latencies, strict=True), strict=True))
    measured: dict[str, Any] = {
        "reduce": [by_buffers[buffers][0] for buffers in wanted],
        "reduce_latency": [by_buffers[buffers][1] for buffers in wanted],
    }
    if is_sharded:
        by_weights = dict(zip(weights, stage.gathers, strict=True))
        measured["gather"] = [by_weights[stage.weights] for stage in figures]
    return fit_link(sizes, stage.messages), measured


def connection_of(job: Job) -> tuple[str, int]:
    """The transport to measure over, and the number of processes that it connects on this machine.

    If NCCL has a GPU for two but not for all hosts of a stage, as many as have one are measured. With one GPU all
    share it.
    """
    plugin, hosts = transport_of(job), max(2, job.shape.pipelines)
    try:
        plugin.require_machine(hosts)
    except JobError:
        hosts = min(hosts, len(plugin.gpus()))
        if hosts < 2:
            shared = "gloo" if job.train.sharded_optimizer else "staged"
            return shared, max(2, job.shape.pipelines)
    return name_of(plugin), hosts


class _MeasuringProcess(Child):
    def __init__(self, kind: str, job: Job, request: object) -> None:
        environment = {**transport_of(job).environment, **worker_environment(job.train.threads)}
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 (closed with the process)
        super().__init__("recycle.exec.profile.measure", kind, environment=environment, errors=self._errors)
        self.send(request)

    def lines(self) -> Iterator[bytes]:
        yield from super().lines()
        self._errors.seek(0)
        output = self._errors.read().decode(errors="replace").splitlines()
        raise RunError(with_last_lines("the measuring process ended", LINE_SEPARATOR.join(output[-4:])))

    def close(self) -> None:
        super().close()
        self._errors.close()
