"""Bits that are flipped on purpose in what a stage computes with, as a fault of the hardware would.

A flip of a weight, a moment or a sum of gradients changes memory and is done at once. A flip of an input or an
activation waits for the next forward. That of a kernel is a stuck unit: it is met by every forward from then on.
"""

from __future__ import annotations

from typing import Any

import torch

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@torch.no_grad()
def flip_largest(tensor: torch.Tensor, bit: int) -> None:
    """Flip one bit of the largest entry of a contiguous tensor, in place.

    Args:
        bit: its number, the lowest is 0; of a shorter number the remainder by its bits.
    """
    flat = tensor.view(-1)
    if not flat.numel():
        return
    place = int(flat.abs().argmax())
    words = flat[place : place + 1].view(_WORDS[flat.element_size()])
    words.bitwise_xor_(torch.ones_like(words) << bit % (8 * flat.element_size()))


def flipped(tensor: torch.Tensor, bit: int) -> torch.Tensor:
    """A copy with one bit of its largest entry flipped."""
    copy = tensor.detach().clone(memory_format=torch.contiguous_format)
    flip_largest(copy, bit)
    return copy


def flipped_tokens(tokens: torch.Tensor, vocabulary: int, bit: int) -> torch.Tensor:
    """A copy with one bit of the first token flipped: the bit of this number, or of the next that leaves a token.

    A model's own inputs that are no whole numbers are struck as any other tensor.
    """
    if tokens.is_floating_point():
        return flipped(tokens, bit)
    copy = tokens.clone(memory_format=torch.contiguous_format)
    flat, bits = copy.view(-1), max(1, (vocabulary - 1).bit_length())
    first = int(flat[0])
    others = (first ^ 1 << (bit + more) % bits for more in range(bits))
    flat[0] = next((other for other in others if other < vocabulary), first)
    return copy


class FlipsOfForwards:
    """The flips that forwards of a stage are to meet."""

    def __init__(self) -> None:
        self._once: dict[str, int] = {}
        self._stuck: int | None = None

    def order(self, target: str, bit: int) -> None:
        """Have the next forward meet a flip of its input or of an activation, or all of them that of a kernel."""
        if target == "kernel":
            self._stuck = bit
        else:
            self._once[target] = bit

    def of_input(self) -> int | None:
        """The bit to flip in the input of the forward at hand, None for none; asked once."""
        return self._once.pop("input", None)

    def of_activation(self) -> list[int]:
        """The bits to flip in an activation of the forward at hand; asked once."""
        struck = [self._once.pop("activation")] if "activation" in self._once else []
        return struck if self._stuck is None else [*struck, self._stuck]


class _Flip(torch.autograd.Function):
    """Flip bits of a tensor; the gradient passes."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, bits: list[int]) -> torch.Tensor:
        for bit in bits:
            tensor = flipped(tensor, bit)
        return tensor

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradients[0], None


def strike_first_layer(module: torch.nn.Module, flips: FlipsOfForwards) -> None:
    """Have the first layer of a stage's module meet the flips of activations: what it hands on is struck."""
    layers = (one for one in module.modules() if next(one.parameters(recurse=False), None) is not None)

    def strike(layer: torch.nn.Module, given: Any, output: Any) -> Any:
        bits = flips.of_activation()
        if not bits:
            return output
        if isinstance(output, tuple):
            return _Flip.apply(output[0], bits), *output[1:]  # type: ignore[no-untyped-call]
        return _Flip.apply(output, bits)  # type: ignore[no-untyped-call]

    next(layers).register_forward_hook(strike)
