"""Transfers between the ranks of Megatron's pipeline-parallel group: one send or receive per instruction.

Transfers do not block the host: a send is kept until it has arrived, and the consumer waits for a receive. Over gloo a
tag (the position in the lane) matches sends and receives, so receives are posted ahead. NCCL runs the transfers of a
pair of ranks in order and unbuffered, and matches them by order. They are posted in the order of the lowered program,
which cannot deadlock (`recycle.ir.lower`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from recycle.exec.transport.base import Pending, PostedReceives, lane_places
from recycle.ir.instruction import Instruction, Transfer
from recycle.job.footprint import POSTED_AHEAD


class PipelineLanes:
    """Lanes of one rank: the transfers of a `recycle.exec.transport.base.Transport`. Reductions belong to Megatron.

    Args:
        group: the pipeline-parallel group; rank r of the group is worker k.r.
        shape, dtype: of an activation that crosses a stage boundary.
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
        self._sent: deque[tuple[Any, Tensor]] = deque()

    def begin(self, program: Sequence[Instruction], iteration: int) -> None:
        self._places = lane_places(program)
        self._receives.begin(program)

    def send(self, instruction: Transfer, tensor: Tensor) -> None:
        while self._sent and self._sent[0][0].is_completed():
            self._sent.popleft()
        tensor = tensor.contiguous()
        peer = self._global_ranks[instruction.peer.rank]
        self._sent.append((dist.isend(tensor, peer, self._group, self._places[instruction]), tensor))

    def receive(self, instruction: Transfer) -> Pending:
        return self._receives.take(instruction)

    def finish(self) -> None:
        """Wait until all sends have arrived; on a GPU, make later work wait for them."""
        while self._sent:
            self._sent.popleft()[0].wait()

    def close(self) -> None:
        """Drop the transfers under way after a failure; the group belongs to Megatron."""
        self._sent.clear()
        self._receives.clear()

    def _post(self, instruction: Transfer) -> Pending:
        buffer = torch.empty(self._shape, dtype=self._dtype, device=self._device)
        peer = self._global_ranks[instruction.peer.rank]
        receiving: Any = dist.irecv(buffer, peer, self._group, self._places[instruction])

        def pending() -> Tensor:
            receiving.wait()
            return buffer

        return pending
