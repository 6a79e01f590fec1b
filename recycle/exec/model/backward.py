"""Split backward of megatron-core's linear layers: input gradient (I) at once, weight gradient (W) later.

Every tensor-parallel linear layer gets its own computation, whose backward returns the input gradient and puts (input,
output gradient) into a `WeightGradientStore`. W computes the weight gradients from it. Without recording, it computes
them at once, which is B. Gradients go to the store's sink, never to `.grad`, so I + W and B yield the same bits.

Refuses fused gradient accumulation and a gradient output buffer.
Limits: norms, embeddings, routers and biases that a layer does not add itself get their gradients in I, by autograd.

Source: Zero Bubble Pipeline Parallelism, https://arxiv.org/abs/2401.10241, section 2.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import cache
from typing import Any, NamedTuple

import torch
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn import Module

from recycle import megatron_versions as versions
from recycle.errors import RunError
from recycle.exec.model.tensor_ranks import begin_reduce_scatter, gather_sequences
from recycle.job.shape import MicroBatch

LINEAR_CLASSES = (ColumnParallelLinear, RowParallelLinear)

Sink = Callable[[Tensor, Tensor], None]
"""Takes (parameter, its gradient of one micro-batch)."""
Product = Callable[[Tensor, Tensor, Tensor], None]
"""Takes (weight [out, in], output gradient [rows, out], input [rows, in])."""


class Deferred(NamedTuple):
    """Deferred weight-gradient computation of one layer; `tensors` are its inputs besides the weights."""

    weights: tuple[Tensor, ...]
    tensors: tuple[Tensor, ...]
    compute: Callable[[], None]


class WeightGradientStore:
    """Deferred weight-gradient computations, per micro-batch.

    Args:
        sink: receives each bias gradient, and each weight gradient if `product` is None.
        product: receives the factors of a weight gradient rows^T x inputs, to add their product without a temporary.
    """

    def __init__(self, sink: Sink, product: Product | None = None) -> None:
        self._sink = sink
        self._product = product or (lambda weight, rows, inputs: sink(weight, rows.t().matmul(inputs)))
        self._waiting: dict[MicroBatch, deque[Deferred]] = {}
        self._recording: deque[Deferred] | None = None

    @contextmanager
    def record(self, micro_batch: MicroBatch) -> Iterator[None]:
        """Defer weight gradients of backwards inside the block until `flush(micro_batch)`."""
        self._recording = self._waiting.setdefault(micro_batch, deque())
        try:
            yield
        finally:
            self._recording = None

    def put(
        self,
        weight: Tensor,
        bias: Tensor | None,
        inputs: Tensor,
        gradient: Tensor,
        sequences: ProcessGroup | None = None,
    ) -> None:
        """Compute the gradients of `weight` and `bias`, or defer them while recording.

        Args:
            weight: [out, in].
            bias: [out], or None.
            inputs: of the layer, [..., in].
            gradient: of the loss with respect to the layer's output, [..., out].
            sequences: the group over which the input's sequences are split; None if each rank has them whole.
        """
        # Detached: the saved input would keep the graph before it alive until W.
        inputs, gradient = inputs.detach(), gradient.detach()

        # A summed gradient with a graph would keep its micro-batch's activations alive; no_grad is for the sink, too.
        @torch.no_grad()
        def compute() -> None:
            whole = inputs if sequences is None else gather_sequences(inputs, sequences)
            rows = gradient.reshape(-1, gradient.shape[-1])
            self._product(weight, rows, whole.reshape(-1, whole.shape[-1]))
            if bias is not None:
                self._sink(bias, rows.sum(dim=0))

        self.defer(Deferred((weight,), (inputs, gradient), compute))

    def defer(self, work: Deferred) -> None:
        if self._recording is None:
            work.compute()
        else:
            self._recording.append(work)

    def flush(self, micro_batch: MicroBatch) -> None:
        """Run the deferred computations of `micro_batch` in the order in which I recorded them."""
        waiting = self._waiting.pop(micro_batch)
        # Each entry is released once computed, so memory falls during W.
        while waiting:
            waiting.popleft().compute()

    def flush_some(self, micro_batch: MicroBatch, wanted: Callable[[Tensor], bool]) -> None:
        """Run only the deferred computations of the `wanted` weights and their biases; `flush` runs the rest."""
        waiting = self._waiting[micro_batch]
        for _ in range(len(waiting)):
            work = waiting.popleft()
            if any(map(wanted, work.weights)):
                work.compute()
            else:
                waiting.append(work)

    def held(self, micro_batch: MicroBatch) -> list[Tensor]:
        """The tensors that W of `micro_batch` still needs besides the weights; [] before its I."""
        return [part for work in self._waiting.get(micro_batch, ()) for part in work.tensors]

    def clear(self) -> None:
        self._waiting.clear()
        self._recording = None


class _SplitLinear(torch.autograd.Function):
    """x W^T + b, with a backward that passes the weight gradient to a store.

    Autograd does not see weight and bias, so none of their hooks runs in I without a gradient. `anchor` is the weight
    if the input needs no gradient, else None; it keeps the layer in the graph.
    """

    @staticmethod
    def forward(
        ctx: Any,
        inputs: Tensor,
        anchor: Tensor | None,
        weights: tuple[Tensor, Tensor | None],
        store: WeightGradientStore,
        reduce_group: Any,
        sequences: ProcessGroup | None,
    ) -> Tensor:
        ctx.save_for_backward(inputs)
        # Not saved: recomputation would return another tensor object, and the store identifies weights by object.
        weight, bias = ctx.weights = weights
        ctx.store, ctx.reduce_group, ctx.sequences = store, reduce_group, sequences
        output = torch.matmul(inputs if sequences is None else gather_sequences(inputs, sequences), weight.t())
        return output if bias is None else output + bias

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None, None, None]:
        (inputs,) = ctx.saved_tensors
        weight, bias = ctx.weights
        input_gradient = gradient.matmul(weight)
        if ctx.sequences is not None:
            scattering = begin_reduce_scatter(input_gradient, ctx.sequences)
            ctx.store.put(weight, bias, inputs, gradient, ctx.sequences)
            return scattering(), None, None, None, None, None
        pending = None
        if ctx.reduce_group is not None:
            pending = torch.distributed.all_reduce(input_gradient, group=ctx.reduce_group, async_op=True)
        ctx.store.put(weight, bias, inputs, gradient)
        if pending is not None:
            pending.wait()
        return input_gradient, None, None, None, None, None


def _split_forward(store: WeightGradientStore, layer: str) -> Callable[..., Tensor]:
    """Return the computation of a layer, which takes megatron-core's arguments."""

    def forward(
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        gradient_accumulation_fusion: bool,
        allreduce_dgrad: bool,
        sequence_parallel: bool,
        grad_output_buffer: list[Tensor] | None = None,
        wgrad_deferral_limit: int | None = None,
        tp_group: Any = None,
        **others: Any,
    ) -> Tensor:
        neutral = versions.linear_defaults()
        _refuse(layer, {name: name not in neutral or value != neutral[name] for name, value in others.items()})
        group, sequences = tp_group if allreduce_dgrad else None, tp_group if sequence_parallel else None
        anchor = None if input.requires_grad else weight
        output: Tensor = _SplitLinear.apply(  # type: ignore[no-untyped-call]
            input, anchor, (weight, bias), store, group, sequences
        )
        return output

    return forward


