"""Gloo transport: one generation's process groups on a separate store prefix.

One group joins all live workers for transfers, and one group per stage joins its hosts for sums. With tensor
parallelism each tensor rank has these groups, and another group joins the processes of each worker.

A wait that times out ends all operations of its group with an error, and closes its connections, so peers notice it
too. That is how a generation ends; aborting a group ends no wait, and shutting its sockets not every one. Forming a
group whose member died ends only after a timeout. Forming and sums run in a thread that is abandoned. gloo reports a
delivery only to a wait, so a thread per lane waits for sent messages, in order.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore

from recycle.errors import first_line
from recycle.exec.ports import MOST_CHOICES, Ports, exhausted, refusal_of_gloo
from recycle.exec.transport.base import Exchanging, LinkStats, Shapes, TransportError, Unreachable
from recycle.exec.transport.connections import Connection, give_up_after, listening_ports, open_sockets, own_connections
from recycle.exec.transport.formation import FormingStore
from recycle.exec.transport.groups import STATE_TAG, GroupsOfGeneration, GroupTransport, received_parts
from recycle.exec.transport.outgoing import OutgoingLane, PendingSend
from recycle.exec.transport.plugin import TransportPlugin, TransportSettings, computes_on_gpu
from recycle.exec.transport.sharded_sums import ShardedSums
from recycle.ir.instruction import Instruction
from recycle.job import Job
from recycle.job.shape import Worker
from recycle.megatron_versions import gloo_group, set_timeout
from recycle.threads import WaitingThread

PROBE_INTERVAL = 1.0
"""Interval of the check for broken idle connections."""
PROBE_SECONDS, PROBE_TAG = 3.0, 2 * STATE_TAG
"""Time limit and tag of an operation that asks a broken connection for its error.

The kernel breaks several connections to one peer up to a second apart.
"""
_WORLD, _TENSOR = -1, -2
"""Keys of the group of all workers and of the worker's own group, in addition to stages."""


class Gloo(TransportPlugin):
    has_shards = True
    paces_links = True

    @classmethod
    def refusal(cls, job: Job) -> str | None:
        if computes_on_gpu(job):
            return (
                '[membership] transport: "gloo" moves CPU tensors; hide the GPUs (CUDA_VISIBLE_DEVICES=) to compute'
                " on CPUs"
            )
        return refusal_of_gloo(job.membership.ports)

    def _form(self, groups: GroupsOfGeneration) -> GroupTransport:
        return GlooTransport(self.settings, groups)


