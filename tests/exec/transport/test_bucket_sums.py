"""Sums of buckets go on while their hosts compute."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch.distributed import HashStore  # type: ignore[attr-defined]

from recycle.exec.transport.communicators import Communicators
from recycle.exec.transport.gloo import GlooTransport
from recycle.exec.transport.groups import GroupsOfGeneration, GroupTransport
from recycle.exec.transport.plugin import TransportSettings
from recycle.job.shape import Worker
from tests.exec.accelerator.device import Device
from tests.exec.accelerator.transport import SimulatedTransport

HOSTS = [Worker(k, 0) for k in range(3)]
LATE = 20.0


def simulated(settings: TransportSettings, groups: GroupsOfGeneration) -> GroupTransport:
    return SimulatedTransport(settings, groups, Communicators(), Device(eager=True))


@pytest.mark.parametrize("make", [GlooTransport, simulated])
def test_a_bucket_is_whole_before_anybody_waits_for_it(make: Callable[..., GroupTransport]) -> None:
    """Each host computes on until it sees the sum of its first bucket, and only then has the second one to give."""
    settings: Any = TransportSettings(HashStore())
    groups = [
        GroupsOfGeneration("g", role, HOSTS, {0: HOSTS}, ((4,), torch.float32), over=threading.Event())
        for role in HOSTS
    ]
    transports = [make(settings, one) for one in groups]

    def run(place: int) -> tuple[torch.Tensor, torch.Tensor]:
        transport = transports[place]
        transport.form()
        transport.begin([], 0)
        first, second = torch.full((3,), place + 1.0, dtype=torch.float64), torch.zeros(2, dtype=torch.float64)
        transport.reduce(0, [first], 0)
        deadline = time.monotonic() + LATE
        while not bool((first == 6.0).all()):
            assert time.monotonic() < deadline
            time.sleep(0.001)
        second += first[0] * (place + 1)
        transport.reduce(0, [second])
        return first, second

    with ThreadPoolExecutor(3) as hosts:
        for first, second in hosts.map(run, range(3), timeout=LATE):
            assert first.tolist() == [6.0] * 3
            assert second.tolist() == [36.0] * 2
    for transport in transports:
        transport.close()
