"""The group inside a worker: torch's all-reduce on it, with sums in the order of tensor ranks."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import reduce
from typing import Any

import pytest
import torch
import torch.distributed as dist

from recycle import RunError
from recycle.exec.model.tensor_group import TensorGroup
from recycle.exec.model.tensor_ranks import ensure_parallel_state
from recycle.exec.transport.base import TransportError


class Board:
    """What the ranks of a test, threads of one process, give each other."""

    def __init__(self, size: int) -> None:
        self._given: list[torch.Tensor] = [torch.empty(0)] * size
        self._met = threading.Barrier(size)

    def exchange(self, rank: int, tensor: torch.Tensor) -> Callable[[], list[torch.Tensor]]:
        def pending() -> list[torch.Tensor]:
            self._given[rank] = tensor.clone()
            self._met.wait(60)
            found = list(self._given)
            self._met.wait(60)
            return found

        return pending


def on_all(size: int, action: Callable[[TensorGroup], torch.Tensor]) -> list[torch.Tensor]:
    board, results = Board(size), [torch.empty(0)] * size

    def run(rank: int) -> None:
        group = TensorGroup(rank, size)
        group.exchange = lambda tensor: board.exchange(rank, tensor)
        results[rank] = action(group)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def addend(rank: int) -> torch.Tensor:
    return torch.randn(1000, generator=torch.Generator().manual_seed(rank))


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize(
    ("size", "operation", "combine"),
    [*((size, dist.ReduceOp.SUM, torch.add) for size in (2, 3, 5)), (2, dist.ReduceOp.MAX, torch.maximum)],
)
def test_every_rank_has_what_all_give_combined_in_the_order_of_ranks(
    size: int, operation: Any, combine: Callable[..., torch.Tensor], is_async: bool
) -> None:
    def action(group: TensorGroup) -> torch.Tensor:
        tensor = addend(group.rank()).reshape(10, 100).t()  # not contiguous
        pending = dist.all_reduce(tensor, operation, group, is_async)
        assert (pending is not None) == is_async
        for _ in range(2) if pending is not None else ():
            pending.wait()
        return tensor

    expected = reduce(combine, map(addend, range(size))).reshape(10, 100).t()
    for found in on_all(size, action):
        assert torch.equal(found, expected)


def test_between_generations_there_is_no_group() -> None:
    group = TensorGroup(1, 2)
    assert (group.rank(), group.size()) == (1, 2)
    with pytest.raises(RunError, match="outside of a generation"):
        dist.all_reduce(torch.ones(1), group=group)


def test_the_error_of_an_exchange_is_what_torch_raises() -> None:
    """Also where torch knows a world of its own, and describes the group of whatever fails."""
    ensure_parallel_state()

    def start(_: torch.Tensor) -> Callable[[], list[torch.Tensor]]:
        raise TransportError("a peer is gone")

    def wait() -> list[torch.Tensor]:
        raise TransportError("the generation is over")

    group = TensorGroup(1, 2)
    for exchange, says in ((start, "a peer is gone"), (lambda _: wait, "the generation is over")):
        group.exchange = exchange
        with pytest.raises(TransportError, match=says):
            dist.all_reduce(torch.ones(1), group=group)
