"""What transports over process groups share: receives posted ahead in lane order, sends kept until they have arrived.

Which group carries a lane, and how a wait on it ends when a peer is gone, is each transport's own: gloo.py, nccl.py.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from recycle.exec.transport.base import Pending, TransportError, lane_places
from recycle.ir.instruction import Instruction, Receive, Transfer
from recycle.shape import Worker

POSTED_AHEAD = 2
"""Receives that are posted ahead per lane: enough to overlap, few enough to bound the buffers."""
OVER_SECONDS = 0.02
"""How often a wait that cannot be woken looks whether its generation is over."""
STATE_TAG = 1 << 20
_LEFT_BEHIND: list[tuple[Future[Any], Any]] = []
"""Waits that have not ended with their generation, and their groups; kept until they do (at the transport timeout at
the latest), because freeing a group before that would block this process."""
Lane = tuple[Worker, Worker]
"""(sender, receiver)."""


@dataclass(frozen=True)
class GroupsOfGeneration:
    """Which groups one generation needs, as one of its processes sees them.

    Attributes:
        name: of the generation; the names of all its groups begin with it.
        role: this worker's role in the plan.
        members: roles of all live workers, in the same order everywhere.
        hosts: stage (or group of tied stages) -> roles of its live hosts, for those that this worker hosts.
        message: shape and type of an activation that crosses a stage boundary.
        program: of this worker's role.
        joins: the lanes by which states are copied to workers that join, before the program runs.
        over: set when the generation is over.
        waiting: called with True before a wait on a peer and with False after it.
    """

    name: str
    role: Worker
    members: Sequence[Worker]
    hosts: Mapping[int, Sequence[Worker]]
    message: tuple[tuple[int, ...], torch.dtype]
    program: Sequence[Instruction] = ()
    joins: Collection[Lane] = ()
    over: threading.Event = field(default_factory=threading.Event)
    waiting: Callable[[bool], None] = lambda _: None


class GroupTransport(ABC):
    """Transport over torch process groups, one generation long.

    `form` fills `_outgoing` and `_incoming`, peer -> (group that carries the lane, the peer's rank in it), and `_sums`,
    stage -> group of its hosts.

    Args:
        groups: what to form.
        device: where messages lie.
    """

    def __init__(self, groups: GroupsOfGeneration, device: torch.device) -> None:
        self._groups, self._device = groups, device
        self._over, self._waiting = groups.over, groups.waiting
        self._outgoing: dict[Worker, tuple[Any, int]] = {}
        self._incoming: dict[Worker, tuple[Any, int]] = {}
        self._sums: dict[int, Any] = {}
        _LEFT_BEHIND[:] = [(running, group) for running, group in _LEFT_BEHIND if not running.done()]
        self._thread = ThreadPoolExecutor(1)
        self._iteration = 0
        self._sent: dict[int, list[tuple[Any, torch.Tensor]]] = {}
        self._lanes: dict[Worker, list[Transfer]] = {}
        self._posted: dict[Transfer, Pending] = {}
        self._places: dict[Instruction, int] = {}

    @abstractmethod
    def form(self) -> None:
        """Form the groups. Raises TransportError when they do not form."""

    def _settle(self) -> None:
        """Wait until what a wait on a group has only queued on the device is done."""
        return

    def _start_receive(self, peer: Worker, tensor: torch.Tensor, tag: int) -> Any:
        group, rank = self._incoming[peer]
        return self._try(partial(group.recv, [tensor], rank, tag))

    def _start_send(self, peer: Worker, tensor: torch.Tensor, tag: int) -> Any:
        group, rank = self._outgoing[peer]
        return self._try(partial(group.send, [tensor], rank, tag))

    def begin(self, program: Sequence[Instruction], iteration: int) -> None:
        for sending, _ in self._sent.pop(iteration - 2, []):
            self._wait(sending)
        self._iteration = iteration
        self._places = lane_places(program)
        self._lanes, self._posted = {}, {}
        for instruction in program:
            if isinstance(instruction, Receive):
                self._lanes.setdefault(instruction.peer, []).append(instruction)
        for lane in self._lanes.values():
            lane.reverse()
            for _ in range(POSTED_AHEAD):
                self._post_next(lane)

    def _post_next(self, lane: list[Transfer]) -> None:
        if lane:
            instruction = lane.pop()
            self._posted[instruction] = self._post(instruction)

    def _post(self, instruction: Transfer) -> Pending:
        shape, dtype = self._groups.message
        buffer = torch.empty(shape, dtype=dtype, device=self._device)
        receiving = self._start_receive(instruction.peer, buffer, self._tag(instruction))

        def pending() -> torch.Tensor:
            self._wait(receiving)
            return buffer

        return pending

    def send(self, instruction: Transfer, tensor: torch.Tensor) -> None:
        tensor = tensor.contiguous()
        sending = self._start_send(instruction.peer, tensor, self._tag(instruction))
        self._sent.setdefault(self._iteration, []).append((sending, tensor))

    def _tag(self, instruction: Transfer) -> int:
        """Place in the lane and parity of the iteration: two iterations may be under way on a lane, never three."""
        return 2 * self._places[instruction] + self._iteration % 2

    def receive(self, instruction: Transfer) -> Pending:
        while instruction not in self._posted:
            self._post_next(self._lanes[instruction.peer])
        self._post_next(self._lanes[instruction.peer])
        return self._posted.pop(instruction)

    def reduce(self, stage: int, buffers: Sequence[torch.Tensor]) -> None:
        group = self._sums.get(stage)
        if group is None:
            return

        def add_up() -> None:
            for buffer in buffers:
                group.allreduce([buffer]).wait()
            self._settle()

        self._wait_in_thread(add_up, group)
        # The end of a generation may let a device go on with whatever was in the buffer.
        if self._over.is_set():
            raise TransportError("the generation is over")

    def exchange(self, tensor: torch.Tensor) -> Callable[[], list[torch.Tensor]]:
        """Start to give `tensor`, contiguous, to the worker's other tensor ranks and to get theirs.

        All of them exchange tensors of one shape in the same order. The call returned waits until `tensor` may be
        written again and all have come, and returns them by tensor rank. Only a transport that allows tensor
        parallelism has it.
        """
        raise NotImplementedError

    def send_state(self, peer: Worker, tensors: Sequence[torch.Tensor]) -> None:
        """Send `tensors` to a worker that joins."""
        for place, tensor in enumerate(tensors):
            self._wait(self._start_send(peer, tensor.detach(), STATE_TAG + place))

    def receive_state(self, peer: Worker, tensors: Sequence[torch.Tensor]) -> None:
        """Fill `tensors` with what `peer` sends by `send_state`."""
        for place, tensor in enumerate(tensors):
            self._wait(self._start_receive(peer, tensor.detach(), STATE_TAG + place))

    def release(self) -> None:
        """End the groups at once where that wakes whoever waits on them; called from any thread."""
        return

    def close(self) -> None:
        self._posted, self._lanes, self._sent = {}, {}, {}
        self._outgoing, self._incoming, self._sums = {}, {}, {}
        self._thread.shutdown(wait=False)

    def _wait_in_thread(self, action: Callable[[], Any], group: Any = None) -> Any:
        """The result of `action`, a wait on `group` that may not end when the group is woken.

        Raises:
            TransportError: it failed, or the generation ends first and it is left behind, and `group` with it.
        """
        self._waiting(True)
        running = self._thread.submit(action)
        try:
            return self._until_over(running)
        except TransportError:
            _LEFT_BEHIND.append((running, group))
            raise
        finally:
            self._waiting(False)

    def _until_over(self, running: Future[Any]) -> Any:
        while True:
            try:
                return running.result(OVER_SECONDS)
            except TimeoutError:
                if self._over.is_set():
                    raise TransportError("the generation is over") from None
            except RuntimeError as error:
                raise self._broken(error) from None

    def _wait(self, pending: Any) -> None:
        self._waiting(True)
        try:
            self._try(pending.wait)
        finally:
            self._waiting(False)

    def _try(self, action: Callable[[], Any]) -> Any:
        try:
            return action()
        except RuntimeError as error:
            raise self._broken(error) from None

    def _broken(self, error: RuntimeError) -> TransportError:
        """What an error of the group's says."""
        return TransportError(first_line(error))


def first_line(error: BaseException) -> str:
    """The first line of an error, of which torch writes many."""
    return (str(error).splitlines() or [type(error).__name__])[0]