class SplitLinears:
    """Gives a model's trained tensor-parallel linear layers the split backward, inside a block or for good (`split`).

    Raises RunError for an unsupported megatron-core or feature.
    """

    def __init__(self, model: Module, store: WeightGradientStore) -> None:
        require_exact_split()
        self._split = [
            (layer, _split_forward(store, name))
            for name, layer in _linears(model).items()
            if layer.weight is None or layer.weight.requires_grad
        ]

    def split(self) -> None:
        for layer, forward in self._split:
            versions.set_linear_hook(layer, forward)

    __enter__ = split

    def __exit__(self, *failure: object) -> None:
        for layer, _ in self._split:
            versions.remove_linear_hook(layer)


def _linears(model: Module) -> dict[str, Any]:
    layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, LINEAR_CLASSES)}
    for name, layer in layers.items():
        _refuse(
            name,
            {
                "gradient_accumulation_fusion": layer.gradient_accumulation_fusion,
                "defer_embedding_wgrad_compute": layer.config.defer_embedding_wgrad_compute,
            },
        )
    return layers


def delays_itself(layer: Module) -> bool:
    """Whether a layer delays its weight gradients until `backward_dw`, as Transformer Engine's layers can."""
    store = getattr(layer, "wgrad_store", None)
    return store is not None and callable(getattr(layer, "backward_dw", None)) and bool(store.delay_wgrad_compute())


