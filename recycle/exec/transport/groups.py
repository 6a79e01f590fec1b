"""What transports over process groups share: receives posted ahead in lane order, sends kept until they have arrived.

Which group carries a lane, and how a wait on it ends when a peer is gone, is each transport's own: gloo.py, nccl.py.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
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


class GroupTransport(ABC):
    """Transport over torch process groups, one generation long.

    Args:
        message: shape and type of an activation that crosses a stage boundary.
        device: where messages lie.
        over: set when the generation is over.
        waiting: called with True before a wait on a peer and with False after it.
    """

    def __init__(
        self,
        message: tuple[tuple[int, ...], torch.dtype],
        device: torch.device,
        over: threading.Event,
        waiting: Callable[[bool], None],
    ) -> None:
        self._message, self._device, self._waiting, self._over = message, device, waiting, over
        self._thread = ThreadPoolExecutor(1)
        self._iteration = 0
        self._sent: dict[int, list[tuple[Any, torch.Tensor]]] = {}
        self._lanes: dict[Worker, list[Transfer]] = {}
        self._posted: dict[Transfer, Pending] = {}
        self._places: dict[Instruction, int] = {}

    @abstractmethod
    def _start_receive(self, peer: Worker, tensor: torch.Tensor, tag: int) -> Any:
        """Post a receive; returns the work to wait for."""

    @abstractmethod
    def _start_send(self, peer: Worker, tensor: torch.Tensor, tag: int) -> Any:
        """Start a send; returns the work to wait for."""

    @abstractmethod
    def reduce(self, stage: int, buffers: Sequence[torch.Tensor]) -> None:
        """Sum `buffers` in place over all hosts of `stage`."""

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
        shape, dtype = self._message
        buffer = torch.empty(shape, dtype=dtype, device=self._device)
        tag = self._tag(instruction)
        receiving = self._try(partial(self._start_receive, instruction.peer, buffer, tag))

        def pending() -> torch.Tensor:
            self._wait(receiving)
            return buffer

        return pending

    def send(self, instruction: Transfer, tensor: torch.Tensor) -> None:
        tensor = tensor.contiguous()
        tag = self._tag(instruction)
        sending = self._try(partial(self._start_send, instruction.peer, tensor, tag))
        self._sent.setdefault(self._iteration, []).append((sending, tensor))

    def _tag(self, instruction: Transfer) -> int:
        """Place in the lane and parity of the iteration: two iterations may be under way on a lane, never three."""
        return 2 * self._places[instruction] + self._iteration % 2

    def receive(self, instruction: Transfer) -> Pending:
        while instruction not in self._posted:
            self._post_next(self._lanes[instruction.peer])
        self._post_next(self._lanes[instruction.peer])
        return self._posted.pop(instruction)

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
            self._wait(self._try(partial(self._start_send, peer, tensor.detach(), STATE_TAG + place)))

    def receive_state(self, peer: Worker, tensors: Sequence[torch.Tensor]) -> None:
        """Fill `tensors` with what `peer` sends by `send_state`."""
        for place, tensor in enumerate(tensors):
            self._wait(self._try(partial(self._start_receive, peer, tensor.detach(), STATE_TAG + place)))

    def close(self) -> None:
        self._posted, self._lanes, self._sent = {}, {}, {}
        self._thread.shutdown(wait=False)

    def _leave_when_over(self, action: Callable[[], Any]) -> Any:
        """The result of `action`, which runs in a thread; TransportError when it fails or the generation ends first."""
        return self._until_over(self._thread.submit(action))

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
