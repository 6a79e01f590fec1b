"""Tensor parallelism: a worker is T processes that hold a part of each weight, compute together and fail as one."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial, reduce
from typing import Any

import pytest
import torch
import torch.distributed as dist

from recycle import Job, JobError
from recycle.exec.model.tensor_group import TensorGroup
from recycle.exec.model.tensor_ranks import begin_reduce_scatter, ensure_parallel_state, gather_sequences
from recycle.exec.transport.base import TransportError
from tests.exec.runs import calm_run, deaths, figures, job, live_workers, of_kind

STEPS = 5


def gpt(pipelines=2, ranks=2, micro_batches=2, tensor_parallel=2, **sections) -> Job:
    shape = {"tensor_parallel": tensor_parallel} | sections.pop("shape", {})
    return job(pipelines, ranks, micro_batches, "gpt", shape=shape, memory={"limit": 8}, **sections)


def test_killed_and_hung_tensor_ranks_remove_their_workers_which_return_with_the_same_bits(launch):
    tested_job = gpt(membership={"dead_after": 4.0})
    result = launch(tested_job, STEPS, "kill:1.1t1@1", "rejoin:1.1@3", "hang:0.0t1@3", "rejoin:0.0@4")
    one_pipeline = calm_run(gpt(pipelines=1, micro_batches=4), launch, STEPS)
    assert figures(result) == figures(one_pipeline)
    assert result.digests == {f"{k}.{r}": one_pipeline.digests[f"0.{r}"] for k in range(2) for r in range(2)}
    assert live_workers(result) == [4, 3, 3, 3, 4]
    killed, hung = ("1.1", "tensor rank 1 killed by SIGKILL"), ("0.0", "tensor rank 1: no heartbeat for 4 s")
    assert deaths(result) == [killed, hung]
    assert [event["worker"] for event in of_kind(result, "rejoined")] == ["1.1", "0.0"]
    logs = sorted(path.name for path in (result.directory / "logs").iterdir())
    assert [name for name in logs if name.startswith("1.1")] == ["1.1.log", "1.1.trace.jsonl", "1.1t1.log"]


SEQUENCES, EXPERTS = {"sequence_parallel": True}, {"expert_parallel": True}


@pytest.mark.parametrize(
    ("ranks", "shape", "model", "message"),
    [
        (3, {}, {"heads": 4, "hidden": 32}, r"\[model\] heads: 4 is not divisible by tensor_parallel = 3"),
        (3, {}, {"heads": 3, "hidden": 33, "ffn": 64}, r"\[model\] ffn: 64 is not divisible by tensor_parallel = 3"),
        (
            3,
            {},
            {"heads": 3, "hidden": 33, "ffn": 66, "vocabulary": 256},
            r"\[model\] vocabulary: 256 is not divisible by tensor_parallel = 3; pad it to 258",
        ),
        (1, SEQUENCES, {}, r"\[shape\] sequence_parallel: needs tensor_parallel of at least 2"),
        (2, SEQUENCES, {"sequence": 15}, r"\[model\] sequence: 15 is not divisible by tensor_parallel = 2"),
        (2, SEQUENCES, {"kind": "emulated"}, r"\[shape\] sequence_parallel: is for models that recycle builds"),
        (2, SEQUENCES, {"provider": "a:b"}, r"\[shape\] sequence_parallel: is for models that recycle builds"),
        (1, EXPERTS, {}, r"\[shape\] expert_parallel: needs tensor_parallel of at least 2"),
        (2, EXPERTS, {}, r"\[shape\] expert_parallel: is for mixtures of experts that recycle builds"),
        (3, EXPERTS, {"kind": "mixtral"}, r"num_moe_experts: 8 is not divisible by tensor_parallel = 3"),
    ],
)
def test_indivisible_model_is_refused(ranks, shape, model, message):
    with pytest.raises(JobError, match=message):
        gpt(tensor_parallel=ranks, shape=shape, model=model)


class Exchanges:
    """Exchanges between tensor ranks that are threads; `moved` counts the elements that each sends to others."""

    def __init__(self, size: int):
        self.size, self.moved = size, [0] * size
        self._sent = [()] * size
        self._all_came = threading.Barrier(size, timeout=60)

    def begin(
        self, rank: int, parts: Sequence[torch.Tensor], shapes: Sequence[torch.Size] | None = None
    ) -> Callable[[], list[torch.Tensor]]:
        assert all(part.is_contiguous() for part in parts)
        self.moved[rank] += sum(part.numel() for other, part in enumerate(parts) if other != rank)
        self._sent[rank] = parts

        def wait():
            self._all_came.wait()
            received = [parts[rank].clone() for parts in self._sent]
            self._all_came.wait()
            return received

        return wait

    def run(self, call: Callable[[int, TensorGroup], Any]):
        """Run `call(rank, group)` for all ranks at once, and return the results by rank."""

        def of_rank(rank):
            group = TensorGroup(rank, self.size)
            group.exchange = partial(self.begin, rank)
            return call(rank, group)

        with ThreadPoolExecutor(self.size) as pool:
            return list(pool.map(of_rank, range(self.size)))


def addends(size: int, *shape: int) -> list[torch.Tensor]:
    return [torch.randn(shape, generator=torch.Generator().manual_seed(rank)) for rank in range(size)]


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize(
    ("size", "rows", "operation", "combine"),
    [
        *((size, rows, dist.ReduceOp.SUM, torch.add) for size in (2, 3, 8) for rows in (10, 1237)),
        (3, 1237, dist.ReduceOp.MAX, torch.maximum),
        (2, 10, dist.ReduceOp.AVG, lambda first, second: (first + second) / 2),
    ],
)
def test_all_reduce_combines_in_the_order_of_ranks(size, rows, operation, combine, is_async):
    given, exchanges = [each.t() for each in addends(size, 7, rows)], Exchanges(size)  # not contiguous

    def all_reduce(rank, group):
        tensor = given[rank].clone()
        pending = dist.all_reduce(tensor, operation, group, is_async)
        assert (pending is not None) == is_async
        for _ in range(2) if pending is not None else ():
            pending.wait()
        return tensor

    for tensor in exchanges.run(all_reduce):
        assert torch.equal(tensor, reduce(combine, given))
    padded = -(-7 * rows // size) * size
    small = (size - 1) * 7 * rows
    assert exchanges.moved == [small if rows == 10 or size == 2 else 2 * (size - 1) * padded // size] * size


def test_sequences_are_scattered_and_gathered_with_the_bytes_of_a_ring():
    size = 4
    given, exchanges = addends(size, 8, 3, 5), Exchanges(size)
    scattered = exchanges.run(lambda rank, group: begin_reduce_scatter(given[rank], group)())
    assert torch.equal(torch.cat(scattered), reduce(torch.add, given))
    assert exchanges.moved == [(size - 1) * 2 * 15] * size
    for gathered in exchanges.run(lambda rank, group: gather_sequences(scattered[rank], group)):
        assert torch.equal(gathered, torch.cat(scattered))
    assert exchanges.moved == [2 * (size - 1) * 2 * 15] * size


def test_each_rank_gets_the_rows_that_are_for_it():
    rows = [[1, 2, 0], [0, 3, 1], [2, 0, 0]]  # of a rank, for each rank
    given = [torch.randn(sum(of_rank), 4) for of_rank in rows]

    def exchange(rank, group):
        received = [of_rank[rank] for of_rank in rows]
        output = torch.empty(sum(received), 4)
        dist.all_to_all_single(output, given[rank], received, rows[rank], group)
        return output

    parts = [tensor.split(of_rank) for tensor, of_rank in zip(given, rows, strict=True)]
    for rank, output in enumerate(Exchanges(3).run(exchange)):
        assert torch.equal(output, torch.cat([part[rank] for part in parts]))


def test_torch_raises_the_error_of_an_exchange():
    """Also after torch.distributed is initialized, when torch describes the group of a failed operation."""
    ensure_parallel_state()

    def start(*_):
        raise TransportError("a peer is gone")

    def wait():
        raise TransportError("the generation is over")

    group = TensorGroup(1, 2)
    for exchange, message in ((start, "a peer is gone"), (lambda *_: wait, "the generation is over")):
        group.exchange = exchange
        with pytest.raises(TransportError, match=message):
            dist.all_reduce(torch.ones(1), group=group)
