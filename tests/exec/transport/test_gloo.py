"""gloo's transport: memory of messages, emulated links, sums of buckets during computation, and sums of shards."""

import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch.distributed import HashStore

from recycle import Shape, Worker, lower
from recycle.exec.transport.base import TransportError
from recycle.exec.transport.gloo import GlooTransport
from recycle.exec.transport.groups import GroupsOfGeneration, GroupTransport
from recycle.exec.transport.outgoing import PacedLinks
from recycle.exec.transport.plugin import TransportSettings
from recycle.ir.families import one_f_one_b
from recycle.ir.instruction import Receive, Send
from recycle.job.footprint import POSTED_AHEAD, SHARD_PIECE
from recycle.plans.shards import owners_of
from tests.exec.accelerator.device import Device
from tests.exec.accelerator.transport import OwnDevice
from tests.waiting import until

PAIR = lower(one_f_one_b(Shape(1, 2, 8)))
FIRST, LAST = PAIR.live
SENDS = [instruction for instruction in PAIR.program(FIRST) if isinstance(instruction, Send)]
RECEIVES = [instruction for instruction in PAIR.program(LAST) if isinstance(instruction, Receive)]
TENSORS = [torch.full((4,), float(place)) for place in range(len(SENDS))]
LATE = 20.0
HOP = 0.1
Pair = dict[Worker, GlooTransport]


@pytest.fixture(params=[0.0])
def pair(request):
    """Both workers of a pipeline, in threads of this process, in iteration 0; messages take the parameter's seconds."""
    store, transports = HashStore(), Pair()
    for role in PAIR.live:
        links = PacedLinks(role, lambda peer: request.param)
        groups = GroupsOfGeneration("g", role, PAIR.live, {}, ((4,), torch.float32), over=threading.Event())
        transports[role] = GlooTransport(TransportSettings(store, links=links), groups)
    with ThreadPoolExecutor(2) as both:
        list(both.map(GlooTransport.form, transports.values(), timeout=LATE))
    for role, transport in transports.items():
        transport.begin(PAIR.program(role), 0)
    yield transports
    for transport in transports.values():
        transport.close()


def test_sent_tensor_is_released_after_its_arrival(pair):
    tensors = [tensor.clone() for tensor in TENSORS]
    kept = [weakref.ref(tensor) for tensor in tensors]
    for send in SENDS:
        pair[FIRST].send(send, tensors.pop(0))
    # The receiver has posted buffers for the first ones only.
    _await_release(kept[:POSTED_AHEAD], pair[FIRST])
    assert all(tensor() is not None for tensor in kept[POSTED_AHEAD:])
    arrived = [pair[LAST].receive(receive)() for receive in RECEIVES]
    assert all(map(torch.equal, arrived, TENSORS))
    _await_release(kept, pair[FIRST])


def _await_release(kept: list[weakref.ref[torch.Tensor]], transport: GlooTransport):
    def are_released():
        transport._drop_sent(-2)  # as the next transfer does
        return all(tensor() is None for tensor in kept)

    until(are_released)


@pytest.mark.parametrize("pair", [HOP], indirect=True)
def test_lane_carries_one_message_at_a_time_for_the_time_of_its_link(pair):
    began, arrived = time.monotonic(), []
    for send, tensor in zip(SENDS, TENSORS, strict=True):
        pair[FIRST].send(send, tensor)
    for receive, tensor in zip(RECEIVES, TENSORS, strict=True):
        assert torch.equal(pair[LAST].receive(receive)(), tensor)
        arrived.append(time.monotonic() - began)
    assert all(seconds >= (place + 1) * HOP for place, seconds in enumerate(arrived))
    stats = pair[FIRST].link_stats()
    while sum(link.sent for link in stats) < len(SENDS):
        assert time.monotonic() < began + LATE
        stats += pair[FIRST].link_stats()
    assert {link.process for link in stats} == {LAST}
    assert all(HOP <= link.seconds <= arrived[-1] for link in stats)
    (waited,) = pair[LAST].link_stats()
    assert (waited.process, waited.sent) == (FIRST, 0)
    assert HOP <= waited.waited <= arrived[-1]
    assert pair[LAST].link_stats() == []


@pytest.mark.parametrize("pair", [HOP], indirect=True)
def test_delayed_message_is_not_sent_after_the_end_of_its_generation(pair):
    pair[FIRST].send(SENDS[0], TENSORS[0])
    pair[FIRST]._over.set()
    with pytest.raises(TransportError, match="the generation is over"):
        pair[FIRST].begin(PAIR.program(FIRST), 2)  # waits for messages of two iterations ago


