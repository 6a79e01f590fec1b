"""The split backward of layers that are not megatron-core's, along the autograd graph.

A stage's graph is looked through for matrix products with a parameter: those of `torch.nn.Linear`, of
`torch.nn.functional.linear` and of `x @ weight`, wherever they are written. I computes the gradients that flow into
these products, and no gradient by their weights; W gets (input, gradient by the output) of each by the same
`WeightGradientStore` as megatron-core's layers, so the graph is let go of after I. Without a recording store the store
computes at once: that is B, the same products to the same bits.

Everything else stays in I, where it costs less: a norm's or an embedding's own gradients come from one pass over what
I has at hand, and W would have to hold that. So do a weight that is used more than once in a stage, products with
more than two dimensions of weights, and layers that run again in their backward.

Splitting along the graph: `torch.distributed.pipelining`, which keeps the graph between I and W instead; the idea is
from Zero Bubble Pipeline Parallelism, https://arxiv.org/abs/2401.10241, section 2.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import GradientEdge

from recycle.exec.model.split.backward import Sink, WeightGradientStore

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
