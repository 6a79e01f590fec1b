"""Sums and gathers of shards over real gloo groups: the bits, who has them, and the bytes that are sent."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch.distributed import HashStore  # type: ignore[attr-defined]

from recycle.exec.transport.gloo import GlooTransport
from recycle.exec.transport.groups import GroupsOfGeneration
from recycle.exec.transport.plugin import TransportSettings
from recycle.job.footprint import SHARD_PIECE
from recycle.job.shape import Worker
from recycle.plans.shards import owners_of

SECONDS = 60.0


class Counting:
    """A group that counts the bytes that it is given to send."""

    def __init__(self, group: Any) -> None:
        self._group, self.sent = group, 0

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int) -> Any:
        self.sent += sum(tensor.nbytes for tensor in tensors)
        return self._group.send(tensors, peer, tag)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._group, name)


@pytest.mark.parametrize(("hosts", "copies"), [(2, 1), (3, 2), (4, 2), (4, 3)])
@pytest.mark.parametrize(("dtype", "in_buckets"), [(torch.float64, False), (torch.float32, True)])
def test_owners_have_the_sum_everybody_the_parameters_and_the_bytes_are_the_formulas(
    hosts: int, copies: int, dtype: torch.dtype, in_buckets: bool
) -> None:
    every = [Worker(k, 0) for k in range(hosts)]
    owners = owners_of(every, every, copies)
    size = 3 * SHARD_PIECE + 1000  # of a shard: four pieces
    generator = torch.Generator().manual_seed(7)
    addends = torch.randint(-(2**20), 2**20, (hosts, hosts * size), generator=generator).to(dtype)
    wanted = torch.stack([*addends]).sum(0)
    settings: Any = TransportSettings(HashStore())
    transports = [
        GlooTransport(
            settings,
            GroupsOfGeneration(
                "g", role, every, {0: every}, ((4,), torch.float32), over=threading.Event(), owners={0: owners}
            ),
        )
        for role in every
    ]

    def shards(flat: torch.Tensor) -> Sequence[torch.Tensor]:
        return torch.split(flat, size)

    def clipped(parts: Sequence[torch.Tensor], begin: int, end: int) -> list[torch.Tensor]:
        bounds = [(max(0, begin - place * size), max(0, min(size, end - place * size))) for place in range(len(parts))]
        return [part[low:high] for part, (low, high) in zip(parts, bounds, strict=True)]

    def run(place: int) -> tuple[torch.Tensor, torch.Tensor, int, int]:
        transport = transports[place]
        transport.form()
        group = transport._sums[0] = Counting(transport._sums[0])
        sums = addends[place].clone()
        first = hosts * size // 3
        if in_buckets:
            transport.reduce_scatter(0, [clipped(shards(sums), 0, first)], 0)
            transport.reduce_scatter(0, [clipped(shards(sums), first, hosts * size)])
        else:
            transport.reduce_scatter(0, [shards(sums)])
        reduced = group.sent
        weights = torch.full((hosts * size,), -1.0, dtype=torch.bfloat16)
        for number, mine in enumerate(owners):
            if every[place] in mine:
                shards(weights)[number].fill_(number + 1.0)
        transport.gather(0, shards(weights))
        return sums, weights, reduced, group.sent - reduced

    with ThreadPoolExecutor(hosts) as threads:
        found = list(threads.map(run, range(hosts), timeout=SECONDS))
    for place, (sums, weights, reduced, gathered) in enumerate(found):
        for number, mine in enumerate(owners):
            if every[place] in mine:
                assert torch.equal(shards(sums)[number], shards(wanted)[number])
            assert bool((shards(weights)[number] == number + 1.0).all())
        assert reduced == dtype.itemsize * size * (hosts - 1 + copies - 1)
        assert gathered == 2 * size * (hosts - copies)
    for transport in transports:
        transport.close()
