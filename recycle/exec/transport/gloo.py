"""Gloo transport: raw process groups on a store prefix of their own, one generation long.

One group joins all live workers for point-to-point transfers, one more per stage joins its hosts for the sum. With
tensor parallelism that is so for each tensor rank, and another group joins the processes of each worker. No
global process group is made, so a generation ends by dropping objects, and megatron-core's own state is not touched.

Shutting this process's sockets is what wakes whoever is blocked in a gloo transfer, here and at the other end;
aborting a group does not. Sockets that were open before the generation (the clients of the store) are left alone, and
so are listening sockets, whose shutdown would end the process. Three kinds of waits do not always end when the sockets
are shut: forming a group whose member died before it connected, an all-reduce, and a transfer that is posted in that
very moment, as those inside a worker are all the time. They run in a thread of their own, which is left behind when the
generation is over; so are their groups, because freeing one would wait for it.

That a tensor has arrived is said in a wait only, so a thread waits for all that was sent, in order.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from recycle.exec.transport.base import TransportError, Unreachable
from recycle.exec.transport.connections import Connection, give_up_after, open_sockets, own_connections, shut_sockets
from recycle.exec.transport.forming_store import FormingStore
from recycle.exec.transport.groups import STATE_TAG, GroupsOfGeneration, GroupTransport, first_line, leave_behind
from recycle.exec.transport.plugin import TransportPlugin, TransportSettings, computes_on_gpu
from recycle.exec.transport.sharded_sums import ShardedSums
from recycle.job import Job
from recycle.shape import Worker

_WORLD, _TENSOR = -1, -2
"""Keys, beside those of the stages, of the group of all workers and of that inside the worker."""
_UNTIL_THE_END = timedelta(days=30)
"""A sent tensor may wait for as long as its receiver computes; the end of the generation ends that wait."""


class Gloo(TransportPlugin):
    """Between processes over TCP, on CPUs."""

    has_shards = True

    def __init__(self, settings: TransportSettings) -> None:
        super().__init__(settings)
        self._kept: set[str] | None = None

    @classmethod
    def refusal(cls, job: Job) -> str | None:
        if computes_on_gpu(job):
            return (
                '[membership] transport: "gloo" moves CPU tensors; hide the GPUs (CUDA_VISIBLE_DEVICES=) to compute'
                " on CPUs"
            )
        return None

    def open(self, groups: GroupsOfGeneration) -> GroupTransport:
        if self._kept is None:
            self._kept = set(open_sockets())
        return super().open(groups)

    def _form(self, groups: GroupsOfGeneration) -> GroupTransport:
        return GlooTransport(self.settings, groups)

    def wake(self) -> None:
        if self._kept is not None:
            shut_sockets(self._kept, self.settings.kept_addresses)


class _Sending:
    """An operation that sends, which says whether the tensor has arrived: a thread waits for that."""

    def __init__(self, work: Any, thread: ThreadPoolExecutor) -> None:
        self.waiting = thread.submit(work.wait, _UNTIL_THE_END)

    def is_completed(self) -> bool:
        return self.waiting.done()

    def wait(self) -> None:
        """Wait until it has arrived. Raises RuntimeError when it cannot."""
        self.waiting.result()


class GlooTransport(GroupTransport):
    """One generation of it. A transfer or a sum over a connection that got no answer raises Unreachable, with the peer.

    Args:
        settings: of the process.
        groups: what to form.
    """

    def __init__(self, settings: TransportSettings, groups: GroupsOfGeneration) -> None:
        super().__init__(groups, torch.device("cpu"))
        self._settings, self._store = settings, settings.store
        self._tensor_rank, tensor_parallel = settings.tensor
        self._tensor_ranks = range(tensor_parallel)
        self._tensor: Any = None
        self._exchanged = 0
        self._connections: list[Connection] = []
        self._ends: dict[Worker, str] = {}
        self._arrivals = ThreadPoolExecutor(1)
        self._scattering: dict[int, ThreadPoolExecutor] = {}
        self._last_sent: _Sending | None = None

    def form(self) -> None:
        settings, groups = self._settings, self._groups
        name, role, members = groups.name, groups.role, list(groups.members)
        inside = f"{name}/tensor{role}"
        if len(self._tensor_ranks) > 1:
            name = f"{name}/t{self._tensor_rank}"
        # Name, own rank and size of each group; formed in this order, which is the same everywhere.
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
            group._set_default_timeout(timedelta(seconds=settings.limits.transport_timeout))
        world, self._tensor = formed.pop(_WORLD), formed.pop(_TENSOR, None)
        self._outgoing = self._incoming = {member: (world, rank) for rank, member in enumerate(members)}
        self._sums = formed

    def _start_send(self, peer: Worker, tensor: torch.Tensor, tag: int) -> Any:
        self._last_sent = _Sending(super()._start_send(peer, tensor, tag), self._arrivals)
        return self._last_sent

    def reduce_scatter(self, stage: int, buffers: Sequence[Sequence[torch.Tensor]]) -> None:
        if stage in self._sums:
            begun, rest = self._begun.pop(stage, []), self._scattered(stage, buffers)
            self._settle_behind(partial(_all_of, begun, rest), self._sums[stage])

    def begin_reduce_scatter(self, stage: int, bucket: int, buffers: Sequence[Sequence[torch.Tensor]]) -> None:
        if stage in self._sums:
            # Hosts of a stage begin its sums in one order, those of different stages need not.
            if stage not in self._scattering:
                self._scattering[stage] = ThreadPoolExecutor(1)
            thread = self._scattering[stage]
            self._begun.setdefault(stage, []).append(_Begun(thread.submit(self._scattered(stage, buffers))))

    def _scattered(self, stage: int, buffers: Sequence[Sequence[torch.Tensor]]) -> Callable[[], None]:
        sums = self._sharded(stage)
        runs = [sums.reduce_scatter(parts) for parts in buffers]

        def run() -> None:
            for one in runs:
                one()

        return run

    def gather(self, stage: int, parts: Sequence[torch.Tensor]) -> None:
        if stage in self._sums:
            self._settle_behind(self._sharded(stage).gather(parts), self._sums[stage])

    def _sharded(self, stage: int) -> ShardedSums:
        hosts = self._groups.hosts[stage]
        owners = [[hosts.index(owner) for owner in mine] for mine in self._groups.owners[stage]]
        return ShardedSums(self._sums[stage], hosts.index(self._groups.role), len(hosts), owners)

    def exchange(self, tensor: torch.Tensor) -> Callable[[], list[torch.Tensor]]:
        tag, self._exchanged = self._exchanged % STATE_TAG, self._exchanged + 1
        others = [rank for rank in self._tensor_ranks if rank != self._tensor_rank]
        parts = [tensor if rank == self._tensor_rank else torch.empty_like(tensor) for rank in self._tensor_ranks]
        works = [self._try(partial(self._tensor.recv, [parts[rank]], rank, tag)) for rank in others]
        works += [self._try(partial(self._tensor.send, [tensor], rank, tag)) for rank in others]

        def pending() -> list[torch.Tensor]:
            self._wait_in_thread(lambda: [work.wait() for work in works], self._tensor)
            return parts

        return pending

    def close(self) -> None:
        if self._last_sent is not None and not self._last_sent.is_completed():
            leave_behind(self._last_sent.waiting, self._outgoing)
        self._arrivals.shutdown(wait=False)
        for thread in self._scattering.values():
            thread.shutdown(wait=False, cancel_futures=True)
        for stage, works in self._begun.items():
            if not all(work.is_completed() for work in works):
                leave_behind(self._thread.submit(_wait_for, works), self._sums[stage])
        super().close()
        self._tensor = None

    def _broken(self, error: RuntimeError) -> TransportError:
        """What an error of gloo's says, and of which peer if a connection of this transport got no answer."""
        message = first_line(error)
        if "Connection timed out" not in message:
            return TransportError(message)
        standing = {str(connection) for connection in own_connections(open_sockets().values())}
        for peer, key in self._ends.items():
            ends = str(self._store.get(key), "ascii").split() if self._store.check([key]) else []
            for connection in self._connections:
                if str(connection) not in standing and connection.mirrored in ends:
                    return Unreachable(message, peer)
        return TransportError(message)


class _Begun:
    """A sum of a bucket that a thread adds up.

    Args:
        running: what the thread does.
    """

    def __init__(self, running: Future[None]) -> None:
        self._running = running

    def is_completed(self) -> bool:
        return self._running.done()

    def wait(self) -> None:
        """Wait until the sum is there. Raises RuntimeError when it cannot be."""
        self._running.result()


def _wait_for(works: Sequence[Any]) -> None:
    for work in works:
        work.wait()


def _all_of(begun: Sequence[Any], run: Callable[[], None]) -> None:
    """What was begun, and then the rest."""
    _wait_for(begun)
    run()


def form_group(settings: TransportSettings, name: str, rank: int, size: int, over: threading.Event) -> Any:
    """A gloo group of `size` ranks, as soon as all have come. Raises RuntimeError once `over` is set, or too late."""
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    options._devices = [gloo.create_device(hostname=settings.address)]
    options._timeout = timedelta(seconds=settings.limits.form_timeout)
    store = FormingStore(settings.store, over)
    return gloo(PrefixStore(name, store), rank, size, options)
