"""gloo's transport: what it holds in memory, sums of buckets that go on while hosts compute, and sums of shards."""

from __future__ import annotations

import os
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch.distributed import HashStore  # type: ignore[attr-defined]

from recycle.exec.transport.base import TransportError
from recycle.exec.transport.communicators import Communicators
from recycle.exec.transport.gloo import GlooTransport
from recycle.exec.transport.groups import GroupsOfGeneration, GroupTransport
from recycle.exec.transport.plugin import TransportSettings
from recycle.ir.families import one_f_one_b
from recycle.ir.instruction import Receive, Send
from recycle.ir.lower import lower
from recycle.job.footprint import POSTED_AHEAD, SHARD_PIECE
from recycle.job.shape import Shape, Worker
from recycle.plans.shards import owners_of
from tests.exec.accelerator.device import Device
from tests.exec.accelerator.transport import SimulatedTransport

PAIR = lower(one_f_one_b(Shape(1, 2, 8)))
FIRST, LAST = PAIR.live
LATE = 20.0


@pytest.fixture
def transports() -> Iterator[dict[Worker, GlooTransport]]:
    """Both workers of a pipeline, in threads of this process, in iteration 0."""
    settings = TransportSettings(HashStore())
    made = {
        role: GlooTransport(
            settings,
            GroupsOfGeneration(
                "g", role, PAIR.live, {}, ((4,), torch.float32), PAIR.program(role), over=threading.Event()
            ),
        )
        for role in PAIR.live
    }
    with ThreadPoolExecutor(2) as both:
        list(both.map(GlooTransport.form, made.values(), timeout=LATE))
    for role, transport in made.items():
        transport.begin(PAIR.program(role), 0)
    yield made
    for transport in made.values():
        transport.close()


def test_a_sent_tensor_is_let_go_of_once_it_has_arrived(transports: dict[Worker, GlooTransport]) -> None:
    sends = [one for one in PAIR.program(FIRST) if isinstance(one, Send)]
    receives = [one for one in PAIR.program(LAST) if isinstance(one, Receive)]
    tensors = [torch.full((4,), float(place)) for place in range(len(sends))]
    kept = [weakref.ref(tensor) for tensor in tensors]
    for send in sends:
        transports[FIRST].send(send, tensors.pop(0))
    # The receiver has posted buffers for the first ones; nobody has room for the others yet.
    _until_gone(kept[:POSTED_AHEAD], transports[FIRST])
    assert all(tensor() is not None for tensor in kept[POSTED_AHEAD:])
    arrived = [float(transports[LAST].receive(receive)()[0]) for receive in receives]
    assert arrived == [float(place) for place in range(len(sends))]
    _until_gone(kept, transports[FIRST])


@pytest.mark.parametrize("end", ["source", "receiver"])
def test_a_wait_for_a_state_ends_with_its_generation_though_no_socket_says_so(
    end: str, transports: dict[Worker, GlooTransport]
) -> None:
    """As where a transfer is posted in the moment in which sockets are shut."""
    role, peer = (FIRST, LAST) if end == "source" else (LAST, FIRST)
    transport, over = transports[role], transports[role]._over
    act = transport.send_state if end == "source" else transport.receive_state
    with ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(act, peer, [torch.zeros(4)])
        try:
            with pytest.raises(TimeoutError):
                waiting.result(0.2)
            over.set()
            with pytest.raises(TransportError, match="the generation is over"):
                waiting.result(LATE)
        finally:  # or its thread would never end
            for connection in transport._connections:
                with suppress(OSError), socket.socket(fileno=os.dup(connection.descriptor)) as one:
                    one.shutdown(socket.SHUT_RDWR)


def _until_gone(kept: list[weakref.ref[torch.Tensor]], transport: GlooTransport) -> None:
    deadline = time.monotonic() + LATE
    while any(tensor() is not None for tensor in kept):
        assert time.monotonic() < deadline
        time.sleep(0.001)
        transport._drop_sent(-2)  # as the next transfer does


HOSTS = [Worker(k, 0) for k in range(3)]


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
