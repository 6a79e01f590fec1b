"""The tensor-parallel group of a worker, as megatron-core uses it.

megatron-core's layers keep the group that they were built with. `TensorGroup` therefore lives as long as the process
and passes each all-reduce to the transport of the current generation. Every rank adds the tensors in the order of
tensor ranks, or adds one of T parts and sends the sum to the others. The result is thus the same on all ranks and in
every generation, which `exact` needs; gloo's ring all-reduce adds in varying order. A process sends 2 (T - 1) / T times
a large tensor, as in a ring. Reduce-scatter adds in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp, Work

from recycle.errors import RunError
from recycle.exec.transport.base import Exchanging, Shapes
from recycle.megatron_versions import describe_group

TensorExchange = Callable[[Sequence[Tensor], Shapes | None], Exchanging]
"""Starts to send a tensor to each tensor rank. Without shapes of what the ranks send, all tensors have one shape."""
SMALL = 8192
"""Elements below which one step with more bytes is faster than two steps."""
_COMBINE: Mapping[Any, Callable[..., Tensor]] = {
    ReduceOp.SUM: torch.add,
    ReduceOp.MAX: torch.maximum,
    ReduceOp.MIN: torch.minimum,
}


def combined(tensors: Sequence[Tensor], op: Any) -> Tensor:
    """The sum, maximum or minimum of tensors, in their order. Raises RunError for another operation."""
    combine = next((function for known, function in _COMBINE.items() if op == known), None)
    if combine is None:
        raise RunError(f"torch.distributed: a reduction by {name_of(op)} has no rule here; use SUM, MAX or MIN")
    return reduce(combine, tensors)


def name_of(op: Any) -> str:
    return next((name for name in ("SUM", "AVG", "PRODUCT", "MIN", "MAX") if op == getattr(ReduceOp, name)), str(op))


class Pending(Work):
    """A collective under way; `finish` waits for it, once."""

    def __init__(self, finish: Callable[[], None] | None = None) -> None:
        super().__init__()
        self._finish = finish

    @torch.no_grad()
    def wait(self, timeout: Any = None) -> bool:
        finish, self._finish = self._finish, None
        if finish is not None:
            finish()
        return True

    def is_completed(self) -> bool:
        return self._finish is None


AnyGroup: Any = ProcessGroup  # its methods have overloads that torch.distributed does not use


class TensorGroup(AnyGroup):  # type: ignore[misc]
    """This process's end of the group: all-reduce, and the collectives of sequence and expert parallelism.

    They are called as torch.distributed calls them. All raise TransportError if the generation ends first, and RunError
    between generations.

    Attributes:
        exchange: of the current generation's transport; None between generations.
    """

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self.exchange: TensorExchange | None = None
        describe_group(self, "tensor ranks", rank)

    def begin_exchange(self, parts: Sequence[Tensor], shapes: Shapes | None = None) -> Exchanging:
        """See `TensorExchange`."""
        if self.exchange is None:
            raise RunError("the tensor ranks exchange tensors outside of a generation")
        return self.exchange(parts, shapes)

    def gather_all(self, tensor: Tensor) -> list[Tensor]:
        """The tensors of all ranks, of one shape."""
        return self.begin_exchange([tensor.contiguous()] * self.size())()

    def allreduce(self, tensors: Sequence[Tensor], options: Any = None) -> Pending:
        """Start the all-reduce of tensors, in place; `wait` of the returned object completes it."""
        op = ReduceOp.SUM if options is None else options.reduceOp
        finishing = [self._begin_sum(tensor, op) for tensor in tensors]

        def finish() -> None:
            for each in finishing:
                each()

        return Pending(finish)

    def _begin_sum(self, tensor: Tensor, op: Any) -> Callable[[], None]:
        flat, size, is_average = tensor.detach().reshape(-1), self.size(), op == ReduceOp.AVG
        # Two ranks send as many bytes in one step as in two.
        in_parts = size > 2 and len(flat) >= SMALL
        parts = [flat] * size
        if in_parts:
            parts = list(torch.nn.functional.pad(flat, (0, -len(flat) % size)).chunk(size))
        exchanged = self.begin_exchange(parts)

        def finish() -> None:
            result = combined(exchanged(), ReduceOp.SUM if is_average else op)
            if in_parts:
                result = torch.cat(self.gather_all(result))
            tensor.copy_(result[: len(flat)].view_as(tensor))
            if is_average:
                tensor.div_(size)

        return finish

    def allgather(self, outputs: Any, tensors: Any, options: Any = None) -> Pending:
        (entries,), (tensor,) = outputs, tensors
        return self._fill(entries, [tensor.detach().contiguous()] * self.size())

    def all_gather_single(self, output: Tensor, tensor: Tensor, options: Any = None) -> Pending:
        return self.allgather([output.view(self.size(), *tensor.shape).unbind()], [tensor])

    def reduce_scatter(self, outputs: Any, tensors: Any, options: Any = None) -> Pending:
        (output,), (parts,) = outputs, tensors
        op = ReduceOp.SUM if options is None else options.reduceOp
        exchanged = self.begin_exchange([part.detach().contiguous() for part in parts], [output.shape] * self.size())
        return Pending(lambda: output.copy_(combined(exchanged(), op)))

    def reduce_scatter_single(self, output: Tensor, tensor: Tensor, options: Any = None) -> Pending:
        return self.reduce_scatter([output], [tensor.view(self.size(), *output.shape).unbind()], options)

    def all_to_all_single(
        self, output: Any, tensor: Any, rows: Sequence[int], sent_rows: Sequence[int], options: Any = None
    ) -> Pending:
        """Without `rows` and `sent_rows` by rank, each rank gets as many."""
        outputs = output.split(list(rows) or len(output) // self.size())
        return self._fill(outputs, tensor.detach().contiguous().split(list(sent_rows) or len(tensor) // self.size()))

    _allgather_base, _reduce_scatter_base, alltoall_base = all_gather_single, reduce_scatter_single, all_to_all_single

    def _fill(self, outputs: Sequence[Tensor], parts: Sequence[Tensor]) -> Pending:
        exchanged = self.begin_exchange(parts, [output.shape for output in outputs])

        def finish() -> None:
            for output, received in zip(outputs, exchanged(), strict=True):
                output.copy_(received)

        return Pending(finish)
