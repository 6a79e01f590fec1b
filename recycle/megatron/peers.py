"""The live processes of a generation, which the groups of the backend `live` (live.py) communicate with."""

from __future__ import annotations

import sys
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from recycle.exec.protocol import STAGE_LOST
from recycle.exec.transport.groups import GroupTransport
from recycle.job.shape import Worker
from recycle.megatron.transfer import receive_value, send_value


class Peers:
    """The live processes of a generation.

    Args:
        transport: of the generation; its roles are the processes' positions.
        live: sorted.
        tied: number of the sum over the hosts of first and last stage; None if they share no weight.
        shards: parts of a stage's optimizer state; worker k.r holds part k mod shards.
    """

    def __init__(
        self, transport: GroupTransport, live: Sequence[Worker], tied: int | None = None, shards: int = 1
    ) -> None:
        self.transport, self.live, self.tied, self.shards = transport, list(live), tied, shards

    def holders(self, worker: Worker) -> list[Worker]:
        """The live hosts of the worker's stages that hold the same part of the optimizer's state."""
        return [
            host
            for host in self.live
            if host.rank == worker.rank and (host.pipeline - worker.pipeline) % self.shards == 0
        ]

    def holder(self, worker: Worker) -> Worker:
        """The worker itself, or, if it is dead, the first of its holders."""
        return worker if worker in self.live else self.holders(worker)[0]

    def is_first_host(self, worker: Worker) -> bool:
        return worker == next(host for host in self.live if host.rank == worker.rank)

    def gather(self, number: int | None, tensor: Tensor) -> dict[Worker, Tensor]:
        """The tensors of the live hosts of a stage, or of all live processes (None); through host memory."""
        transport, own = self.transport.host_side(), tensor.detach().cpu().contiguous()
        members, group = transport.members_of(number), transport.group_of(number)
        parts = [torch.empty_like(own) for _ in members] if group is not None else [own.clone()]
        if group is not None:
            transport.await_collective([group.allgather([parts], [own])], group)
        return {worker: part.to(tensor.device) for worker, part in zip(members, parts, strict=True)}

    def send(self, peer: Worker, value: Any) -> None:
        """Send a nested value to any live process, which calls `receive`."""
        send_value(self.transport.host_side(), peer, value)

    def receive(self, peer: Worker) -> Any:
        return receive_value(self.transport.host_side(), peer)[0]


class EarlierPeers(Peers):
    """Live processes without those that have joined since the script made a call: they do not make it.

    The others exchange tensors through the first of them, because no group has exactly these members. If a stage is
    left to processes that have joined, the call cannot be completed, and this process ends.
    """

    def __init__(self, peers: Peers, own: Worker, joined: Collection[Worker]) -> None:
        live = [worker for worker in peers.live if worker not in joined]
        for rank in {worker.rank for worker in joined} - {worker.rank for worker in live}:
            print(f"all live hosts of rank {rank} have joined since this step; load the newest checkpoint", flush=True)
            sys.exit(STAGE_LOST)
        super().__init__(peers.transport, live, peers.tied, peers.shards)
        self._own = own

    def gather(self, number: int | None, tensor: Tensor) -> dict[Worker, Tensor]:
        first, *others = (worker for worker in self.live if number is None or worker.rank == number)
        if self._own != first:
            self.send(first, tensor)
            parts = self.receive(first)
        else:
            parts = [tensor.detach().cpu(), *map(self.receive, others)]
            for worker in others:
                self.send(worker, parts)
        return {worker: part.to(tensor.device) for worker, part in zip((first, *others), parts, strict=True)}
