"""Layers that are not megatron-core's, split along the graph or by themselves: what goes to W, and the same bits."""

import gc
import queue
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from recycle import Job, MicroBatch, RunError
from recycle.exec.model.backward import WeightGradientStore
from recycle.exec.model.build import build_stages
from recycle.exec.model.megatron_stage import MegatronStage
from recycle.exec.model.other_layers import GraphSplit
from recycle.exec.model.providers import Providers
from tests.exec.drive import CPU, differing, gradients_by_name, run_deferred, run_pipelines, small_job

pytestmark = pytest.mark.slow

BATCH = MicroBatch(0, 0)


class Gradients(dict[torch.Tensor, torch.Tensor]):
    """A sink."""

    def __call__(self, parameter: torch.Tensor, gradient: torch.Tensor):
        self[parameter] = self.get(parameter, 0) + gradient


class Bare(nn.Module):
    """Weights by name, and a forward of them."""

    def __init__(self, forward: Callable[..., torch.Tensor], **shapes: tuple[int, ...]):
        super().__init__()
        torch.manual_seed(0)
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.randn(shape)))
        self.compute = forward

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.compute(self, inputs)


def once(model: nn.Module, inputs: torch.Tensor, whole=False) -> tuple[Any, list[str], list[str]]:
    """Gradients of the input and of all parameters; the names of those in I; of those in W."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    gradients = Gradients()
    store = WeightGradientStore(gradients)
    graph = GraphSplit(list(names), store, gradients)
    output = model(inputs).square().sum()
    if whole:
        by_entry = graph.backward(output, None, inputs if inputs.requires_grad else None)
        return (by_entry, dict(sorted((names[parameter], g) for parameter, g in gradients.items()))), [], []
    with store.record(BATCH):
        by_entry = graph.backward(output, None, inputs if inputs.requires_grad else None)
    early = sorted(names[parameter] for parameter in gradients)
    store.flush(BATCH)
    late = sorted(names[parameter] for parameter in gradients if names[parameter] not in early)
    return (by_entry, dict(sorted((names[parameter], g) for parameter, g in gradients.items()))), early, late


def linear(inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    return nn.functional.linear(inputs, weight, bias)


CASES = {
    "linear": (nn.Linear(6, 6), [], ["bias", "weight"]),
    "no bias": (nn.Linear(6, 4, bias=False), [], ["weight"]),
    "norm": (nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 6)), ["0.bias", "0.weight"], ["1.bias", "1.weight"]),
    "own product": (Bare(lambda m, x: (x @ m.a).tanh() @ m.b.t() + m.c, a=(6, 4), b=(6, 4), c=(6,)), ["c"], ["a", "b"]),
    "weight used twice": (Bare(lambda m, x: linear(linear(x, m.a).tanh(), m.a), a=(6, 6)), ["a"], []),
    "bias used twice": (
        Bare(lambda m, x: linear(linear(x, m.a, m.b).tanh(), m.c, m.b), a=(6, 6), b=(6,), c=(6, 6)),
        ["b"],
        ["a", "c"],
    ),
    "scaled weight": (Bare(lambda m, x: linear(x, 2 * m.a), a=(6, 6)), ["a"], []),
    "batched weights": (Bare(lambda m, x: torch.bmm(x, m.a), a=(3, 6, 4)), ["a"], []),
    "convolution": (Bare(lambda m, x: nn.functional.conv1d(x, m.a), a=(2, 5, 3)), ["a"], []),
    "without the input": (Bare(lambda m, x: x + linear(m.a, m.b), a=(5, 4), b=(6, 4)), ["a"], ["b"]),
    "one that is not used": (Bare(lambda m, x: linear(x, m.a), a=(6, 6), b=(6, 6)), [], ["a"]),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("has_entry", [True, False])
def test_matrix_products_run_in_w_and_others_in_i(case, has_entry):
    model, early, late = CASES[case]

    def inputs():
        return torch.randn(3, 5, 6, generator=torch.Generator().manual_seed(1)).requires_grad_(has_entry)

    split_up, found_early, found_late = once(model, inputs())
    assert (found_early, found_late) == (early, late)
    whole, _, _ = once(model, inputs(), whole=True)
    assert (split_up[0] is None) == (not has_entry)
    assert split_up[0] is None or torch.equal(split_up[0], whole[0])
    assert split_up[1].keys() == whole[1].keys()
    assert all(torch.equal(split_up[1][name], whole[1][name]) for name in whole[1])
    plain = inputs()
    model.zero_grad()
    model(plain).square().sum().backward()
    if has_entry:
        torch.testing.assert_close(split_up[0], plain.grad, rtol=1e-5, atol=1e-5)
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            torch.testing.assert_close(split_up[1][name], parameter.grad, rtol=1e-5, atol=1e-5)


def test_graph_is_freed_between_i_and_w():
    model = nn.Sequential(nn.Linear(6, 6), nn.GELU(), nn.Linear(6, 6))
    gradients = Gradients()
    store = WeightGradientStore(gradients)
    entry = torch.randn(3, 6).requires_grad_()
    watched = weakref.ref(entry)
    with store.record(BATCH):
        GraphSplit(list(model.parameters()), store, gradients).backward(model(entry * 2).sum(), None, entry)
    del entry
    gc.collect()
    assert watched() is None
    assert len(store.held(BATCH)) == 4
    assert not gradients


class Delays:
    """Delayed computations of a layer: entries of [tensors, function], oldest first."""

    def __init__(self):
        self.context = queue.Queue()

    def delay_wgrad_compute(self) -> bool:
        return True


def weight_gradient(inputs: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    return gradient.reshape(-1, gradient.shape[-1]).t().matmul(inputs.reshape(-1, inputs.shape[-1]))


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, inputs: torch.Tensor, weight: torch.Tensor, delays: Delays) -> torch.Tensor:
        ctx.save_for_backward(inputs, weight)
        ctx.delays = delays
        return torch.matmul(inputs, weight.t())

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        inputs, weight = ctx.saved_tensors
        ctx.delays.context.put([[inputs, gradient], weight_gradient])
        return gradient.matmul(weight), None, None


class DelayedLinear(nn.Linear):
    """A linear layer whose weight gradients wait for `backward_dw`; autograd computes the bias gradients."""

    fuse_wgrad_accumulation = False

    def __init__(self, inputs: int, outputs: int, bias=True):
        super().__init__(inputs, outputs, bias)
        self.wgrad_store = Delays()

    def product(self, inputs: torch.Tensor) -> torch.Tensor:
        return Product.apply(inputs, self.weight, self.wgrad_store)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.product(inputs) + self.bias

    def backward_dw(self):
        tensors, function = self.wgrad_store.context.get_nowait()
        self.weight.grad = function(*tensors)


class Stack(nn.Module):
    """A stage of plain layers, [rows, sequence, hidden], of the kind `linear`."""

    linear: type[nn.Linear] = nn.Linear

    def __init__(self, job: Job, first: int, last: int, pre_process: bool, post_process: bool):
        super().__init__()
        hidden = job.model.hidden
        self.message_shape = (job.data.micro_batch_size, job.model.sequence, hidden)
        self.embedding = nn.Embedding(job.model.vocabulary, hidden) if pre_process else nn.Identity()
        self.layers = nn.ModuleList(
            nn.Sequential(
                nn.LayerNorm(hidden),
                self.linear(hidden, 2 * hidden),
                nn.GELU(),
                self.linear(2 * hidden, hidden),
                nn.Dropout(job.model.dropout),
            )
            for _ in range(first, last)
        )
        self.head = nn.Linear(hidden, job.model.vocabulary, bias=False) if post_process else nn.Identity()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(inputs)
        for layer in self.layers:
            hidden = hidden + layer(hidden)
        return self.head(hidden)


class Delayed(Stack):
    linear = DelayedLinear


class Fused(DelayedLinear):
    fuse_wgrad_accumulation = True


class FusedStack(Stack):
    linear = Fused


def pipeline(job: Job, kind: type[Stack] = Stack) -> list[MegatronStage]:
    stages = [build_stages(job, [index], CPU, providers=Providers(kind))[index] for index in range(job.shape.stages)]
    return [stage for stage in stages if isinstance(stage, MegatronStage)]


@pytest.mark.parametrize(
    ("kind", "precision", "recompute"),
    [
        (Stack, "fp32", "none"),
        (Stack, "bf16", "full"),
        (Stack, "fp32", "layers"),
        (Delayed, "bf16", "none"),
        (Delayed, "fp32", "full"),
        (Delayed, "bf16", "layers"),
    ],
)
def test_i_and_deferred_w_in_any_order_equal_whole_b(kind, precision, recompute):
    job = small_job(model={"recompute": recompute}, train={"precision": precision})
    whole, deferred = pipeline(job, kind), pipeline(job, kind)
    run_pipelines([whole], 5, 4)
    run_deferred(deferred, 5)
    assert whole[-1].loss_sum() == deferred[-1].loss_sum()
    gradients = gradients_by_name(whole)
    assert all(gradient.any() for gradient in gradients.values())
    assert differing(gradients, gradients_by_name(deferred)) == []
    placed = {name: half for stage in deferred for name, half in stage.placement().items()}
    assert placed.keys() == gradients.keys()
    # A layer that runs again is not looked at, since that would run it once more; one that delays by itself does.
    parts = ("weight",) if kind is Delayed else ("weight", "bias")
    products = {f"layers.{layer}.{place}.{part}" for layer in range(4) for place in (1, 3) for part in parts}
    delayed = products if kind is Delayed or recompute != "layers" else set()
    assert {name for name, half in placed.items() if half == "W"} == delayed | (
        {"head.weight"} if recompute != "layers" else set()
    )


def test_layer_with_its_own_gradient_buffer_is_refused():
    with pytest.raises(RunError, match=r"layers\.0\.1: adds weight gradients to its own buffer"):
        pipeline(small_job(), FusedStack)
