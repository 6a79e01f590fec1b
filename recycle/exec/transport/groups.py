"""Base of transports over process groups: receives posted ahead, and sent tensors kept until delivery.

Receives are posted in program order. gloo.py and lanes.py choose the groups, and end waits on peers that are gone.
"""

from __future__ import annotations

import math
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, NoReturn

import torch
from torch import Tensor

from recycle.errors import RecycleError, first_line
from recycle.exec.transport.base import (
    Exchanging,
    Lane,
    LinkStats,
    MessageSpec,
    Pending,
    PostedReceives,
    Shapes,
    TransportError,
    Unreachable,
    lane_places,
)
from recycle.ir.instruction import Instruction, Transfer
from recycle.job.footprint import POSTED_AHEAD
from recycle.job.shape import Worker
from recycle.plans.shards import Owners
from recycle.threads import WaitingThread

OVER_SECONDS = 0.02
"""Polling interval of waits that cannot be interrupted."""
STATE_TAG = 1 << 20


@dataclass(frozen=True)
class GroupsOfGeneration:
    """Groups that one generation needs, from the view of one process.

    Attributes:
        name: of the generation; prefix of the names of its groups.
        members: roles of all live workers, in the same order everywhere.
        hosts: stage (or number of a group of tied stages) -> roles of its live hosts, of the whole plan.
        lanes: of the whole plan.
        copies: (source, receiver) of copies of states.
        processes: role -> position that its process started in, if different.
        givers: owners that have the shard's parameters when the generation begins, and send them; by default all.
        over: set when this generation is over, and never cleared.
        warn: called with problems that stop no worker.
        waiting: called with True before a wait on a peer and with False after it.
    """

    name: str
    role: Worker
    members: Sequence[Worker]
    hosts: Mapping[int, Sequence[Worker]]
    message: MessageSpec
    lanes: Collection[Lane] = ()
    processes: Mapping[Worker, Worker] = field(default_factory=dict)
    over: threading.Event = field(default_factory=threading.Event)
    waiting: Callable[[bool], None] = lambda _: None
    owners: Mapping[int, Owners] = field(default_factory=dict)
    warn: Callable[[str], None] = lambda _: None
    givers: Mapping[int, Owners] = field(default_factory=dict)
    copies: Collection[Lane] = ()

    def process(self, role: Worker) -> Worker:
        """Position that the process of a role started in."""
        return self.processes.get(role, role)


