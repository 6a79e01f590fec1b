"""Memory of a worker's device, and allocations of an action.

A device has its GPU's memory, or a share of the machine's. A tenth is reserved for memory that no profile counts:
fragmentation, communicators, kernels and the process itself.

Limits: counts torch's allocations only, and on a CPU only in the calling thread.
"""

from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import Callable, Iterator
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile

from recycle.exec.checkpoint.checkpoint import PART_BYTES
from recycle.exec.transport.plugin import gpu_or_cpu
from recycle.job import Job
from recycle.job.footprint import USABLE, usable_bytes

_MEMORY = "[memory]"


class Allocated(NamedTuple):
    """Bytes relative to the start of the action: at its end, which may be negative, and at most."""

    kept: int
    peak: int


def allocated_by(action: Callable[[], object], device: torch.device) -> Allocated:
    """Allocations of `action` on `device`; discards its result."""
    return _on_gpu(action, device) if device.type == "cuda" else _on_cpu(action)


def _on_gpu(action: Callable[[], object], device: torch.device) -> Allocated:
    torch.cuda.init()  # type: ignore[no-untyped-call]
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    action()
    peak = torch.cuda.max_memory_allocated(device)
    return Allocated(torch.cuda.memory_allocated(device) - before, peak - before)


def _on_cpu(action: Callable[[], object]) -> Allocated:
    with (
        _without_garbage(),
        profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiler,
    ):
        action()
    assert profiler.profiler is not None
    reported = [event for event in profiler.profiler.kineto_results.events() if event.name() == _MEMORY]
    sizes = [event.nbytes() for event in sorted(reported, key=lambda event: event.start_ns())]
    totals = list(accumulate(sizes, initial=0))
    return Allocated(totals[-1], max(totals))


@contextlib.contextmanager
def _without_garbage() -> Iterator[None]:
    gc.collect()
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
"""Memory limit of the container, in both versions of Linux control groups."""


def capacity(job: Job, state: float = 0.0) -> float:
    """Bytes that a worker of `job` may use on this machine.

    On a GPU, its free memory and the memory of this process. On a CPU, an equal share for each process on this machine,
    less the memory to write checkpoints: a copy of `state` bytes and one file of it.
    """
    device = gpu_or_cpu()
    if device.type == "cuda" and job.model.kind != "emulated":
        free, _ = torch.cuda.mem_get_info(device)
        return usable_bytes(free + torch.cuda.memory_reserved(device))
    workers = job.shape.worker_count
    if job.membership.store != "launcher":
        workers = min(workers, job.cluster.workers_per_node)
    copied = state + min(state, PART_BYTES) if job.train.checkpoint_every else 0.0
    return USABLE * machine_memory() / (workers * job.grid.tensor_parallel) - copied


def machine_memory() -> int:
    limits = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    for path in _LIMITS:
        with contextlib.suppress(OSError, ValueError):  # "max" stands for no limit
            limits.append(int(path.read_text()))
    return min(limits)
