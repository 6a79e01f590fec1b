"""A transport between simulated processes. What recycle adds to process groups (`GroupTransport`) is the real code."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch

from recycle.exec.transport.base import TransportError, Unreachable
from recycle.exec.transport.formation import FormingStore
from recycle.exec.transport.gloo import GlooTransport
from recycle.exec.transport.groups import GroupsOfGeneration, GroupTransport
from recycle.exec.transport.plugin import TransportPlugin, TransportSettings
from recycle.job import Job
from recycle.job.shape import Worker
from tests.exec.explore.kernel import BREAK_SECONDS, Channel, Kernel, Process, Waiting, current


class CutOff(RuntimeError):
    """A peer does not answer."""

    def __init__(self, peer: Worker) -> None:
        super().__init__(f"worker {peer}: Connection timed out")
        self.peer = peer


class Work:
    """A transfer or a sum; `peers` are those that it needs.

    After a failure the buffer of a sum holds anything, and that of a receive what it held: the sender's last bytes,
    which a real one may hold in part, are those that the receiver needs or those that it has.
    """

    def __init__(
        self, kernel: Kernel, peers: frozenset[Worker], buffer: torch.Tensor | None = None, is_sum: bool = False
    ) -> None:
        self._kernel, self.peers, self._buffer, self._is_sum = kernel, peers, buffer, is_sum
        self._is_done, self._error = False, None
        self.at_end: Callable[[], object] = lambda: None
        self._waiting: Waiting = []

    def is_completed(self) -> bool:
        return self._is_done

    def finish(self, result: torch.Tensor | None = None) -> None:
        if not self._is_done:
            self._is_done = True
            if result is not None and self._buffer is not None:
                self._buffer.copy_(result)
                self.at_end()
            self._kernel.wake(self._waiting)

    def fail(self, error: RuntimeError) -> None:
        if not self._is_done:
            self._is_done, self._error = True, error
            if self._is_sum and self._buffer is not None:
                self._buffer.fill_(float("nan"))
            self._kernel.wake(self._waiting)

    def wait(self, seconds: float) -> None:
        until = self._kernel.now + seconds
        while not self._is_done:
            if self._kernel.now >= until:
                raise RuntimeError("no answer in time")
            self._kernel.park(self._waiting, until - self._kernel.now)
        if self._error is not None:
            raise self._error


class Fabric:
    """All ends of all generations."""

    def __init__(self, kernel: Kernel, dead_after: float) -> None:
        self.kernel, self._dead_after = kernel, dead_after
        self.ends: dict[tuple[str, Worker], SimulatedGroups] = {}
        self.broken: dict[Process, float] = {}
        self.exchanged: dict[object, Work | torch.Tensor] = {}
        self.sums: dict[object, dict[Worker, tuple[SimulatedGroups, Work, torch.Tensor]]] = {}

    def cut(self, pair: frozenset[int]) -> None:
        number = self.kernel.cuts[pair]

        def notice() -> None:
            if self.kernel.cuts.get(pair) == number:
                for end in list(self.ends.values()):
                    for peer in self.others(end):
                        if {end.host, peer.host} == set(pair) and not (end.is_shut or peer.is_shut):
                            end.lose(peer.role, CutOff(peer.role))

        self.kernel.after(self._dead_after * self.kernel.draw(1.0, 1.3), notice)

    def others(self, end: SimulatedGroups) -> list[SimulatedGroups]:
        return [other for (name, _), other in self.ends.items() if name == end.name and other is not end]

    def leave(self, end: SimulatedGroups) -> None:
        if self.ends.get((end.name, end.role)) is end:
            others = self.others(end)
            del self.ends[end.name, end.role]
            error = RuntimeError(f"Connection closed by peer {end.role}")
            for other in others:
                soon = self.kernel.draws.random() < 0.8
                seconds = self.kernel.draw(0.0, 0.5) if soon else self.kernel.draw(0.5, 5.0)
                if not end.process.is_alive and end.host not in {p.host for p in self.kernel.processes}:
                    seconds, error = self.kernel.draw(*BREAK_SECONDS), CutOff(end.role)
                self.kernel.send(
                    end.host, other.host, seconds, partial(other.lose, end.role, error), end.channel(other)
                )


class _Sum:
    """The group of a stage's hosts."""

    def __init__(self, end: SimulatedGroups, stage: int, hosts: Sequence[Worker]) -> None:
        self._end, self._stage, self._roles, self._hosts, self._count = end, stage, hosts, frozenset(hosts), 0

    def send(self, tensors: Sequence[torch.Tensor], rank: int, tag: int) -> Work:
        return self._end._start_send(self._roles[rank], tensors[0], (self._stage, tag))

    def recv(self, tensors: Sequence[torch.Tensor], rank: int, tag: int) -> Work:
        return self._end._start_receive(self._roles[rank], tensors[0], (self._stage, tag))

    def allreduce(self, tensors: Sequence[torch.Tensor]) -> Work:
        (buffer,) = tensors
        work = self._end.start(self._hosts - {self._end.role}, buffer, is_sum=True)
        return self._exchange(work, buffer, lambda parts: sum(parts[1:], parts[0]))

    def allgather(self, outputs: Sequence[Sequence[torch.Tensor]], tensors: Sequence[torch.Tensor]) -> Work:
        (rows,), (own,) = outputs, tensors
        whole = torch.empty((len(rows), *own.shape), dtype=own.dtype)
        work = self._end.start(self._hosts - {self._end.role}, whole)
        work.at_end = lambda: [row.copy_(part) for row, part in zip(rows, whole, strict=True)]
        return self._exchange(work, own, torch.stack)

    def _exchange(self, work: Work, buffer: torch.Tensor, combine: Callable[[list[torch.Tensor]], Any]) -> Work:
        end, fabric, kernel = self._end, self._end.fabric, self._end.fabric.kernel
        self._count += 1
        key = end.name, self._stage, self._count
        parts = fabric.sums.setdefault(key, {})

        def arrive(part: torch.Tensor) -> None:
            parts[end.role] = end, work, part
            if parts.keys() == self._hosts:
                total = combine([parts[role][2] for role in sorted(parts)])
                for other, waiting, _ in parts.values():
                    finish = partial(waiting.finish, total.clone())
                    kernel.send(end.host, other.host, kernel.delay(end.host, other.host), finish, end.channel(other))

        kernel.after(kernel.draw(0.001, 0.01), partial(arrive, buffer.clone()))
        kernel.count_effect()
        return work


