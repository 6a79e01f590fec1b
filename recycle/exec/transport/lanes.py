"""Transport with a few communicators per worker, most of them for one lane: NCCL needs this, any backend supports it.

On a lane's communicator one worker sends and one receives, both in the order of the checked schedule, so FIFO order
cannot deadlock, and a dead peer blocks no other lane. Workers with many lanes share communicators between them
(recycle/ir/communicators.py), in an order that `check` has proven. Communicators form in rounds (formation.py), unless
they are reused (communicators.py), and are warmed up at once. A formation that hangs is repeated under another name.

A wait on such a communicator only orders later work on the device; `settle` waits for the device. A posted receive
waits on the device and stops all later work of its stream, and so it is posted ahead only where nothing shares its
communicator or its stream, one per lane, and as many as leave most of the device to computations. The first use of a
kernel may wait until the device is idle, so none is posted ahead in the first iteration of a generation
(docs/explanations/nccl.md).
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError, ThreadPoolExecutor, wait
from functools import partial
from typing import Any

import msgspec
import torch
from torch import Tensor

from recycle.errors import RecycleError, RunError, first_line
from recycle.exec.device import DeviceState
from recycle.exec.transport.base import Exchanging, Lane, Shapes, TransportError, Unreachable
from recycle.exec.transport.communicators import Communicator, CommunicatorKey, Communicators
from recycle.exec.transport.formation import AT_ONCE, LANE, TENSOR, CommunicatorPart, FormingStore, member_of, parts_of
from recycle.exec.transport.groups import GroupsOfGeneration, GroupTransport, received_parts
from recycle.exec.transport.plugin import TransportPlugin, TransportSettings
from recycle.exec.transport.sharded_sums import RootedSums, with_owners
from recycle.exec.transport.staged import StagedTransport
from recycle.exec.transport.streams import StreamPool
from recycle.ir.communicators import share_communicators
from recycle.ir.instruction import Instruction, Transfer
from recycle.job.shape import Worker

LANE_CTAS = 4
"""Most thread blocks, each on a multiprocessor, of an operation on a lane."""
WAITING_SHARE = 8
"""The part of a device's multiprocessors that receives posted ahead may hold: one in so many."""
GIVEN_UP_SECONDS = 0.25
"""Interval at which a process looks whether another member has given up an attempt."""
FAILED_SECONDS = 1.0
"""Seconds from the error of a communicator to the blame of its ends: the death of a process is found meanwhile."""
ATTEMPTS = 4
"""Attempts to form a communicator, in equal parts of the time in which a generation forms."""
ERROR_SECONDS = 0.02
"""Polling interval of errors of communicators, while the device is awaited."""
DONE_SECONDS = 0.0005
"""Polling interval of operations on the device."""


class LanePlugin(TransportPlugin):
    def __init__(self, settings: TransportSettings) -> None:
        super().__init__(settings)
        self.communicators = Communicators()
        self.streams = StreamPool(self.draw_stream)

    @abstractmethod
    def draw_stream(self) -> Hashable:
        """Take the next stream of the pool that communicators take theirs from; returns its identity."""

    def device_state(self) -> DeviceState:
        if isinstance(self._transport, LaneTransport):
            self._transport.poll_errors()
        return super().device_state()

    def offer(self, generation: str, process: Worker) -> None:
        key = _offer_key(generation, member_of(process, *self.settings.tensor))
        self.settings.store.set(key, msgspec.json.encode(self.communicators.offer()).decode())


def _offer_key(generation: str, member: str) -> str:
    return f"{generation}/offer/{member}"


