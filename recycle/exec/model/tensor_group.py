"""The tensor-parallel group of a worker, as megatron-core uses it.

megatron-core's layers keep the group that they were built with. `TensorGroup` therefore lives as long as the process
and passes each all-reduce to the transport of the current generation. Every rank adds the tensors in the order of
tensor ranks, or adds one of T parts and sends the sum to the others. The result is thus the same on all ranks and in
every generation, which `exact` needs; gloo's ring all-reduce adds in varying order. A process sends 2 (T - 1) / T times
a large tensor, as in a ring.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any

import torch
import torch.distributed as dist

from recycle.errors import RunError
from recycle.megatron_versions import describe_group

TensorExchange = Callable[[Sequence[torch.Tensor]], Callable[[], list[torch.Tensor]]]
"""Start to send a tensor to each tensor rank, all of one shape; the returned call waits for the tensors of all."""
SMALL = 8192
"""Elements below which one step with more bytes is faster than two steps."""


class TensorGroup(dist.ProcessGroup):
    """This process's end of the group. Supports only all-reduce, by sum or maximum.

    Attributes:
        exchange: of the current generation's transport; None between generations.
    """

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]
        self.exchange: TensorExchange | None = None
        describe_group(self, "tensor ranks", rank)

    def allreduce(self, tensors: list[torch.Tensor], options: Any = None) -> Any:  # type: ignore[override]
        """Start the all-reduce of one tensor, in place; `wait` of the returned object completes it.

        Raises TransportError if the generation ends first, and RunError if called between generations.
        """
        (tensor,) = tensors
        largest = options is not None and options.reduceOp == dist.ReduceOp.MAX
        return _PendingAllReduce(self, tensor, torch.maximum if largest else torch.add)

    def begin_exchange(self, parts: Sequence[torch.Tensor]) -> Callable[[], list[torch.Tensor]]:
        """Start to send `parts` to the tensor ranks; the returned call gives what they sent to this one, by rank.

        Raises as `allreduce`.
        """
        if self.exchange is None:
            raise RunError("the tensor ranks exchange tensors outside of a generation")
        return self.exchange(parts)

    def gather_all(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """The tensors of all ranks, of one shape. Raises as `allreduce`."""
        return self.begin_exchange([tensor.contiguous()] * self.size())()


class _PendingAllReduce:
    def __init__(
        self, group: TensorGroup, tensor: torch.Tensor, combine: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    ) -> None:
        self._group, self._tensor, self._combine = group, tensor, combine
        self._flat, size = tensor.detach().reshape(-1), group.size()
        # Two ranks send as many bytes in one step as in two.
        self._in_parts = size > 2 and len(self._flat) >= SMALL
        parts = [self._flat] * size
        if self._in_parts:
            parts = list(torch.nn.functional.pad(self._flat, (0, -len(self._flat) % size)).chunk(size))
        self._exchanged: Callable[[], list[torch.Tensor]] | None = group.begin_exchange(parts)

    @torch.no_grad()
    def wait(self, *_: Any) -> bool:
        if self._exchanged is not None:
            exchanged, self._exchanged = self._exchanged, None
            result = reduce(self._combine, exchanged())
            if self._in_parts:
                result = torch.cat(self._group.begin_exchange([result] * self._group.size())())
            self._tensor.copy_(result[: len(self._flat)].view_as(self._tensor))
        return True