class GlooTransport(GroupTransport):
    """One generation of the gloo transport. Raises Unreachable, with the peer, if a connection gets no answer."""

    def __init__(self, settings: TransportSettings, groups: GroupsOfGeneration) -> None:
        super().__init__(groups, torch.device("cpu"))
        self._settings, self._store = settings, settings.store
        self._tensor_rank, tensor_parallel = settings.tensor
        self._tensor_ranks = range(tensor_parallel)
        self._tensor: Any = None
        self._exchanged = 0
        self._connections: list[Connection] = []
        self._ends: dict[Worker, str] = {}
        self._scattering: dict[int, WaitingThread] = {}
        self._warned: set[Worker] = set()
        self._next_probe = 0.0
        self._lanes: dict[Worker, OutgoingLane] = {}
        self._formed: list[Any] = []

    def form(self) -> None:
        settings, groups = self._settings, self._groups
        name, role, members = groups.name, groups.role, list(groups.members)
        inside = f"{name}/tensor{role}"
        if len(self._tensor_ranks) > 1:
            name = f"{name}/t{self._tensor_rank}"
        # Name, rank and size of each group, in an order that is the same everywhere.
        wanted = {_WORLD: (f"{name}/world", members.index(role), len(members))}
        wanted |= {
            stage: (f"{name}/stage{stage}", peers.index(role), len(peers))
            for stage, peers in sorted(groups.hosts.items())
            if role in peers and len(peers) > 1
        }
        if len(self._tensor_ranks) > 1:
            wanted[_TENSOR] = (inside, *settings.tensor)
        before = open_sockets()
        formed = self._wait_in_thread(
            lambda: {key: form_group(settings, *of_group, groups.over) for key, of_group in wanted.items()}
        )
        self._connections = own_connections([fd for name, fd in open_sockets().items() if name not in before])
        for connection in self._connections:
            give_up_after(connection, settings.limits.dead_after)
        self._ends = {member: f"{name}/ends/{member}" for member in members}
        self._store.set(self._ends[role], " ".join(map(str, self._connections)))
        for group in formed.values():
            set_timeout(group, settings.limits.transport_timeout)
        self._formed = list(formed.values())
        world, self._tensor = formed.pop(_WORLD), formed.pop(_TENSOR, None)
        self._outgoing = self._incoming = {member: (world, rank) for rank, member in enumerate(members)}
        self._sums, self._everyone = formed, world

    def _await_work(self, work: Any) -> None:
        seconds = self._settings.limits.transport_timeout
        if isinstance(work, PendingSend):
            self._wait_until_over(work.waiting, time.monotonic() + seconds)
        else:
            work.wait(timedelta(seconds=seconds))

    def _start_send(self, peer: Worker, tensor: Tensor, tag: int) -> Any:
        self._require_unbroken()
        if peer not in self._lanes:
            self._lanes[peer] = self._lane(peer)
        lane = self._lanes[peer]
        return self._try(partial(lane.send_state if tag >= STATE_TAG else lane.send, tensor, tag))

    def _lane(self, peer: Worker) -> OutgoingLane:
        (group, rank), links = self._outgoing[peer], self._settings.links
        process = self._groups.process(peer)
        return OutgoingLane(
            lambda tensor, tag: group.send([tensor], rank, tag),
            (lambda network: 0.0) if links is None else (lambda network: links.delay(process, network)),
            self._over,
        )

    def begin(self, program: Sequence[Instruction], iteration: int) -> None:
        super().begin(program, iteration)
        if time.monotonic() >= self._next_probe:
            self._next_probe = time.monotonic() + PROBE_INTERVAL
            self._probe_cut_off()

    def _probe_cut_off(self) -> None:
        for peer in self._cut_off_peers() - self._warned:
            group, rank = self._outgoing[peer]
            try:
                group.recv([torch.empty(1)], rank, PROBE_TAG).wait(timedelta(seconds=PROBE_SECONDS))
            except RuntimeError as error:
                self._warned.add(peer)
                broken = self._broken(error)
                if not isinstance(broken, Unreachable):
                    continue  # the peer has closed the connection, which a wait will notice
                if self._needs(peer):
                    raise Unreachable(str(broken), peer) from None
                self._groups.warn(
                    f"worker {self._groups.process(self._groups.role)} is cut off from worker"
                    f" {self._groups.process(peer)}; training continues, because this plan has no messages between them"
                )

    def _needs(self, peer: Worker) -> bool:
        role = self._groups.role
        shares = any(role in hosts and peer in hosts for hosts in self._groups.hosts.values())
        return shares or bool({(role, peer), (peer, role)} & {*self._groups.lanes, *self._groups.copies})

    def link_stats(self) -> list[LinkStats]:
        waited, self._waited = self._waited, {}
        stats = []
        for peer in sorted({*self._lanes, *waited}):
            lane = self._lanes.get(peer)
            seconds = sorted(lane.take_seconds()) if lane is not None else []
            if seconds or peer in waited:
                quartile = seconds[(len(seconds) - 1) // 4] if seconds else 0.0
                stats.append(LinkStats(self._groups.process(peer), len(seconds), quartile, waited.get(peer, 0.0)))
        return stats

    def reduce_scatter(self, stage: int, buffers: Sequence[Sequence[Tensor]], bucket: int | None = None) -> None:
        if self._sum_of(stage) is None:
            return
        sums, started = self._sharded(stage), self._bucket_sums.setdefault(stage, [])

        def run() -> None:
            for parts in buffers:
                sums.reduce_scatter(parts)

        if bucket is not None:
            # Hosts of a stage begin its sums in one order; hosts of different stages need not.
            if stage not in self._scattering:
                self._scattering[stage] = WaitingThread()
            started.append(PendingSend(self._scattering[stage].submit(run)))
            return
        del self._bucket_sums[stage]

        def finish() -> None:
            for reduced in started:
                reduced.wait()
            run()

        self._run_and_settle(finish)

    def gather(self, stage: int, parts: Sequence[Tensor]) -> None:
        if self._sum_of(stage) is not None:
            self._run_and_settle(partial(self._sharded(stage).gather, parts))

    def _sharded(self, stage: int) -> ShardedSums:
        hosts = self._groups.hosts[stage]
        owners, givers = (
            [[hosts.index(owner) for owner in owners_of_shard] for owners_of_shard in shards[stage]]
            for shards in (self._groups.owners, self._groups.givers or self._groups.owners)
        )
        return ShardedSums(
            self._sums[stage], hosts.index(self._groups.role), len(hosts), owners, givers, self._await_work
        )

    def exchange(self, parts: Sequence[Tensor], shapes: Shapes | None = None) -> Exchanging:
        self._require_unbroken()
        tag, self._exchanged = self._exchanged % STATE_TAG, self._exchanged + 1
        others = [rank for rank in self._tensor_ranks if rank != self._tensor_rank]
        own = self._tensor_rank
        received = received_parts(parts, shapes)
        received[own] = parts[own]

        def start(call: Any, tensors: Sequence[Tensor]) -> list[Any]:
            return [self._try(partial(call, [tensors[rank]], rank, tag)) for rank in others if tensors[rank].numel()]

        works = [*start(self._tensor.recv, received), *start(self._tensor.send, parts)]

        def pending() -> list[Tensor]:
            self._wait_in_thread(partial(self._finish, works))
            return received

        return pending

    def release(self) -> None:
        for group in self._formed:
            for peer in range(group.size()):
                with contextlib.suppress(RuntimeError):  # the timeout, or the connection is broken already
                    if peer != group.rank():
                        group.recv([torch.empty(1)], peer, PROBE_TAG).wait(timedelta(milliseconds=1))

    def close(self) -> None:
        for lane in self._lanes.values():
            lane.close()
        self._lanes = {}
        for thread in self._scattering.values():
            thread.shut()
        super().close()
        self._tensor, self._formed = None, []

    def _broken(self, error: RuntimeError) -> TransportError:
        message = first_line(error)
        is_unreachable = "Connection timed out" in message
        if not is_unreachable and "Connection closed" not in message and "Connection reset" not in message:
            return TransportError(message)
        peers = sorted(self._cut_off_peers())
        workers = ", ".join(f"worker {self._groups.process(peer)}" for peer in peers)
        if is_unreachable and peers:
            return Unreachable(f"no answer from {workers}", peers[0])
        return TransportError(f"connection closed by {workers or 'a worker'}")

    def _cut_off_peers(self) -> set[Worker]:
        standing = {str(connection) for connection in own_connections(open_sockets().values())}
        broken_ends = {connection.mirrored for connection in self._connections if str(connection) not in standing}
        if not broken_ends:
            return set()
        ends = {
            peer: str(self._store.get(key), "ascii").split() if self._store.check([key]) else []
            for peer, key in self._ends.items()
        }
        return {peer for peer, of_peer in ends.items() if broken_ends & set(of_peer)}


def form_group(settings: TransportSettings, name: str, rank: int, size: int, over: threading.Event) -> Any:
    """Form a gloo group of `size` ranks. Raises RuntimeError after `over` is set, or on a timeout."""
    store = FormingStore(settings.store, over)  # a PrefixStore does not keep it alive
    address, ports = settings.address, settings.limits.ports
    device = _device_at(address) if ports is None else _device_within(address, ports)
    return gloo_group(PrefixStore(name, store), rank, size, device, settings.limits.form_timeout)


def _device_at(address: str) -> Any:
    """Open a device, which listens at this address of the host on a port that the kernel chooses."""
    return torch.distributed.ProcessGroupGloo.create_device(hostname=address)


@cache
def _device_within(address: str, ports: Ports) -> Any:
    """The process's device, for the groups of all generations: the kernel chooses ports until one is within the range.

    Raises RunError if no port is free.
    """
    others: list[Any] = []
    try:
        for _ in range(MOST_CHOICES**2):
            before = listening_ports()
            device = _device_at(address)
            if all(ports[0] <= port <= ports[1] for port in listening_ports() - before):
                return device
            others.append(device)  # stays open for now, so that the kernel chooses other ports
            del others[: -2 * MOST_CHOICES]
        raise exhausted(ports)
    finally:
        threading.Thread(target=others.clear, daemon=True).start()  # to close one takes 8 ms
