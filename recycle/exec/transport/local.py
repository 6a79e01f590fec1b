"""Local transport: all workers in one process, for tests, notebooks and a single GPU.

Instructions run one after the other in a global order that respects every dependency.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from recycle.exec.transport.base import LinkStats, Pending, TransportError, lane_places
from recycle.ir.instruction import Instruction, Transfer
from recycle.job.shape import Worker
from recycle.plans.shards import Owners


@dataclass
class Exchange:
    """State shared by the local workers.

    Attributes:
        lanes: (sender, receiver, place in the lane) -> tensor in flight.
        sums: (stage, bucket; None for the last) -> host -> parts by shard of each gradient buffer. Replicated state has
            one part.
        reduced: keys of `sums` that are done in this iteration.
        weights: stage -> host -> the parts of its parameters, by shard.
        gathered: stages whose parameters are gathered in this iteration.
    """

    lanes: dict[tuple[Worker, Worker, int], Tensor] = field(default_factory=dict)
    sums: dict[tuple[int, int | None], dict[Worker, list[list[Tensor]]]] = field(default_factory=dict)
    reduced: set[tuple[int, int | None]] = field(default_factory=set)
    owners: dict[int, Owners] = field(default_factory=dict)
    weights: dict[int, dict[Worker, list[Tensor]]] = field(default_factory=dict)
    gathered: set[int] = field(default_factory=set)


class LocalTransport:
    def __init__(self, worker: Worker, exchange: Exchange) -> None:
        self._worker, self._exchange = worker, exchange
        self._places: dict[Instruction, int] = {}

    def begin(self, program: Sequence[Instruction], iteration: int) -> None:
        self._places = lane_places(program)

    def send(self, instruction: Transfer, tensor: Tensor) -> None:
        self._exchange.lanes[(self._worker, instruction.peer, self._places[instruction])] = tensor

    def receive(self, instruction: Transfer) -> Pending:
        lane = (instruction.peer, self._worker, self._places[instruction])

        def pending() -> Tensor:
            if lane not in self._exchange.lanes:
                raise TransportError(f"worker {self._worker}: nothing was sent for {instruction}")
            return self._exchange.lanes.pop(lane)

        return pending

    def reduce(self, stage: int, buffers: object, bucket: int | None = None) -> None:
        """Sum over all hosts; the first host that calls it sums for all."""
        if (stage, bucket) in self._exchange.reduced:
            return
        self._exchange.reduced.add((stage, bucket))
        parts_by_host = self._exchange.sums[stage, bucket]
        for place, owners in enumerate(self._exchange.owners.get(stage, [tuple(parts_by_host)])):
            for buffer, parts in enumerate(parts_by_host[owners[0]]):
                first = parts[place]
                for host, of_host in parts_by_host.items():
                    if host != owners[0]:
                        first.add_(of_host[buffer][place])
                for owner in owners[1:]:
                    parts_by_host[owner][buffer][place].copy_(first)

    reduce_scatter = reduce

    def gather(self, stage: int, parts: Sequence[Tensor]) -> None:
        if stage in self._exchange.gathered:
            return
        self._exchange.gathered.add(stage)
        parts_by_host = self._exchange.weights[stage]
        for place, owners in enumerate(self._exchange.owners[stage]):
            for host, of_host in parts_by_host.items():
                if host not in owners:
                    of_host[place].copy_(parts_by_host[owners[0]][place])

    def link_stats(self) -> list[LinkStats]:
        return []

    def close(self) -> None:
        self._exchange.lanes.clear()
