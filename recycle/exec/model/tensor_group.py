"""The tensor-parallel group of a worker, as megatron-core sees it: it outlives generations.

megatron-core's layers keep the group that they were built with. So they get one that stands as long as the process and
hands each all-reduce to whatever transport the current generation has: nothing in the model changes when groups form
anew, and a process that waits for its partner is woken like in any other wait on the transport.

An all-reduce sends every process's tensor to all others, and each adds them up in the order of tensor ranks. So the
result is the same on all of them, in every generation and for every T, which `exact` needs; gloo's own ring gives
another order of additions for each part of the tensor. Per all-reduce a process sends T - 1 times its tensor: as much
as a ring for T = 2, (T / 2) times as much beyond.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from typing import Any

import torch
import torch.distributed as dist

from recycle.errors import RunError

TensorExchange = Callable[[torch.Tensor], Callable[[], list[torch.Tensor]]]
"""Starts to give a tensor to all members of the worker; the call returned waits, and has everyone's by tensor rank."""


class TensorGroup(dist.ProcessGroup):
    """This process's end of the group. Only all-reduce is known, by sum or maximum.

    Args:
        rank: tensor rank of this process.
        size: T.

    Attributes:
        exchange: of the generation's transport; None while none stands.
    """

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]
        self.exchange: TensorExchange | None = None
        # Of an all-reduce that fails, and when its profiler starts, torch describes the group, and where it has none in
        # its tables, which of all processes (a world of one) has which rank, it raises an error of its own instead.
        world: Any = dist.distributed_c10d._world
        world.pg_map[self] = ("recycle", None)
        world.pg_names[self], world.pg_backend_config[self] = "tensor ranks", "recycle"
        world.pg_group_ranks[self] = {0: rank}

    def allreduce(self, tensors: list[torch.Tensor], options: Any = None) -> Any:  # type: ignore[override]
        """Start the all-reduce of one tensor, in place; the result is there after `wait` of what is returned.

        Raises:
            TransportError: the generation ends first.
            RunError: there is none.
        """
        if self.exchange is None:
            raise RunError("an all-reduce between tensor ranks outside of a generation")
        (tensor,) = tensors
        largest = options is not None and options.reduceOp == dist.ReduceOp.MAX
        return _Summing(tensor, self.exchange(tensor.detach().contiguous()), torch.maximum if largest else torch.add)


class _Summing:
    """An all-reduce under way; waiting a second time does nothing."""

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