def simulated(settings: TransportSettings, groups: GroupsOfGeneration) -> GroupTransport:
    return OwnDevice(settings, Device(eager=True))._form(groups)


def hosts_of_a_stage(count: int, make=GlooTransport, copies=0):
    """The transports of hosts of one stage, with `copies` owners of each shard."""
    hosts = [Worker(k, 0) for k in range(count)]
    settings = TransportSettings(HashStore())
    owners = {0: owners_of(hosts, hosts, copies)} if copies else {}
    return [
        make(
            settings,
            GroupsOfGeneration(
                "g", role, hosts, {0: hosts}, ((4,), torch.float32), over=threading.Event(), owners=owners
            ),
        )
        for role in hosts
    ]


@pytest.mark.parametrize("make", [GlooTransport, simulated])
def test_bucket_is_summed_before_its_hosts_wait_for_it(make):
    """Each host computes on until it sees the sum of its first bucket, and only then has the second one."""
    transports = hosts_of_a_stage(3, make)

    def run(place):
        transport = transports[place]
        transport.form()
        transport.begin([], 0)
        first, second = torch.full((3,), place + 1.0, dtype=torch.float64), torch.zeros(2, dtype=torch.float64)
        transport.reduce(0, [first], 0)
        until(lambda: bool((first == 6.0).all()))
        second += first[0] * (place + 1)
        transport.reduce(0, [second])
        return first, second

    with ThreadPoolExecutor(3) as threads:
        for first, second in threads.map(run, range(3), timeout=LATE):
            assert first.tolist() == [6.0] * 3
            assert second.tolist() == [36.0] * 2
    for transport in transports:
        transport.close()


class Counting:
    """A group that counts the bytes that it sends."""

    def __init__(self, group):
        self._group, self.sent = group, 0

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int):
        self.sent += sum(tensor.nbytes for tensor in tensors)
        return self._group.send(tensors, peer, tag)

    def __getattr__(self, name: str):
        return getattr(self._group, name)


@pytest.mark.parametrize(("hosts", "copies"), [(2, 1), (3, 2), (4, 3)])
@pytest.mark.parametrize(("dtype", "buckets"), [(torch.float64, 1), (torch.float32, 2)])
def test_owners_get_sums_and_hosts_get_parameters_in_the_bytes_of_the_formulas(hosts, copies, dtype, buckets):
    every = [Worker(k, 0) for k in range(hosts)]
    owners = owners_of(every, every, copies)
    size = 3 * SHARD_PIECE + 1000  # of a shard: four pieces
    generator = torch.Generator().manual_seed(7)
    addends = torch.randint(-(2**20), 2**20, (hosts, hosts, size), generator=generator).to(dtype)
    transports = hosts_of_a_stage(hosts, copies=copies)

    def run(place):
        transport = transports[place]
        transport.form()
        group = transport._sums[0] = Counting(transport._sums[0])
        sums = addends[place].clone()
        if buckets == 1:
            transport.reduce_scatter(0, [list(sums)])
        else:  # the first bucket has parts of two shards, and the last one of all but the first
            transport.reduce_scatter(0, [[sums[0], sums[1, :100], *sums[2:, :0]]], 0)
            transport.reduce_scatter(0, [[sums[0, :0], sums[1, 100:], *sums[2:]]])
        reduced = group.sent
        weights = torch.full((hosts, size), -1.0, dtype=torch.bfloat16)
        for number, owners_of_shard in enumerate(owners):
            if every[place] in owners_of_shard:
                weights[number] = number + 1.0
        transport.gather(0, list(weights))
        return sums, weights, reduced, group.sent - reduced

    with ThreadPoolExecutor(hosts) as threads:
        results = list(threads.map(run, range(hosts), timeout=60.0))
    for place, (sums, weights, reduced, gathered) in enumerate(results):
        for number, owners_of_shard in enumerate(owners):
            if every[place] in owners_of_shard:
                assert torch.equal(sums[number], addends.sum(0)[number])
            assert bool((weights[number] == number + 1.0).all())
        assert reduced == dtype.itemsize * size * (hosts - 1 + copies - 1)
        assert gathered == 2 * size * (hosts - copies)
    for transport in transports:
        transport.close()