class _OneRank:
    def size(self) -> int:
        return 1

    def rank(self) -> int:
        return 0


@cache
def require_exact_split() -> None:
    """Raise RunError unless I and W together, and B, have the bits of megatron-core's own backward.

    Runs two tiny layers on the CPU, once per process. Needs megatron-core's `parallel_state`.
    """
    config = TransformerConfig(
        num_layers=1,
        hidden_size=8,
        num_attention_heads=1,
        use_cpu_initialization=True,
        perform_initialization=False,
        gradient_accumulation_fusion=False,
    )
    options = {"config": config, "init_method": lambda _: None, "tp_group": _OneRank(), "skip_bias_add": False}
    column = ColumnParallelLinear(8, 12, bias=True, **options)
    row = RowParallelLinear(12, 8, bias=False, input_is_parallel=True, **options)
    parameters, entry, micro_batch = [column.weight, column.bias, row.weight], _wave(3, 2, 8), MicroBatch(0, 0)
    for parameter in parameters:
        parameter.data = _wave(*parameter.shape)

    def gradients(is_split: bool) -> list[Tensor | None]:
        for tensor in (*parameters, entry.requires_grad_()):
            tensor.grad = None
        with torch.enable_grad():
            loss = row(torch.tanh(column(entry)[0]))[0].square().sum()
        with store.record(micro_batch) if is_split else nullcontext():
            loss.backward()
        if is_split:
            store.flush(micro_batch)
        return [entry.grad, *(sums.pop(parameter, parameter.grad) for parameter in parameters)]

    sums: dict[Tensor, Tensor] = {}
    store = WeightGradientStore(sums.__setitem__)
    expected = gradients(is_split=False)
    for layer in (column, row):
        versions.set_linear_hook(layer, _split_forward(store, type(layer).__name__))
    for kind, is_split in (("split", True), ("whole", False)):
        for gradient, other in zip(expected, gradients(is_split), strict=True):
            if gradient is None or other is None or not torch.equal(gradient, other):
                raise RunError(
                    f"the {kind} backward of linear layers has other gradients than {versions.installed()}; install a"
                    " supported version"
                )


def _wave(*shape: int) -> Tensor:
    return torch.arange(math.prod(shape), dtype=torch.float32).mul_(1.7).sin_().view(shape)


def _refuse(layer: str, uses: dict[str, Any]) -> None:
    for name, used in uses.items():
        if used:
            raise RunError(f"{layer}: the split backward does not support {name}; switch it off in the model's config")


def holds_matrix(layer: Module) -> bool:
    """Whether a layer holds a weight matrix and is not an embedding, a router or one of `LINEAR_CLASSES`."""
    if isinstance(layer, LINEAR_CLASSES):
        return False
    weight = dict(layer.named_parameters(recurse=False)).get("weight")
    stays = any(kind in type(layer).__name__ for kind in ("Embedding", "Router"))
    return weight is not None and weight.dim() == 2 and not stays
