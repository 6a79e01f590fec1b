"""Transport with one communicator per lane: NCCL needs this, and any backend supports it.

On a lane's communicator one worker sends and one receives, both in the order of the checked schedule, so FIFO order
cannot deadlock, and a dead peer blocks no other lane. Communicators form in rounds (formation.py), unless they are
reused (communicators.py), and are warmed up at once.

A wait on such a communicator only orders later work on the device; `settle` waits for the device. The first use of a
kernel may wait until the device is idle, so no receives are posted ahead in the first iteration of a generation. Later
at most one per lane is, because streams share a few hardware queues (docs/explanations/nccl.md).
"""

from __future__ import annotations

import contextlib
import threading
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import msgspec
import torch

from recycle.errors import RunError, first_line
from recycle.exec.transport.base import TransportError
from recycle.exec.transport.communicators import Communicator, CommunicatorKey, Communicators
from recycle.exec.transport.formation import TENSOR, CommunicatorPart, FormingStore, member_of, parts_of
from recycle.exec.transport.groups import GroupsOfGeneration, GroupTransport
from recycle.exec.transport.plugin import TransportPlugin, TransportSettings
from recycle.exec.transport.sharded_sums import RootedSums, with_owners
from recycle.ir.instruction import Instruction, Transfer
from recycle.job.shape import Worker


class LanePlugin(TransportPlugin):
    def __init__(self, settings: TransportSettings) -> None:
        super().__init__(settings)
        self.communicators = Communicators()

    def offer(self, generation: str, process: Worker) -> None:
        key = _offer_key(generation, member_of(process, *self.settings.tensor))
        self.settings.store.set(key, msgspec.json.encode(self.communicators.offer()).decode())


def _offer_key(generation: str, member: str) -> str:
    return f"{generation}/offer/{member}"


