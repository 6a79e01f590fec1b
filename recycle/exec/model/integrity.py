"""Checksums of computed tensors, and deliberate bit flips.

Integer sums do not depend on order, so a state may be summed piece by piece (`recycle.exec.checksums`). After a replay
of a micro-batch, hosts compare the output (on the last stage the loss), the input gradient, and the weight gradients.
Weight gradients are weighted by their place among all, because their order depends on the split.

A flip of a weight, a moment or a gradient sum changes memory at once. A flip of an input or an activation waits for the
next forward. A kernel flip models a stuck unit and affects every later forward.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from recycle.exec.checksums import Checksum, MicroBatchChecksums, StateTensor

PIECE = 1 << 18
"""Words that are processed at a time."""
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_MODULUS = 1 << 64


class RunningChecksum:
    """Checksum of contiguous tensors, computed piece by piece; they must not change before `finish`."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._pieces: list[tuple[int, Tensor]] = []
        place = 0
        for tensor in tensors:
            for words in torch.split(tensor.view(-1).view(torch.int32), PIECE):
                self._pieces.append((place, words))
                place += len(words)
        device = tensors[0].device if tensors else torch.device("cpu")
        self._sums = torch.zeros(2, dtype=torch.int64, device=device)

    @torch.no_grad()
    def piece(self) -> bool:
        """Process the next piece. Returns whether there was one."""
        if not self._pieces:
            return False
        first, words = self._pieces.pop()
        _add_words(self._sums, words, first)
        return True

    def finish(self) -> Checksum:
        while self.piece():
            pass
        return _checksum(self._sums)


def layout_of(state: Sequence[Tensor], named: dict[str, Tensor]) -> list[StateTensor]:
    """Positions of the named views in a state's tensors, in order."""
    places: list[StateTensor] = []
    before = 0
    for tensor in state:
        begin, size = tensor.data_ptr(), tensor.nbytes
        places += (
            StateTensor(name, before + view.data_ptr() - begin, view.numel(), view.element_size())
            for name, view in named.items()
            if view.numel() and begin <= view.data_ptr() < begin + size
        )
        before += size
    return sorted(places, key=lambda place: place.first)


class ChecksumBuilder:
    """Accumulates the checksums of a micro-batch, without device synchronization before `finish`."""

    def __init__(self) -> None:
        self._sums: tuple[list[Tensor], ...] = ([], [], [])

    def activation(self, output: Tensor) -> None:
        self._sums[0].append(word_sums(output))

    def input_gradient(self, gradient: Tensor) -> None:
        self._sums[1].append(word_sums(gradient))

    def weight_gradient(self, first: int, gradient: Tensor) -> None:
        """Add a weight's gradient, or a part of one; `first` is the place of its first word."""
        self._sums[2].append(word_sums(gradient, first))

    def finish(self) -> MicroBatchChecksums:
        none = torch.zeros(1, 2, dtype=torch.int64)
        return MicroBatchChecksums(*(_checksum((torch.stack(sums) if sums else none).sum(0)) for sums in self._sums))


@torch.no_grad()
def word_sums(tensor: Tensor, first: int = 0) -> Tensor:
    """Both sums of a tensor's words, int64 [2], on its device; modulo 2^64, in two's complement.

    Args:
        first: place of the first word. Words have 32 bits, or 16 or 8 if the tensor's size is not divisible by 4 bytes.
    """
    flat = tensor.detach().contiguous().view(-1)
    size = next(size for size in (4, 2, 1) if flat.nbytes % size == 0)
    words = flat.view(_WORDS[size]) if flat.element_size() >= size else flat.view(torch.uint8).view(_WORDS[size])
    sums = torch.zeros(2, dtype=torch.int64, device=flat.device)
    for start in range(0, len(words), PIECE):
        _add_words(sums, words[start : start + PIECE], first + start)
    return sums


def word_count(tensor: Tensor) -> int:
    """Number of 32-bit words that the gradient of a weight takes at most."""
    return 2 * tensor.numel()


def _add_words(sums: Tensor, words: Tensor, first: int) -> None:
    wide = words.to(torch.int64)
    sums[0] += wide.sum()
    sums[1] += wide.mul_(torch.arange(first, first + len(wide), device=wide.device)).sum()


def _checksum(sums: Tensor) -> Checksum:
    words, places = (value % _MODULUS for value in sums.tolist())
    return Checksum(words, places)


@torch.no_grad()
def flip_largest(tensor: Tensor, bit: int) -> None:
    flat = tensor.view(-1)
    if not flat.numel():
        return
    place = int(flat.abs().argmax())
    words = flat[place : place + 1].view(_WORDS[flat.element_size()])
    words.bitwise_xor_(torch.ones_like(words) << bit % (8 * flat.element_size()))


def flipped_copy(tensor: Tensor, bit: int) -> Tensor:
    copy = tensor.detach().clone(memory_format=torch.contiguous_format)
    flip_largest(copy, bit)
    return copy


def flipped_tokens(tokens: Tensor, vocabulary: int, bit: int) -> Tensor:
    """A copy with one bit of the first token flipped: this bit, or the next that yields a valid token."""
    if tokens.is_floating_point():
        return flipped_copy(tokens, bit)
    copy = tokens.clone(memory_format=torch.contiguous_format)
    flat, bits = copy.view(-1), max(1, (vocabulary - 1).bit_length())
    first = int(flat[0])
    others = (first ^ 1 << (bit + more) % bits for more in range(bits))
    flat[0] = next((other for other in others if other < vocabulary), first)
    return copy


class PendingBitFlips:
    def __init__(self) -> None:
        self._once: dict[str, int] = {}
        self._stuck: int | None = None

    def schedule(self, target: str, bit: int) -> None:
        """Schedule a flip of the next forward's input or activation, or of every forward for a kernel."""
        if target == "kernel":
            self._stuck = bit
        else:
            self._once[target] = bit

    def take_input_bit(self) -> int | None:
        """Take the bit to flip in the input of the current forward, or None. Call once per forward."""
        return self._once.pop("input", None)

    def take_activation_bits(self) -> list[int]:
        """Take the bits to flip in an activation of the current forward. Call once per forward."""
        struck = [self._once.pop("activation")] if "activation" in self._once else []
        return struck if self._stuck is None else [*struck, self._stuck]


class _Flip(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, bits: list[int]) -> Tensor:
        for bit in bits:
            tensor = flipped_copy(tensor, bit)
        return tensor

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None


def flip_first_layer_outputs(module: Module, flips: PendingBitFlips) -> None:
    """Apply the activation flips to the output of the first layer of a stage's module."""
    layers = (layer for layer in module.modules() if next(layer.parameters(recurse=False), None) is not None)

    def strike(layer: Module, inputs: Any, output: Any) -> Any:
        bits = flips.take_activation_bits()
        if not bits:
            return output
        if isinstance(output, tuple):
            return _Flip.apply(output[0], bits), *output[1:]  # type: ignore[no-untyped-call]
        return _Flip.apply(output, bits)  # type: ignore[no-untyped-call]

    next(layers).register_forward_hook(strike)
