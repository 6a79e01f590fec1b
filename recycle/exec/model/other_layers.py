"""Split backward of layers outside of megatron-core: along the autograd graph, or by the layers themselves.

A stage's graph is searched for matrix products with a parameter. I computes the output gradients of these products but
not their weight gradients. The `WeightGradientStore` gets (input, output gradient) of each, so the graph is freed after
I; without recording, the store computes at once, which is B with the same bits. Norms, embeddings, weights used more
than once in a stage, weights of more than two dimensions, and recomputed layers stay in I.

Transformer Engine's layers delay their weight gradients (`delay_wgrad_compute`) in a queue that does not distinguish
micro-batches. After each backward its entries are therefore moved to the store, and W puts them back one at a time.
Their weights must be the layer's own parameters. Not run with Transformer Engine, which needs a GPU.

Sources: Zero Bubble Pipeline Parallelism, https://arxiv.org/abs/2401.10241, section 2. Interface of delayed layers:
`transformer_engine/pytorch/module/base.py` (`need_backward_dw`, `backward_dw`) and `module/_common.py`
(`WeightGradStore.context`) of Transformer Engine 2.x.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from recycle.errors import RunError
from recycle.exec.model.backward import Deferred, Sink, WeightGradientStore, delays_itself
from recycle.megatron_versions import saved_product

_BIASED, _PLAIN, _TRANSPOSED, _LEAF = "AddmmBackward0", "MmBackward0", "TBackward0", "AccumulateGrad"


class _Product(NamedTuple):
    """A matrix product with a weight.

    Attributes:
        weight: [out, in] if `is_transposed`, as in torch.nn.Linear; else [in, out].
        bias: added by the same node and used nowhere else; None without one.
        inputs: of the product, [rows, in].
    """

    node: Any
    weight: Tensor
    bias: Tensor | None
    inputs: Tensor
    is_transposed: bool


class GraphSplit:
    """Backward of a stage with other layers; puts products into `store` and other gradients into `sink`."""

    def __init__(self, parameters: Sequence[Tensor], store: WeightGradientStore, sink: Sink) -> None:
        self._parameters, self._store, self._sink = list(parameters), store, sink

    def backward(self, output: Tensor, gradient: Tensor | None, entry: Tensor | None) -> Tensor | None:
        """Run the backward from a forward's `output`. Returns the gradient of `entry`, or None without one."""
        products = _products(output.grad_fn)
        in_weights = {weight for product in products for weight in (product.weight, product.bias)}
        # Includes weights of megatron-core's layers, so that autograd runs the nodes that lead only to them.
        other_parameters = [parameter for parameter in self._parameters if parameter not in in_weights]
        edges = [GradientEdge(product.node, 0) for product in products]
        wanted: list[Any] = [*(() if entry is None else (entry,)), *other_parameters, *edges]
        gradients: list[Any] = list(torch.autograd.grad(output, wanted, gradient, allow_unused=True))
        by_entry = None if entry is None else gradients.pop(0)
        for parameter, parameter_gradient in zip(other_parameters, gradients, strict=False):
            if parameter_gradient is not None:
                self._sink(parameter, parameter_gradient)
        for product, output_gradient in zip(products, gradients[len(other_parameters) :], strict=True):
            if output_gradient is None:
                continue
            if product.is_transposed:
                self._store.put(product.weight, product.bias, product.inputs, output_gradient)
            else:
                self._store.put(product.weight, None, output_gradient, product.inputs)
        return by_entry


def _products(root: Any) -> list[_Product]:
    uses: Counter[Any] = Counter()
    nodes = []
    for node in _nodes(root):
        uses.update(child for child, _ in node.next_functions if child is not None and child.name().endswith(_LEAF))
        if node.name() in (_BIASED, _PLAIN):
            nodes.append(node)
    products = []
    for node in nodes:
        factor, _ = node.next_functions[-1]
        is_transposed = factor is not None and factor.name() == _TRANSPOSED
        leaf = factor.next_functions[0][0] if is_transposed else factor
        weight = _single_use_leaf(leaf, uses)
        if weight is None or weight.dim() != 2:
            continue
        is_biased = node.name() == _BIASED
        inputs, is_scaled = saved_product(node, has_addend=is_biased)
        if not is_biased:
            products.append(_Product(node, weight, None, inputs, is_transposed))
        elif is_transposed and not is_scaled:
            bias = _single_use_leaf(node.next_functions[0][0], uses)
            is_output_bias = bias is not None and bias.shape == weight.shape[:1]
            products.append(_Product(node, weight, bias if is_output_bias else None, inputs, True))
    return products


def _single_use_leaf(leaf: Any, uses: Counter[Any]) -> Tensor | None:
    if leaf is None or not leaf.name().endswith(_LEAF) or uses[leaf] != 1:
        return None
    weight: Tensor = leaf.variable
    return weight


def _nodes(root: Any) -> Iterator[Any]:
    seen, waiting = {root}, [root]
    while waiting:
        node = waiting.pop()
        yield node
        for child, _ in node.next_functions:
            if child is not None and child not in seen:
                seen.add(child)
                waiting.append(child)


class DelayedLayers:
    """A stage's layers that delay weight gradients. Raises RunError if a layer accumulates them in its own buffer."""

    def __init__(self, module: torch.nn.Module, store: WeightGradientStore, sink: Sink) -> None:
        self._store, self._sink = store, sink
        self._layers: list[Any] = []
        for name, layer in module.named_modules():
            if not delays_itself(layer):
                continue
            if getattr(layer, "fuse_wgrad_accumulation", False):
                raise RunError(f"{name}: adds weight gradients to its own buffer; set fuse_wgrad_accumulation=False")
            self._layers.append(layer)

    def collect(self) -> None:
        """Move entries from the layers' queues to the store, which computes them now or in W."""
        for layer in self._layers:
            queue = layer.wgrad_store.context
            while not queue.empty():
                entry = queue.get()
                tensors = tuple(part for part in entry[0] if isinstance(part, Tensor))
                weights = tuple(parameter for parameter in layer.parameters(recurse=False) if parameter.dim() > 1)
                self._store.defer(Deferred(weights, tensors, partial(self._compute, layer, entry)))

    def clear(self) -> None:
        for layer in self._layers:
            while not layer.wgrad_store.context.empty():
                layer.wgrad_store.context.get()

    @torch.no_grad()
    def _compute(self, layer: Any, entry: Any) -> None:
        layer.wgrad_store.context.put(entry)
        layer.backward_dw()
        for parameter in layer.parameters(recurse=False):
            gradient, parameter.grad = parameter.grad, None
            if gradient is not None:
                self._sink(parameter, gradient)