class _TensorRanks:
    """The group of a worker's tensor ranks; each exchange has its own tag."""

    def __init__(self, end: SimulatedGroups, generation: str, rank: int) -> None:
        self._end, self._name, self._rank = end, (generation, end.role), rank

    def send(self, tensors: Sequence[torch.Tensor], rank: int, tag: int) -> Work:
        end, kernel = self._end, self._end.fabric.kernel
        work, copy, key = end.start(frozenset()), tensors[0].clone(), (*self._name, rank, self._rank, tag)

        def arrive() -> None:
            work.finish()
            waiting = end.fabric.exchanged.setdefault(key, copy)
            if isinstance(waiting, Work):
                waiting.finish(copy)

        kernel.after(kernel.delay(end.host, end.host), arrive)
        return work

    def recv(self, tensors: Sequence[torch.Tensor], rank: int, tag: int) -> Work:
        exchanged, key = self._end.fabric.exchanged, (*self._name, self._rank, rank, tag)
        work, sent = self._end.start(frozenset(), tensors[0]), exchanged.get(key)
        if isinstance(sent, torch.Tensor):
            work.finish(sent)
        else:
            exchanged[key] = work
        return work


class SimulatedGroups(GlooTransport):
    """What a generation has of gloo's groups; sums and gathers of shards are gloo's."""

    begin, link_stats = GroupTransport.begin, GroupTransport.link_stats

    def __init__(self, fabric: Fabric, settings: TransportSettings, groups: GroupsOfGeneration) -> None:
        super().__init__(settings, groups)
        self.fabric = fabric
        self.name, self.role, self.process = f"{groups.name}/t{settings.tensor[0]}", groups.role, current().process
        self.host, self.is_shut = self.process.host, False
        self._works: list[Work] = []
        self._gone: dict[Worker, RuntimeError] = {}
        self._mail: dict[tuple[Worker, object], deque[torch.Tensor]] = {}
        self._posted: dict[tuple[Worker, object], deque[Work]] = {}
        self._arrivals: dict[Worker, float] = {}
        self.process.at_end.append(self._shut)

    def channel(self, other: SimulatedGroups) -> Channel:
        return self.process.name, other.process.name

    def form(self) -> None:
        groups, limits = self._groups, self._settings.limits
        store = FormingStore(self._store, groups.over)
        names = [f"{self.name}/{member}" for member in groups.members]
        self.fabric.ends[self.name, self.role] = self

        def meet() -> None:
            store.set(f"{self.name}/{self.role}", "here")
            store.wait(names, timedelta(seconds=limits.form_timeout))
            if self.fabric.broken.get(self.process, 0.0) > self.fabric.kernel.now:
                raise RuntimeError("no such device")
            for member in groups.members:
                end = self.fabric.ends.get((self.name, member))
                if end is None or end.is_shut:
                    raise RuntimeError(f"Connection refused by {member}")
                if self.fabric.kernel.are_cut(self.host, end.host):
                    self.fabric.kernel.park(seconds=limits.dead_after)
                    if self.fabric.kernel.are_cut(self.host, end.host):
                        raise CutOff(member)

        self._wait_in_thread(meet)
        self._sums = {
            stage: _Sum(self, stage, hosts)
            for stage, hosts in groups.hosts.items()
            if self.role in hosts and len(hosts) > 1
        }
        self._tensor = _TensorRanks(self, groups.name, self._tensor_rank)
        self._everyone = _Sum(self, -1, groups.members)

    def start(self, peers: frozenset[Worker], buffer: torch.Tensor | None = None, is_sum: bool = False) -> Work:
        work = Work(self.fabric.kernel, peers, buffer, is_sum)
        self._works = [earlier for earlier in self._works if not earlier.is_completed()]
        self._works.append(work)
        if self.is_shut:
            work.fail(RuntimeError("the groups are shut"))
        for peer in sorted(peers & self._gone.keys()):
            work.fail(self._gone[peer])
        return work

    def _start_send(self, peer: Worker, tensor: torch.Tensor, tag: object) -> Work:
        kernel, end = self.fabric.kernel, self.fabric.ends.get((self.name, peer))
        work, copy = self.start(frozenset({peer})), tensor.clone()
        if work.is_completed() or end is None:
            return work
        arrival = max(self._arrivals.get(peer, 0.0), kernel.now + kernel.delay(self.host, end.host))
        self._arrivals[peer] = arrival

        def arrive() -> None:
            if self.process.is_alive and not self.is_shut:
                work.finish()
            if not end.is_shut:
                end.take(self.role, tag, copy)

        kernel.send(self.host, end.host, arrival - kernel.now, arrive, self.channel(end))
        kernel.count_effect()
        return work

    def take(self, peer: Worker, tag: object, tensor: torch.Tensor) -> None:
        key = peer, tag
        while posted := self._posted.get(key):
            work = posted.popleft()
            if not work.is_completed():
                work.finish(tensor)
                return
        self._mail.setdefault(key, deque()).append(tensor)

    def _start_receive(self, peer: Worker, tensor: torch.Tensor, tag: object) -> Work:
        if mail := self._mail.get((peer, tag)):
            work = Work(self.fabric.kernel, frozenset({peer}), tensor)
            work.finish(mail.popleft())
            return work
        work = self.start(frozenset({peer}), tensor)
        self._posted.setdefault((peer, tag), deque()).append(work)
        return work

    def lose(self, peer: Worker, error: RuntimeError) -> None:
        """A peer has left, or does not answer."""
        self._gone.setdefault(peer, error)
        for work in self._works:
            if peer in work.peers:
                work.fail(error)

    def _await_work(self, work: Any) -> None:
        work.wait(self._settings.limits.transport_timeout)

    def _broken(self, error: RuntimeError) -> TransportError:
        if isinstance(error, CutOff):
            return Unreachable(str(error), error.peer)
        return TransportError(str(error))

    def _shut(self) -> None:
        if not self.is_shut:
            self.is_shut = True
            for work in self._works:
                work.fail(RuntimeError("the groups are shut"))
            self.fabric.leave(self)

    def release(self) -> None:
        self._shut()

    def close(self) -> None:
        self._shut()
        self.process.at_end.remove(self._shut)
        super().close()


class SimulatedTransport(TransportPlugin):
    has_shards = True

    def __init__(self, fabric: Fabric, settings: TransportSettings) -> None:
        super().__init__(settings)
        self._fabric = fabric

    @classmethod
    def refusal(cls, job: Job) -> str | None:
        return None

    def _form(self, groups: GroupsOfGeneration) -> GroupTransport:
        return SimulatedGroups(self._fabric, self.settings, groups)