class LaneTransport(GroupTransport):
    """One worker's end of all its lanes and sums, in one generation; a subclass creates communicators on `_store`."""

    def __init__(self, settings: TransportSettings, groups: GroupsOfGeneration, communicators: Communicators) -> None:
        super().__init__(groups, settings.device)
        self._settings, self._patience = settings, settings.limits.transport_timeout
        self._store = FormingStore(settings.store, groups.over, settings.limits.form_timeout)
        self._communicators = communicators
        owners, self._owner_groups = with_owners(groups)
        self._parts = parts_of(owners, *settings.tensor)
        self._members: dict[int, tuple[str, ...]] = {}
        self._scattering: dict[int, list[tuple[list[Any], Sequence[Sequence[torch.Tensor]]]]] = {}
        self._tensor: Any = None
        self._first: int | None = None
        self._lock = threading.Lock()
        self._awaited: deque[tuple[Callable[[], bool], Any]] = deque()
        self._aborting: list[threading.Thread] = []
        communicators.begin_generation()

    @abstractmethod
    def _make(self, name: str, rank: int, size: int) -> Any:
        """Create a torch backend of `size` ranks; waits for the others."""

    @abstractmethod
    def _abort(self, groups: Sequence[Any]) -> None:
        """Abort communicators together, which interrupts waits on them here; may block for a while."""

    @abstractmethod
    def _mark(self) -> Callable[[], bool]:
        """Return a call that tells whether the device has completed the work queued until now."""

    def _await_work(self, work: Any) -> None:
        mark = self._mark()
        with self._lock:
            self._forget_done()
            self._awaited.append((mark, work))
        work.wait()

    def _forget_done(self) -> None:
        while self._awaited and self._awaited[0][1].is_completed():
            self._awaited.popleft()

    def waits_for_peer(self) -> bool:
        """Whether the device, for which the host may wait, is at an operation that waits for a peer."""
        with self._lock, contextlib.suppress(RuntimeError):  # the main thread meets the same error
            self._forget_done()
            return bool(self._awaited) and self._awaited[0][0]()
        return False

    def form(self) -> None:
        kept = self._reusable()
        for part in self._parts:
            communicator = kept.get(part.key) or self._form_communicator(part)
            if part.purpose == TENSOR:
                self._tensor = communicator
            elif part.peer is None:
                self._sums[part.number] = communicator
                self._members[id(communicator)] = part.members
            elif part.rank == 0:
                self._outgoing[part.peer] = communicator, 1
            else:
                self._incoming[part.peer] = communicator, 0

    def _reusable(self) -> dict[CommunicatorKey, Communicator]:
        size = self._settings.tensor[1]
        live = [self._groups.process(role) for role in self._groups.members]
        self._communicators.keep_among({member_of(process, rank, size) for process in live for rank in range(size)})
        held = self._communicators.held_among([part.key for part in self._parts])
        others = {
            part.key: [member for rank, member in enumerate(part.members) if rank != part.rank]
            for part in self._parts
            if part.key in held
        }

        def read() -> dict[str, Mapping[str, int]]:
            members = sorted({member for of_key in others.values() for member in of_key})
            keys = {member: _offer_key(self._groups.name, member) for member in members}
            return {
                member: msgspec.json.decode(self._store.get(key), type=dict[str, int]) for member, key in keys.items()
            }

        offers = self._wait_in_thread(read) if others else {}
        agreed = {
            key: self._communicators.reuse(key, [offers[member] for member in of_key]) for key, of_key in others.items()
        }
        return {key: communicator for key, communicator in agreed.items() if communicator is not None}

    def _form_communicator(self, part: CommunicatorPart) -> Communicator:
        try:
            formed: Communicator = self._wait_in_thread(
                lambda: self._make_communicator(part), seconds=self._settings.limits.form_timeout
            )
        except TransportError as error:
            raise TransportError(f"{part.name} did not form: {error}") from None
        return formed

    def _make_communicator(self, part: CommunicatorPart) -> Communicator:
        name = f"{self._groups.name}/{part.name}"
        backend = self._make(name, part.rank, len(part.members))
        communicator = self._communicators.add(part.key, name, backend)
        if communicator is None:
            self._abort([backend])
            raise RuntimeError("the generation is over")
        self._warm_up(part, communicator).wait()
        self._synchronize()
        return communicator

    def _warm_up(self, part: CommunicatorPart, communicator: Communicator) -> Any:
        tokens = [torch.zeros(1, device=self._device) for _ in range(1 + len(part.members))]
        if part.purpose == TENSOR:
            return communicator.allgather([tokens[1:]], tokens[:1])
        if part.peer is None:
            return communicator.allreduce(tokens[:1])
        return (communicator.recv if part.rank else communicator.send)(tokens[:1], 1 - part.rank)

    def _broken(self, error: RuntimeError) -> TransportError:
        if not self._over.is_set():
            self._communicators.break_all()
        return super()._broken(error)

    @property
    def reports_times(self) -> bool:
        return False

    def _posted_ahead(self) -> int:
        return 0 if self._iteration == self._first else super()._posted_ahead()

    def _may_be_ahead(self, receive: Transfer, posted: Collection[Transfer]) -> bool:
        return all(receive.peer != other.peer for other in posted)

    def begin(self, program: Sequence[Instruction], iteration: int) -> None:
        if self._first is None:
            self._first = iteration
            if unfit := self._communicators.take_unfit():  # all have formed theirs
                self._abort(unfit)
                self._try(self._synchronize)
        self._scattering = {}
        super().begin(program, iteration)

    def send(self, instruction: Transfer, tensor: torch.Tensor) -> None:
        self._communicators.forget_completed()
        super().send(instruction, tensor)

    def reduce_scatter(self, stage: int, buffers: Sequence[Sequence[torch.Tensor]], bucket: int | None = None) -> None:
        if stage not in self._sums:
            return
        sums, started = self._sharded(stage), self._scattering.setdefault(stage, [])
        started.append(([work for parts in buffers for work in sums.reduce(parts)], buffers))
        if bucket is not None:
            return
        del self._scattering[stage]

        def add_up() -> None:
            for works, _ in started:
                self._wait_for_all(works)
            # A broadcast may only start after the sum that it sends.
            self._wait_for_all([work for _, buffers in started for parts in buffers for work in sums.broadcast(parts)])
            self._synchronize()

        self._run_and_settle(add_up, self._sums[stage])

    def gather(self, stage: int, parts: Sequence[torch.Tensor]) -> None:
        if stage not in self._sums:
            return
        works = self._sharded(stage).gather(parts)

        def fill() -> None:
            self._wait_for_all(works)
            self._synchronize()

        self._run_and_settle(fill, self._sums[stage])

    def _wait_for_all(self, works: Sequence[Any]) -> None:
        for work in works:
            self._await_work(work)

    def _sharded(self, stage: int) -> RootedSums:
        groups, role = self._groups, self._groups.role
        owners = groups.owners[stage]
        of_owners = [
            self._sums[number] if number is not None and role in owners_of_shard else None
            for number, owners_of_shard in zip(self._owner_groups[stage], owners, strict=True)
        ]
        givers = (groups.givers or groups.owners)[stage]
        return RootedSums(self._sums[stage], role, owners, givers, of_owners, self._rank_of, self._try)

    def _rank_of(self, communicator: Communicator, role: Worker) -> int:
        member = member_of(self._groups.process(role), *self._settings.tensor)
        return self._members[id(communicator)].index(member)

    def exchange(self, parts: Sequence[torch.Tensor]) -> Callable[[], list[torch.Tensor]]:
        received = [torch.empty_like(part) for part in parts]
        if all(part is parts[0] for part in parts):
            work = self._try(lambda: self._tensor.allgather([received], [parts[0]]))
        else:
            work = self._try(lambda: self._tensor.alltoall(received, list(parts)))

        def pending() -> list[torch.Tensor]:
            self._try(lambda: self._await_work(work))
            return received

        return pending

    def release(self) -> None:
        """Prevent new operations, and start to abort communicators that wait for a peer, in a separate thread."""
        with self._lock:
            if waiting := self._communicators.end_generation():
                self._aborting.append(threading.Thread(target=self._abort, args=(waiting,), daemon=True))
                self._aborting[-1].start()

    def close(self) -> None:
        """Abort the communicators that wait for a peer, and wait until the device is idle.

        Raises RunError if the device has failed, and only another process can use it again.
        """
        super().close()
        self._tensor = None
        with self._lock:
            self._awaited.clear()
        self._communicators.retire({part.key for part in self._parts})
        self.release()
        for ending in self._aborting:
            ending.join()
        try:
            self._synchronize()
        except RuntimeError as error:
            raise RunError(f"{self._device} cannot be used any more by this process: {first_line(error)}") from None
