"""Local transport: all workers in one process. For tests, notebooks and one GPU.

Instructions run one after the other in a global order that respects every dependency, so a receive always finds its
tensor and a reduction always finds every host's sum complete.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from recycle.exec.transport.base import Pending, TransportError, lane_places
from recycle.ir.instruction import Instruction, Transfer
from recycle.shape import Worker


@dataclass
class Exchange:
    """What the local workers share.

    Attributes:
        lanes: (sender, receiver, place in the lane) -> tensor under way.
        sums: stage -> the gradient buffers of each of its hosts.
        reduced: stages whose sum of this iteration is done.
    """

    lanes: dict[tuple[Worker, Worker, int], torch.Tensor] = field(default_factory=dict)
    sums: dict[int, list[list[torch.Tensor]]] = field(default_factory=dict)
    reduced: set[int] = field(default_factory=set)


class LocalTransport:
    """One worker's end of an Exchange."""

    def __init__(self, worker: Worker, exchange: Exchange) -> None:
        self._worker, self._exchange = worker, exchange
        self._places: dict[Instruction, int] = {}

    def begin(self, program: Sequence[Instruction], iteration: int) -> None:
        self._places = lane_places(program)

    def send(self, instruction: Transfer, tensor: torch.Tensor) -> None:
        self._exchange.lanes[(self._worker, instruction.peer, self._places[instruction])] = tensor

    def receive(self, instruction: Transfer) -> Pending:
        lane = (instruction.peer, self._worker, self._places[instruction])

        def pending() -> torch.Tensor:
            if lane not in self._exchange.lanes:
                raise TransportError(f"worker {self._worker}: nothing was sent for {instruction}")
            return self._exchange.lanes.pop(lane)

        return pending

    def reduce(self, stage: int, buffers: Sequence[torch.Tensor]) -> None:
        if stage in self._exchange.reduced:
            return
        self._exchange.reduced.add(stage)
        for parts in zip(*self._exchange.sums[stage], strict=True):
            for part in parts[1:]:
                parts[0].add_(part)
            for part in parts[1:]:
                part.copy_(parts[0])

    def close(self) -> None:
        self._exchange.lanes.clear()
