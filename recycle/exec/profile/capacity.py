"""What memory a worker's device has: that of its GPU, or its part of the machine's.

A tenth is left to what no profile counts: the allocator's fragments, communicators, kernels and the process itself.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import torch

from recycle.exec.checkpoint.checkpoint import PART_BYTES
from recycle.exec.transport.plugin import gpu_or_cpu
from recycle.job import Job
from recycle.job.footprint import USABLE

_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
"""Where Linux says how much this container may have, in its two versions of control groups."""


def capacity(job: Job, state: float = 0.0) -> float:
    """Bytes that a worker of `job` may hold where it runs on this machine.

    On a GPU: what is free on it, and what this process has already. On a CPU: an equal part of the memory for each
    process that is started here: all of them, or those of one node where `[membership] store` is an etcd; less what the
    worker needs there to write checkpoints, a copy of its state and a file of it.

    Args:
        state: bytes of what a checkpoint has of the worker.
    """
    device = gpu_or_cpu()
    if device.type == "cuda" and job.model.kind != "emulated":
        free, _ = torch.cuda.mem_get_info(device)
        return USABLE * (free + torch.cuda.memory_reserved(device))
    workers = job.shape.worker_count
    if job.membership.store != "launcher":
        workers = min(workers, job.cluster.workers_per_node)
    copied = state + min(state, PART_BYTES) if job.train.checkpoint_every else 0.0
    return USABLE * machine_memory() / (workers * job.grid.tensor_parallel) - copied


def machine_memory() -> int:
    """Bytes of memory that processes of this machine, or of this container, can have together."""
    found = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    for path in _LIMITS:
        with contextlib.suppress(OSError, ValueError):  # "max" stands for no limit
            found.append(int(path.read_text()))
    return min(found)
