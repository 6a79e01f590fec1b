"""Layers that delay their weight gradients themselves, as Transformer Engine's do with `delay_wgrad_compute`.

Such a layer's backward puts (tensors, function) into the queue of its `wgrad_store`, and its `backward_dw` takes the
oldest entry and leaves the gradients in `.grad`. Its queue knows no micro-batches: after each backward the entries are
moved to the stage's `WeightGradientStore`, and put back one at a time when W wants them, in whatever order.

Interface: `transformer_engine/pytorch/module/base.py` (`need_backward_dw`, `backward_dw`) and `module/_common.py`
(`WeightGradStore.context`) of Transformer Engine 2.x. Not run with Transformer Engine itself, which needs a GPU.
Assumes that a layer's weights are its own parameters, and that it adds nothing to a gradient buffer of its own
(`fuse_wgrad_accumulation`, which is refused).
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from recycle.errors import RunError
from recycle.exec.model.split.backward import Deferred, Sink, WeightGradientStore, delays_itself


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
