"""Dropout whose draws depend on seed, iteration, micro-batch and layer, and on nothing else.

The embedding and every layer of the whole model start each micro-batch from a state of the device's generator that is
their own. So a micro-batch draws the same numbers whoever runs it, in whatever order, on however many stages, and
again when its forward is run a second time. The process's own random state is put back afterwards.

With tensor parallelism all ranks draw alike for what they hold alike, and each its own for its attention heads. Those
draws follow from the tensor rank, so that with attention dropout another T gives another course of the loss. Where each
rank has a part of the sequences, all draws but those of attention weights do, too.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from recycle.exec.model.weights import layers_of


class DropoutSeeds:
    """Seeds the draws of one model part.

    Args:
        part: a module, on its device; its layers are found by name (see `weights.layers_of`).
        first_layer: of the part, in the whole model.
        seed: of the model.
        device: where the part computes.
        tensor: tensor rank of the part, and T.
        is_cut: each tensor rank has a part of the sequences.
    """

    def __init__(
        self,
        part: Any,
        first_layer: int,
        seed: int,
        device: torch.device,
        tensor: tuple[int, int] = (0, 1),
        is_cut: bool = False,
    ) -> None:
        self._seed, self._device = seed, device
        self._iteration = self._micro_batch = 0
        cuda = device.type == "cuda"
        self._generator = torch.cuda.default_generators[device.index or 0] if cuda else torch.default_generator
        # What lies outside of layers and the embedding draws as the stage does that it is a part of.
        own = f" {tensor[0]}" if is_cut else ""
        part.register_forward_pre_hook(self._start(f"part {first_layer}{own}"))
        embedding = getattr(part, "embedding", None)
        if embedding is not None:
            embedding.register_forward_pre_hook(self._start(f"embedding{own}"))
        config: Any = getattr(part, "config", None)
        for name, layer in layers_of(part, first_layer).values():
            number = name.rpartition(".")[2]
            layer.register_forward_pre_hook(self._start(f"layer {number}{own}"))
            attention = getattr(getattr(layer, "self_attention", None), "core_attention", None)
            if tensor[1] > 1 and attention is not None and config is not None and config.attention_dropout:
                attention.register_forward_pre_hook(self._start(f"attention {number} {tensor[0]}"))
                attention.register_forward_hook(self._start(f"behind attention {number}{own}"))

    @contextmanager
    def of(self, iteration: int, micro_batch: int) -> Iterator[None]:
        """Forwards inside the block are of this iteration and micro-batch (global id)."""
        self._iteration, self._micro_batch = iteration, micro_batch
        before = self._generator.get_state()
        try:
            yield
        finally:
            self._generator.set_state(before)

    def _start(self, where: str) -> Callable[..., None]:
        def start(*_: Any) -> None:
            key = f"dropout {self._seed} {self._iteration} {self._micro_batch} {where}".encode()
            drawn = hashlib.blake2b(key, digest_size=8).digest()
            self._generator.manual_seed(int.from_bytes(drawn, "little") >> 1)

        return start
