"""Layers that delay their weight gradients themselves, by the interface of Transformer Engine's."""

from __future__ import annotations

import queue
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from recycle import Job
from recycle.errors import RunError
from recycle.exec.model.build import build_stages
from recycle.exec.model.megatron_stage import MegatronStage
from recycle.exec.model.providers import Providers
from tests.exec.drive import CPU, differing, execute, gradients_by_name, micro_batches, one_f_one_b, small_job, split

pytestmark = pytest.mark.slow


class Delays:
    """What a layer computes later: entries of [tensors, function], oldest first."""

    def __init__(self) -> None:
        self.context: queue.Queue[Any] = queue.Queue()

    def delay_wgrad_compute(self) -> bool:
        return True

    def put(self, tensors: list[torch.Tensor], function: Callable[..., Any]) -> None:
        self.context.put([tensors, function])

    def pop(self) -> Any:
        tensors, function = self.context.get_nowait()
        return function(*tensors), tensors


def weight_gradients(inputs: torch.Tensor, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    rows = gradient.reshape(-1, gradient.shape[-1])
    return rows.t() @ inputs.reshape(-1, inputs.shape[-1]), rows.sum(0)


class Product(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, store: Delays
    ) -> torch.Tensor:
        ctx.save_for_backward(inputs, weight)
        ctx.store = store
        return inputs @ weight.t() + bias

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:  # type: ignore[override]
        inputs, weight = ctx.saved_tensors
        ctx.store.put([inputs, gradient], weight_gradients)
        return gradient @ weight, None, None, None


class DelayedLinear(nn.Linear):
    """A linear layer whose weight gradients wait for `backward_dw`."""

    fuse_wgrad_accumulation = False

    def __init__(self, inside: int, outside: int) -> None:
        super().__init__(inside, outside)
        self.wgrad_store = Delays()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = Product.apply(inputs, self.weight, self.bias, self.wgrad_store)  # type: ignore[no-untyped-call]
        return output

    def backward_dw(self) -> None:
        (of_weight, of_bias), _ = self.wgrad_store.pop()
        self.weight.grad, self.bias.grad = of_weight, of_bias


class Stack(nn.Module):
    """A stage of layers of the kind `linear`."""

    linear: type[nn.Linear] = DelayedLinear

    def __init__(self, job: Job, first: int, last: int, pre_process: bool, post_process: bool) -> None:
        super().__init__()
        hidden = job.model.hidden
        self.message_shape = (job.data.micro_batch_size, job.model.sequence, hidden)
        self.embedding = nn.Embedding(job.model.vocabulary, hidden) if pre_process else nn.Identity()
        self.layers = nn.ModuleList(
            nn.Sequential(
                nn.LayerNorm(hidden), self.linear(hidden, 2 * hidden), nn.GELU(), self.linear(2 * hidden, hidden)
            )
            for _ in range(first, last)
        )
        self.head = nn.Linear(hidden, job.model.vocabulary, bias=False) if post_process else nn.Identity()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(inputs)
        for layer in self.layers:
            hidden = hidden + layer(hidden)
        output: torch.Tensor = self.head(hidden)
        return output


class Plain(Stack):
    linear = nn.Linear


class Fused(DelayedLinear):
    fuse_wgrad_accumulation = True


class FusedStack(Stack):
    linear = Fused


def pipeline(job: Job, kind: type[Stack]) -> list[MegatronStage]:
    stages = [build_stages(job, [index], CPU, providers=Providers(kind))[index] for index in range(job.shape.stages)]
    return [stage for stage in stages if isinstance(stage, MegatronStage)]


def trained(job: Job, kind: type[Stack], late: bool) -> list[MegatronStage]:
    batches, stages = micro_batches(0, 4), pipeline(job, kind)
    for stage in stages:
        stage.begin_iteration(5)
    orders = [one_f_one_b(stage.index, 2, batches) for stage in stages]
    if late:
        orders = [split(order, [batches[place] for place in (3, 1, 0, 2)]) for order in orders]
    execute(zip(stages, orders, strict=True))
    return stages


@pytest.mark.parametrize("recompute", ["none", "full", "layers"])
def test_w_in_any_order_gives_the_bits_of_the_whole_backward(recompute: str) -> None:
    job = small_job(model={"recompute": recompute})
    whole, deferred, plain = trained(job, Stack, False), trained(job, Stack, True), trained(job, Plain, False)
    gradients = gradients_by_name(whole)
    assert differing(gradients, gradients_by_name(deferred)) == []
    # The same products as torch.nn.Linear's, so the same bits.
    assert differing(gradients, gradients_by_name(plain)) == []
    placed = {name: half for stage in deferred for name, half in stage.placement().items()}
    delayed = {f"layers.{layer}.{n}.{kind}" for layer in range(4) for n in (1, 3) for kind in ("weight", "bias")}
    assert {name for name, half in placed.items() if half == "W"} >= delayed


def test_what_w_needs_is_held_and_what_was_broken_off_is_forgotten() -> None:
    job = small_job()
    stage = pipeline(job, Stack)[1]
    (batch,) = micro_batches(0, 1)
    shape = (job.data.micro_batch_size, job.model.sequence, job.model.hidden)
    stage.begin_iteration(0)
    stage.forward(batch, torch.ones(shape))
    stage.backward_input(batch, None)
    # Two layers of two products each, and the head: (input, gradient by the output) of each.
    assert len(stage._store.held(batch)) == 2 * 5
    stage.begin_iteration(0)
    assert stage._store.held(batch) == []


def test_a_layer_that_adds_to_its_own_buffer_is_refused() -> None:
    with pytest.raises(RunError, match=r"layers\.0\.1: adds weight gradients to a buffer of its own"):
        pipeline(small_job(), FusedStack)
