"""Dropout whose draws depend on seed, iteration, micro-batch and layer, and on nothing else.

The embedding and every layer of the whole model start each micro-batch from a state of the device's generator that is
their own. So a micro-batch draws the same numbers whoever runs it, in whatever order, on however many stages, and
again when its forward is run a second time. The process's own random state is put back afterwards.

With tensor parallelism all ranks draw alike for what they hold alike, and each its own for its attention heads. Those
draws follow from the tensor rank, so that with attention dropout another T gives another course of the loss.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch


class DropoutSeeds:
    """Seeds the draws of one model part.

    Args:
        part: a GPTModel part, on its device.
        first_layer: of the part, in the whole model.
        seed: of the model.
        device: where the part computes.
        tensor: tensor rank of the part, and T.
    """

    def __init__(
        self, part: Any, first_layer: int, seed: int, device: torch.device, tensor: tuple[int, int] = (0, 1)
    ) -> None:
        self._seed, self._device = seed, device
        self._iteration = self._micro_batch = 0
        cuda = device.type == "cuda"
        self._generator = torch.cuda.default_generators[device.index or 0] if cuda else torch.default_generator
        if part.pre_process:
            part.embedding.register_forward_pre_hook(self._start("embedding"))
        for place, layer in enumerate(part.decoder.layers):
            layer.register_forward_pre_hook(self._start(f"layer {first_layer + place}"))
            if tensor[1] > 1 and part.config.attention_dropout:
                attention = layer.self_attention.core_attention
                attention.register_forward_pre_hook(self._start(f"attention {first_layer + place} {tensor[0]}"))
                attention.register_forward_hook(self._start(f"behind attention {first_layer + place}"))

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