class GroupTransport(ABC):
    """Transport over torch process groups, for one generation.

    `form` fills `_outgoing` and `_incoming`, peer -> (group of the lane, the peer's rank in it), and `_sums`, stage ->
    group of its hosts. If groups have no timeout, `_patience` limits waits, in seconds.

    Attributes:
        message: shape and dtype of activations; may change before `begin`.
        overlaps_copies: whether several parts of a state may be in flight, from the first iteration on.
    """

    overlaps_copies: ClassVar[bool] = True

    def __init__(self, groups: GroupsOfGeneration, device: torch.device) -> None:
        self._groups, self._device = groups, device
        self.message = groups.message
        self._over, self._waiting = groups.over, groups.waiting
        self._outgoing: dict[Worker, tuple[Any, int]] = {}
        self._incoming: dict[Worker, tuple[Any, int]] = {}
        self._sums: dict[int, Any] = {}
        self._everyone: Any = None
        self._thread = WaitingThread()
        self._patience = math.inf
        self._failure: RecycleError | None = None
        self._iteration = 0
        self._sent: dict[Worker, deque[tuple[int, Any, Tensor]]] = {}
        self._receives = PostedReceives(self._post, self._posted_ahead, self._may_be_ahead)
        self._places: dict[Instruction, int] = {}
        self._bucket_sums: dict[int, list[Any]] = {}
        self._waited: dict[Worker, float] = {}

    @abstractmethod
    def form(self) -> None:
        """Form the groups. Raises TransportError on failure."""

    def _synchronize(self) -> None:
        return

    def settle(self) -> None:
        """Wait for all queued work of the device. Raises TransportError, also if the generation ends first."""
        self._run_and_settle(self._synchronize)

    def _run_and_settle(self, action: Callable[[], Any]) -> None:
        self._wait_in_thread(action, self._patience)
        self._require_unbroken()  # after a failure the device runs on, with undefined contents of buffers

    def waits_for_peer(self) -> bool:
        """Whether the device is known to be idle until a peer arrives; from any thread."""
        return False

    def _await_work(self, work: Any) -> None:
        work.wait()

    def _finish(self, works: Sequence[Any]) -> None:
        """Wait in a thread until collectives are done."""
        for work in works:
            self._await_work(work)
        self._synchronize()

    def _posted_ahead(self) -> int:
        return POSTED_AHEAD

    def _start_receive(self, peer: Worker, tensor: Tensor, tag: int) -> Any:
        self._require_unbroken()
        group, rank = self._incoming[peer]
        return self._try(partial(group.recv, [tensor], rank, tag))

    def _start_send(self, peer: Worker, tensor: Tensor, tag: int) -> Any:
        self._require_unbroken()
        group, rank = self._outgoing[peer]
        return self._try(partial(group.send, [tensor], rank, tag))

    def begin(self, program: Sequence[Instruction], iteration: int) -> None:
        self._iteration = iteration
        self._drop_sent(iteration - 2)
        self._places = lane_places(program)
        self._bucket_sums = {}
        self._receives.begin(program)

    def _may_be_ahead(self, receive: Transfer, posted: Collection[Transfer]) -> bool:
        return True

    def _post(self, instruction: Transfer) -> Pending:
        shape, dtype = self.message
        buffer = torch.empty(shape, dtype=dtype, device=self._device)
        peer = instruction.peer
        receiving = self._start_receive(peer, buffer, self._tag(instruction))

        def pending() -> Tensor:
            began = time.monotonic()
            try:
                self._wait(receiving)
            except TransportError as error:
                if self._over.is_set() or isinstance(error, Unreachable):
                    raise
                raise TransportError(f"receiving from worker {self._groups.process(peer)}: {error}") from None
            self._waited[peer] = self._waited.get(peer, 0.0) + time.monotonic() - began
            return buffer

        return pending

    def send(self, instruction: Transfer, tensor: Tensor) -> None:
        self._drop_sent(self._iteration - 2)
        tensor = tensor.contiguous()
        sending = self._start_send(instruction.peer, tensor, self._tag(instruction))
        self._sent.setdefault(instruction.peer, deque()).append((self._iteration, sending, tensor))

    def link_stats(self) -> list[LinkStats]:
        """Statistics of messages since the last call, by process; empty if unknown."""
        return self.messaged()

    def messaged(self) -> list[LinkStats]:
        """Former name of `link_stats`, for transports that override it."""
        return []

    def _drop_sent(self, iteration: int) -> None:
        for sent in self._sent.values():
            while sent and (sent[0][0] <= iteration or sent[0][1].is_completed()):
                self._wait(sent.popleft()[1])

    def _tag(self, instruction: Transfer) -> int:
        # At most two iterations share a lane.
        return 2 * self._places[instruction] + self._iteration % 2

    def receive(self, instruction: Transfer) -> Pending:
        self._drop_sent(self._iteration - 2)
        return self._receives.take(instruction)

    def reduce(self, stage: int, buffers: Sequence[Tensor], bucket: int | None = None) -> None:
        group, started = self._sum_of(stage), self._bucket_sums.setdefault(stage, [])
        if group is None:
            return
        if bucket is not None:
            for buffer in buffers:
                if buffer.numel():
                    started.append(self._try(partial(group.allreduce, [buffer])))
            return
        del self._bucket_sums[stage]

        def add_up() -> None:
            self._finish([*started, *(group.allreduce([buffer]) for buffer in buffers)])

        self._run_and_settle(add_up)

    def _sum_of(self, stage: int) -> Any:
        """The group that sums a stage; None if it has one host."""
        self._require_unbroken()
        return self._sums.get(stage)

    def reduce_scatter(self, stage: int, buffers: Sequence[Sequence[Tensor]], bucket: int | None = None) -> None:
        """As `Transport.reduce_scatter`; plug-ins that support it set `TransportPlugin.has_shards`."""
        raise NotImplementedError

    def gather(self, stage: int, parts: Sequence[Tensor]) -> None:
        """As `Transport.gather`; plug-ins that support it set `TransportPlugin.has_shards`."""
        raise NotImplementedError

    def members_of(self, number: int | None) -> Sequence[Worker]:
        """Roles of the hosts of a sum, or of all live workers (None), by their rank in `group_of`."""
        return self._groups.members if number is None else self._groups.hosts[number]

    def group_of(self, number: int | None) -> Any:
        """The group of a sum, or of all live workers (None), for further collectives; None for a worker by itself.

        Raises TransportError if the transport has no group of all workers.
        """
        if len(self.members_of(number)) < 2:
            return None
        if number is None and self._everyone is None:
            raise TransportError(f"{type(self).__name__} has no group of all workers")
        return self._everyone if number is None else self._sum_of(number)

    def connects(self, lanes: Collection[Lane]) -> bool:
        """Whether the workers can use all these lanes, in any order."""
        return True

    def host_side(self) -> GroupTransport:
        """A transport for tensors in host memory, between any two live workers and over all of them.

        All live workers call it in the same order of collectives for the first time in a generation. May raise
        TransportError.
        """
        return self

    def await_collective(self, works: Sequence[Any], group: Any) -> None:
        """Wait for collectives on a group of `group_of`. Raises TransportError, also if the generation ends first."""

        self._run_and_settle(partial(self._finish, works))

    def exchange(self, parts: Sequence[Tensor], shapes: Shapes | None = None) -> Exchanging:
        """Start to send `parts`, one for each tensor rank of the worker, contiguous and of one type.

        The ranks send tensors of these shapes to this one; without `shapes` all tensors have one shape.

        All tensor ranks exchange in the same order. The returned call waits until `parts` may be written again, and
        returns what all ranks sent to this one, by rank.
        """
        raise NotImplementedError

    def send_state(self, peer: Worker, tensors: Sequence[Tensor]) -> None:
        for tensor in tensors:
            self.begin_send_state(peer, tensor)()

    def receive_state(self, peer: Worker, tensors: Sequence[Tensor]) -> None:
        """Fill `tensors` from the peer's `send_state`."""
        for tensor in tensors:
            self.begin_receive_state(peer, tensor)()

    def begin_send_state(self, peer: Worker, tensor: Tensor) -> Callable[[], object]:
        """Start to send `tensor`, which must not be written until the returned call has waited for it."""
        return partial(self._wait, self._start_send(peer, tensor.detach(), STATE_TAG))

    def begin_receive_state(self, peer: Worker, tensor: Tensor) -> Callable[[], object]:
        """Start to fill `tensor` from the peer's `begin_send_state`; the returned call waits for it."""
        return partial(self._wait, self._start_receive(peer, tensor.detach(), STATE_TAG))

    def release(self) -> None:
        """Start to end the groups, if that interrupts waits on them, and return; from any thread."""
        return

    def close(self) -> None:
        self._receives.clear()
        self._sent, self._bucket_sums = {}, {}
        self._outgoing, self._incoming, self._sums, self._everyone = {}, {}, {}, None
        self._thread.shut()
        self._failure = TransportError("the generation is over")  # an earlier one refers to frames, and these to groups

    def _wait_in_thread(self, action: Callable[[], Any], seconds: float = math.inf) -> Any:
        # For waits that `release` may not end; they are abandoned at the end of the generation.
        self._require_unbroken()
        self._waiting(True)
        running = self._thread.submit(action)
        try:
            return self._wait_until_over(running, time.monotonic() + seconds)
        finally:
            self._waiting(False)

    def _wait_until_over(self, running: Future[Any], deadline: float) -> Any:
        while True:
            try:
                return running.result(OVER_SECONDS)
            except TimeoutError:
                self._require_unbroken()
                if time.monotonic() > deadline:
                    self._fail(RuntimeError("no answer within the deadline"))
            except RuntimeError as error:
                self._fail(error)

    def _require_unbroken(self) -> None:
        """Raise TransportError after the end of the generation, and after an error, until the next generation."""
        if self._over.is_set():
            raise TransportError("the generation is over")
        if self._failure is not None:
            raise self._failure

    def _fail(self, error: RuntimeError) -> NoReturn:
        self._require_unbroken()
        self._failure = self._broken(error)
        raise self._failure from None

    def _wait(self, pending: Any) -> None:
        self._waiting(True)
        try:
            self._try(lambda: self._await_work(pending))
        finally:
            self._waiting(False)

    def _try(self, action: Callable[[], Any]) -> Any:
        self._require_unbroken()
        try:
            return action()
        except RuntimeError as error:
            self._fail(error)

    def _broken(self, error: RuntimeError) -> TransportError:
        return TransportError(first_line(error))


def received_parts(parts: Sequence[Tensor], shapes: Shapes | None) -> list[Tensor]:
    """Tensors for what each tensor rank sends in an exchange."""
    return [part.new_empty(shapes[rank] if shapes is not None else part.shape) for rank, part in enumerate(parts)]