class LaneTransport(GroupTransport):
    """One worker's end of all its lanes and sums, in one generation; a subclass creates communicators on `_store`."""

    overlaps_copies = False

    def __init__(self, plugin: LanePlugin, groups: GroupsOfGeneration) -> None:
        settings, communicators = plugin.settings, plugin.communicators
        super().__init__(groups, settings.device)
        self._settings, self._patience = settings, settings.limits.transport_timeout
        self._store = FormingStore(settings.store, groups.over, settings.limits.form_timeout)
        self._communicators, self._streams = communicators, plugin.streams
        owners, self._owner_groups = with_owners(groups)
        self._parts = parts_of(owners, *settings.tensor)
        self._of_part: dict[int, CommunicatorPart] = {}
        self._failed_since = math.inf
        self._most_ahead = self._multiprocessors() // WAITING_SHARE // LANE_CTAS
        self._scattering: dict[int, list[tuple[list[Any], Sequence[Sequence[Tensor]]]]] = {}
        self._tensor: Any = None
        self._first: int | None = None
        self._lock = threading.Lock()
        self._awaited: deque[tuple[Callable[[], bool], Any]] = deque()
        self._aborting: list[threading.Thread] = []
        self._host_side: StagedTransport | None = None
        communicators.begin_generation()

    @abstractmethod
    def _make(self, name: str, rank: int, size: int, ctas: int | None) -> Any:
        """Create a torch backend of `size` ranks, with at most `ctas` thread blocks; waits for the others."""

    @abstractmethod
    def _has_failed(self, backend: Any) -> bool:
        """Whether a communicator has an error that its operations do not report."""

    @abstractmethod
    def _multiprocessors(self) -> int:
        """Number of the device's multiprocessors."""

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

    def _finish(self, works: Sequence[Any]) -> None:
        # Only these: on the whole device, receives of other lanes may wait for a peer.
        self._wait_for_all(works)
        reached = self._mark()
        while not reached():
            time.sleep(DONE_SECONDS)

    def _forget_done(self) -> None:
        while self._awaited and self._awaited[0][1].is_completed():
            self._awaited.popleft()

    def waits_for_peer(self) -> bool:
        """Whether the device, for which the host may wait, is at an operation that waits for a peer."""
        if self._failed_since < math.inf:  # its operations count as completed
            return True
        with self._lock, contextlib.suppress(RuntimeError):  # the main thread meets the same error
            self._forget_done()
            return bool(self._awaited) and self._awaited[0][0]()
        return False

    def form(self) -> None:
        kept = self._reusable()
        self._communicators.retire([part.key for part in self._parts])
        self._abort_unfit()
        formed = kept | self._form_all([part for part in self._parts if part.key not in kept])
        role = self._groups.role
        for part in self._parts:
            communicator = formed[part.key]
            self._of_part[id(communicator)] = part
            if part.purpose == TENSOR:
                self._tensor = communicator
            self._sums |= dict.fromkeys(part.sums, communicator)
            for sender, receiver in part.lanes:
                if role == sender:
                    self._outgoing[receiver] = communicator, part.rank_of[receiver]
                elif role == receiver:
                    self._incoming[sender] = communicator, part.rank_of[sender]

    def _abort_unfit(self) -> None:
        if unfit := self._communicators.take_unfit():
            self._abort(unfit)
            self._try(self._await_idle)

    def _await_idle(self) -> None:
        """Wait until the device is idle, and abort the communicators whose errors are found meanwhile."""
        idle: Future[None] = Future()

        def synchronize() -> None:
            try:
                self._synchronize()
                idle.set_result(None)
            except RuntimeError as error:
                idle.set_exception(error)

        threading.Thread(target=synchronize, daemon=True).start()
        while wait([idle], ERROR_SECONDS).not_done:
            self._communicators.mark_failed(self._has_failed)
            self._begin_abort(self._communicators.take_unfit())
        for ending in self._aborting:
            ending.join()
        self._streams.keep_only({id(communicator) for communicator in self._communicators.held().values()})
        idle.result()

    def _reusable(self) -> dict[CommunicatorKey, Communicator]:
        size = self._settings.tensor[1]
        live = [self._groups.process(role) for role in self._groups.members]
        self._communicators.keep_among({member_of(process, rank, size) for process in live for rank in range(size)})
        held = self._communicators.held()
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

    def _form_all(self, parts: Sequence[CommunicatorPart]) -> dict[CommunicatorKey, Communicator]:
        # All processes begin in the same order, so the first that is not formed is being formed by all its members.
        threads = ThreadPoolExecutor(AT_ONCE)
        deadline = time.monotonic() + self._settings.limits.form_timeout
        self._waiting(True)
        try:
            forming = [(part, threads.submit(self._form_communicator, part)) for part in parts]
            formed = {}
            for part, running in forming:
                try:
                    formed[part.key] = self._wait_until_over(running, deadline)
                except TransportError as error:
                    raise TransportError(f"{part.name} did not form: {error}") from None
            return formed
        finally:
            threads.shutdown(wait=False, cancel_futures=True)
            self._waiting(False)

    def _form_communicator(self, part: CommunicatorPart) -> Communicator:
        seconds = self._settings.limits.form_timeout / ATTEMPTS
        for attempt in range(ATTEMPTS):
            name = f"{self._groups.name}/{part.name}/{attempt}"
            given_up, deadline = f"{name}/given up", time.monotonic() + seconds
            making: Future[Communicator] = Future()
            threading.Thread(target=self._make_communicator, args=(part, name, making), daemon=True).start()
            while time.monotonic() < deadline and not self._over.is_set():
                try:
                    return making.result(GIVEN_UP_SECONDS)
                except TimeoutError:
                    if self._store.check([given_up]):
                        break
                except RuntimeError:
                    if self._store.check([given_up]):
                        break
                    raise
            if self._over.is_set():
                raise RuntimeError("the generation is over")
            self._store.set(given_up, "")
            making.cancel()
            self._communicators.mark_unfit(part.key)
        raise RuntimeError(f"no answer in {ATTEMPTS} attempts of {seconds:g} s")

    def _make_communicator(self, part: CommunicatorPart, name: str, making: Future[Communicator]) -> None:
        try:
            backend = self._make(name, part.rank, len(part.members), LANE_CTAS if part.purpose == LANE else None)
            communicator = (
                None if self._over.is_set() or making.cancelled() else self._communicators.add(part.key, name, backend)
            )
            if communicator is None:
                self._abort([backend])
                raise RuntimeError("the generation is over")
            self._streams.record(id(communicator))
            if making.cancelled():
                self._communicators.mark_unfit(part.key)
            for work in self._warm_up(part, communicator):
                # A wait of the device would put others that form behind this one, in another order at each process.
                while not work.is_completed():
                    time.sleep(DONE_SECONDS)
        except BaseException as error:
            with contextlib.suppress(InvalidStateError):
                making.set_exception(error)
        else:
            with contextlib.suppress(InvalidStateError):
                making.set_result(communicator)

    def _warm_up(self, part: CommunicatorPart, communicator: Communicator) -> list[Any]:
        size = len(part.members)
        tokens = [torch.zeros(1, device=self._device) for _ in range(1 + size)]
        if part.purpose == TENSOR:
            return [communicator.allgather([tokens[1:]], tokens[:1])]
        if not part.lanes:
            return [communicator.allreduce(tokens[:1])]
        ends = [(part.rank_of[sender], part.rank_of[receiver]) for sender, receiver in part.lanes]
        return [
            (communicator.send if part.rank == sender else communicator.recv)(tokens[:1], sender + receiver - part.rank)
            for sender, receiver in ends
            if part.rank in (sender, receiver)
        ]

    def poll_errors(self) -> None:
        """Look for errors that no operation reports, and end the waits of this process; from any thread."""
        if self._failure is not None or self._over.is_set():
            return
        failed = [
            part
            for communicator in self._communicators.held().values()
            if (part := self._of_part.get(id(communicator))) is not None and self._has_failed(communicator.backend)
        ]
        now = time.monotonic()
        self._failed_since = min(self._failed_since, now) if failed else math.inf
        if now - self._failed_since > FAILED_SECONDS:
            self._failure = self._blame(failed)
            self._communicators.break_all()
            self.release()

    def _blame(self, failed: Sequence[CommunicatorPart]) -> RecycleError:
        others = [[role for role in part.rank_of if role != self._groups.role] for part in failed]
        peers = sorted({roles[0] for roles in others if len(roles) == 1})
        message = f"communicators have failed: {', '.join(part.name for part in failed)}"
        if len(peers) > 1:
            return RunError(f"{message}; to several workers, so this end is at fault")
        return Unreachable(message, peers[0]) if peers else TransportError(message)

    def _broken(self, error: RuntimeError) -> TransportError:
        self._communicators.break_all()
        return super()._broken(error)

    def _posted_ahead(self) -> int:
        return 0 if self._iteration == self._first else min(self._most_ahead, super()._posted_ahead())

    def _may_be_ahead(self, receive: Transfer, posted: Collection[Transfer]) -> bool:
        communicator, _ = self._incoming[receive.peer]
        is_shared = len(self._of_part[id(communicator)].lanes) > 1
        return (
            not is_shared
            and self._streams.is_exclusive(id(communicator))
            and all(receive.peer != other.peer for other in posted)
        )

    def begin(self, program: Sequence[Instruction], iteration: int) -> None:
        if self._first is None:
            self._first = iteration
            self._abort_unfit()  # attempts to form that were given up
        self._scattering = {}
        super().begin(program, iteration)

    def send(self, instruction: Transfer, tensor: Tensor) -> None:
        self._communicators.forget_completed()
        super().send(instruction, tensor)

    def reduce_scatter(self, stage: int, buffers: Sequence[Sequence[Tensor]], bucket: int | None = None) -> None:
        if self._sum_of(stage) is None:
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
            self._finish([work for _, buffers in started for parts in buffers for work in sums.broadcast(parts)])

        self._run_and_settle(add_up)

    def gather(self, stage: int, parts: Sequence[Tensor]) -> None:
        if self._sum_of(stage) is None:
            return
        works = self._sharded(stage).gather(parts)
        self._run_and_settle(partial(self._finish, works))

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
        return self._of_part[id(communicator)].rank_of[role]

    def connects(self, lanes: Collection[Lane]) -> bool:
        single = {of_lanes[0] for of_lanes in share_communicators(self._groups.lanes) if len(of_lanes) == 1}
        return single.issuperset(lanes)

    def host_side(self) -> GroupTransport:
        # After the communicators, so that the connections which open meanwhile are gloo's.
        self._require_unbroken()
        if self._host_side is None:
            self._host_side = StagedTransport(self._settings, self._groups)
            self._host_side.form()
        return self._host_side

    def begin_send_state(self, peer: Worker, tensor: Tensor) -> Callable[[], object]:
        return super().begin_send_state(peer, tensor.to(self._device))

    def begin_receive_state(self, peer: Worker, tensor: Tensor) -> Callable[[], object]:
        buffer = tensor if tensor.device == self._device else torch.empty_like(tensor, device=self._device)
        pending = super().begin_receive_state(peer, buffer)
        if buffer is tensor:
            return pending

        def finish() -> None:
            pending()
            tensor.copy_(buffer)

        return finish

    def exchange(self, parts: Sequence[Tensor], shapes: Shapes | None = None) -> Exchanging:
        first, is_one = parts[0], all(part is parts[0] for part in parts)
        parts = [part.to(self._device) for part in parts]
        received = received_parts(parts, shapes)
        if is_one:
            work = self._try(lambda: self._tensor.allgather([received], [parts[0]]))
        else:
            work = self._try(lambda: self._tensor.alltoall(received, list(parts)))

        def pending() -> list[Tensor]:
            self._try(lambda: self._await_work(work))
            return [tensor.to(first.device) for tensor in received]

        return pending

    def release(self) -> None:
        """Prevent new operations, and start to abort communicators that wait for a peer, in a separate thread."""
        if self._host_side is not None:
            self._host_side.release()
        with self._lock:
            self._communicators.mark_failed(self._has_failed)
            self._begin_abort(self._communicators.end_generation())

    def _begin_abort(self, backends: Sequence[Any]) -> None:
        # In a thread: an abort waits for the device, where another communicator may wait for a peer.
        if backends:
            self._aborting.append(threading.Thread(target=self._abort, args=(backends,), daemon=True))
            self._aborting[-1].start()

    def close(self) -> None:
        """Abort the communicators that wait for a peer, and wait until the device is idle.

        Raises RunError if the device has failed, and only another process can use it again.
        """
        super().close()
        self._tensor = None
        with self._lock:
            self._awaited.clear()
        self.release()
        if self._host_side is not None:
            self._host_side.close()
        try:
            self._await_idle()
        except RuntimeError as error:
            raise RunError(f"{self._device} cannot be used any more by this process: {first_line(error)}") from None
