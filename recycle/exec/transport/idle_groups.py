"""The backend of the groups that megatron-core wants to exist and never uses: on CPUs, gloo's on one shared device.

Its `parallel_state` makes some twenty groups. Each of torch's own gloo groups has a device of its own, whose thread
wakes up a hundred times a second; on two cores those threads take 3 % of the time that training has, and setting the
groups up takes 46 ms instead of 6.
"""

from __future__ import annotations

from datetime import timedelta
from functools import cache
from typing import Any

import torch
import torch.distributed as dist

NAME = "idle_gloo"


@cache
def backend_of(device: torch.device) -> str:
    """The name of the backend for groups of one process whose tensors lie on `device`; made known to torch."""
    if device.type != "cpu":
        return "cpu:gloo,cuda:nccl"
    dist.Backend.register_backend(NAME, _make, devices=["cpu"])
    return NAME


def _make(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    options._devices = [_device()]
    options._timeout = timeout
    return gloo(store, rank, size, options)


@cache
def _device() -> Any:
    gloo: Any = dist.ProcessGroupGloo
    return gloo.create_device(hostname="127.0.0.1")
