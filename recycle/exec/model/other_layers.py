"""The split backward of layers that are not megatron-core's: along the autograd graph, or by themselves.

A stage's graph is looked through for matrix products with a parameter: those of `torch.nn.Linear`, of
`torch.nn.functional.linear` and of `x @ weight`, wherever they are written. I computes the gradients that flow into
these products, and no gradient by their weights; W gets (input, gradient by the output) of each by the same
`WeightGradientStore` as megatron-core's layers, so the graph is let go of after I. Without a recording store the store
computes at once: that is B, the same products to the same bits.

Everything else stays in I, where it costs less: a norm's or an embedding's own gradients come from one pass over what
I has at hand, and W would have to hold that. So do a weight that is used more than once in a stage, products with
more than two dimensions of weights, and layers that run again in their backward.

Transformer Engine's layers delay their weight gradients themselves, with `delay_wgrad_compute`: the backward puts
(tensors, function) into the queue of the layer's `wgrad_store`, and `backward_dw` takes the oldest entry and leaves the
gradients in `.grad`. That queue knows no micro-batches: after each backward the entries are moved to the stage's
`WeightGradientStore`, and put back one at a time when W wants them, in whatever order.

Splitting along the graph: `torch.distributed.pipelining`, which keeps the graph between I and W instead; the idea is
from Zero Bubble Pipeline Parallelism, https://arxiv.org/abs/2401.10241, section 2. Interface of delayed layers:
`transformer_engine/pytorch/module/base.py` (`need_backward_dw`, `backward_dw`) and `module/_common.py`
(`WeightGradStore.context`) of Transformer Engine 2.x. Not run with Transformer Engine itself, which needs a GPU.
Assumes that a delayed layer's weights are its own parameters, and that it adds nothing to a gradient buffer of its own
(`fuse_wgrad_accumulation`, which is refused).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import GradientEdge

from recycle.errors import RunError
from recycle.exec.model.backward import Deferred, Sink, WeightGradientStore, delays_itself

_BIASED, _PLAIN, _TRANSPOSED, _LEAF = "AddmmBackward0", "MmBackward0", "TBackward0", "AccumulateGrad"


class _Product(NamedTuple):
    """A matrix product with a weight.

    Attributes:
        node: of the graph.
        weight: [out, in] where `is_transposed`, as torch.nn.Linear has it; else [in, out].
        bias: added by the same node, and nowhere else; None without one.
        inputs: of the product, [rows, in].
    """

    node: Any
    weight: torch.Tensor
    bias: torch.Tensor | None
    inputs: torch.Tensor
    is_transposed: bool


class GraphSplit:
    """Backwards of one stage whose module has layers of its own.

    Args:
        parameters: of the stage, all of them.
        store: takes the products, and by themselves those of megatron-core's layers.
        sink: takes (parameter, its gradient) of what stays in I.
    """

    def __init__(self, parameters: Sequence[torch.Tensor], store: WeightGradientStore, sink: Sink) -> None:
        self._parameters, self._store, self._sink = list(parameters), store, sink

    def backward(
        self, output: torch.Tensor, gradient: torch.Tensor | None, entry: torch.Tensor | None
    ) -> torch.Tensor | None:
        """Run the backward of a forward's `output`; returns the gradient by its `entry`, if it had one.

        Args:
            gradient: by the output; None for a loss.
        """
        products = _products(output.grad_fn)
        in_weights = {each for product in products for each in (product.weight, product.bias)}
        # Weights of megatron-core's layers are asked for too, so that what leads to them alone is run.
        staying = [parameter for parameter in self._parameters if parameter not in in_weights]
        edges = [GradientEdge(product.node, 0) for product in products]
        wanted: list[Any] = [*(() if entry is None else (entry,)), *staying, *edges]
        found: list[Any] = list(torch.autograd.grad(output, wanted, gradient, allow_unused=True))
        by_entry = None if entry is None else found.pop(0)
        for parameter, its_gradient in zip(staying, found, strict=False):
            if its_gradient is not None:
                self._sink(parameter, its_gradient)
        for product, flowing in zip(products, found[len(staying) :], strict=True):
            if flowing is None:
                continue
            if product.is_transposed:
                self._store.put(product.weight, product.bias, product.inputs, flowing)
            else:
                self._store.put(product.weight, None, flowing, product.inputs)
        return by_entry


def _products(root: Any) -> list[_Product]:
    """The products below a node whose weight is used once, from the output on."""
    uses: Counter[Any] = Counter()
    nodes = []
    for node in _nodes(root):
        uses.update(child for child, _ in node.next_functions if child is not None and child.name().endswith(_LEAF))
        if node.name() in (_BIASED, _PLAIN):
            nodes.append(node)
    found = []
    for node in nodes:
        factor, _ = node.next_functions[-1]
        is_transposed = factor is not None and factor.name() == _TRANSPOSED
        leaf = factor.next_functions[0][0] if is_transposed else factor
        weight = _once(leaf, uses)
        if weight is None or weight.dim() != 2:
            continue
        if node.name() == _PLAIN:
            found.append(_Product(node, weight, None, node._saved_self, is_transposed))
        elif is_transposed and node._saved_alpha == node._saved_beta == 1:
            bias = _once(node.next_functions[0][0], uses)
            of_outputs = bias is not None and bias.shape == weight.shape[:1]
            found.append(_Product(node, weight, bias if of_outputs else None, node._saved_mat1, True))
    return found


def _once(leaf: Any, uses: Counter[Any]) -> torch.Tensor | None:
    """The parameter at a leaf of the graph that one node alone leads to."""
    if leaf is None or not leaf.name().endswith(_LEAF) or uses[leaf] != 1:
        return None
    found: torch.Tensor = leaf.variable
    return found


def _nodes(root: Any) -> Iterator[Any]:
    """All nodes of a graph, each once."""
    seen, waiting = {root}, [root]
    while waiting:
        node = waiting.pop()
        yield node
        for child, _ in node.next_functions:
            if child is not None and child not in seen:
                seen.add(child)
                waiting.append(child)


class DelayedLayers:
    """The layers of a stage's module that delay their weight gradients.

    Args:
        module: of the stage.
        store: takes what they delay.
        sink: takes (parameter, its gradient of one micro-batch).

    Raises:
        RunError: a layer adds its gradients to a buffer of its own.
    """

    def __init__(self, module: torch.nn.Module, store: WeightGradientStore, sink: Sink) -> None:
        self._store, self._sink = store, sink
        self._layers: list[Any] = []
        for name, layer in module.named_modules():
            if not delays_itself(layer):
                continue
            if getattr(layer, "fuse_wgrad_accumulation", False):
                raise RunError(
                    f"{name}: adds weight gradients to a buffer of its own; give it fuse_wgrad_accumulation=False"
                )
            self._layers.append(layer)

    def collect(self) -> None:
        """Move what a backward left in the layers' queues to the store, which computes it now or in W."""
        for layer in self._layers:
            queue = layer.wgrad_store.context
            while not queue.empty():
                entry = queue.get()
                tensors = tuple(part for part in entry[0] if isinstance(part, torch.Tensor))
                weights = tuple(one for one in layer.parameters(recurse=False) if one.dim() > 1)
                self._store.defer(Deferred(weights, tensors, partial(self._compute, layer, entry)))

    def clear(self) -> None:
        """Forget what a backward that was broken off left behind."""
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
