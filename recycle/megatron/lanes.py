"""Transfers between the ranks of Megatron's pipeline-parallel group: one send or receive per instruction.

No transfer blocks the host: a send is kept until it has arrived, a receive is waited for by who reads it. Over gloo
transfers pair up by a tag, their place in the lane, so receives are posted ahead. NCCL carries all transfers of a pair
of ranks one after the other, unbuffered, and pairs them up by order: each is posted where the lowered program has it,
an order in which that cannot deadlock (`recycle.ir.lower`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from recycle.exec.transport.base import Pending, PostedReceives, lane_places
from recycle.ir.instruction import Instruction, Transfer
from recycle.job.footprint import POSTED_AHEAD


class PipelineLanes:
    """The lanes of one rank: what a `recycle.exec.transport.base.Transport` has for transfers. Megatron reduces.

    Args:
        group: the pipeline-parallel group; rank r of it is worker k.r.
        shape, dtype: of an activation that crosses a stage boundary.
        device: where it lies.
    """

    def __init__(
        self, group: dist.ProcessGroup, shape: Sequence[int], dtype: torch.dtype, device: torch.device
    ) -> None:
        self._shape, self._dtype, self._device = tuple(shape), dtype, device
        self._group = group
        self._global_ranks = dist.get_process_group_ranks(group)
        ahead = POSTED_AHEAD if device.type == "cpu" else 0
        self._receives = PostedReceives(self._post, lambda: ahead)
        self._places: dict[Instruction, int] = {}
        self._sent: deque[tuple[Any, torch.Tensor]] = deque()

    def begin(self, program: Sequence[Instruction], iteration: int) -> None:
        self._places = lane_places(program)
        self._receives.begin(program)

    def send(self, instruction: Transfer, tensor: torch.Tensor) -> None:
        while self._sent and self._sent[0][0].is_completed():
            self._sent.popleft()
        tensor = tensor.contiguous()
        peer = self._global_ranks[instruction.peer.rank]
        self._sent.append((dist.isend(tensor, peer, self._group, self._places[instruction]), tensor))

    def receive(self, instruction: Transfer) -> Pending:
        return self._receives.take(instruction)

    def finish(self) -> None:
        """Wait until all that was sent has arrived; on a GPU, until what follows on it does."""
        while self._sent:
            self._sent.popleft()[0].wait()

    def close(self) -> None:
        """Forget the transfers under way, after a failure; the group is Megatron's."""
        self._sent.clear()
        self._receives.clear()

    def _post(self, instruction: Transfer) -> Pending:
        buffer = torch.empty(self._shape, dtype=self._dtype, device=self._device)
        peer = self._global_ranks[instruction.peer.rank]
        receiving: Any = dist.irecv(buffer, peer, self._group, self._places[instruction])

        def pending() -> torch.Tensor:
            receiving.wait()
            return buffer

        return pending
