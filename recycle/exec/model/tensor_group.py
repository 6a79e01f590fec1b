"""The tensor-parallel group of a worker, as megatron-core uses it.

megatron-core's layers keep the group that they were built with. `TensorGroup` therefore lives as long as the process
and passes each all-reduce to the transport of the current generation. Every process sends its tensor to all others, and
each adds the tensors in the order of tensor ranks. The result is thus the same on all ranks and in every generation,
which `exact` needs; gloo's ring all-reduce adds in varying order. A process sends T - 1 times its tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from typing import Any

import torch
import torch.distributed as dist

from recycle.errors import RunError
from recycle.megatron_versions import describe_group

TensorExchange = Callable[[torch.Tensor], Callable[[], list[torch.Tensor]]]
"""Start to send a tensor to all members of the worker; the returned call waits and gives all tensors by tensor rank."""


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
        if self.exchange is None:
            raise RunError("all-reduce between tensor ranks outside of a generation")
        (tensor,) = tensors
        largest = options is not None and options.reduceOp == dist.ReduceOp.MAX
        return _PendingAllReduce(
            tensor, self.exchange(tensor.detach().contiguous()), torch.maximum if largest else torch.add
        )


class _PendingAllReduce:
    def __init__(
        self,
        tensor: torch.Tensor,
        exchanged: Callable[[], list[torch.Tensor]],
        combine: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    ) -> None:
        self._tensor, self._combine = tensor, combine
        self._exchanged: Callable[[], list[torch.Tensor]] | None = exchanged

    @torch.no_grad()
    def wait(self, *_: Any) -> bool:
        if self._exchanged is not None:
            exchanged, self._exchanged = self._exchanged, None
            self._tensor.copy_(reduce(self._combine, exchanged()))
        return True
