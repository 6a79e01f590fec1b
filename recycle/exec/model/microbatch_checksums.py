"""Checksums of a stage's results for a micro-batch, which hosts compare where one has replayed the work of another.

They are of the output (of the last stage its loss), of the gradient by the input, and of what the micro-batch adds to
the gradients of the stage's weights, as it comes out of the kernels. Two sums over words each, as in checksum.py, so
that one flipped bit can be named. The gradients of a stage's weights come one by one, in an order that depends on how
its backward is split: each counts with the place that it has among all, so the order does not matter.
"""

from __future__ import annotations

import torch

from recycle.exec.checksums import Checksum, MicroBatchChecksums
from recycle.exec.model.checksum import PIECE

_WORDS = {4: torch.int32, 2: torch.int16, 1: torch.uint8}
_MODULUS = 1 << 64


class ChecksumBuilder:
    """Adds up the checksums of a micro-batch. Nothing waits for the device before `finish`."""

    def __init__(self) -> None:
        self._sums: tuple[list[torch.Tensor], ...] = ([], [], [])

    def activation(self, output: torch.Tensor) -> None:
        """The forward has given this, or the loss."""
        self._sums[0].append(word_sums(output))

    def input_gradient(self, gradient: torch.Tensor) -> None:
        """The backward has given this."""
        self._sums[1].append(word_sums(gradient))

    def weight_gradient(self, first: int, gradient: torch.Tensor) -> None:
        """This is the micro-batch's gradient of a weight, or a part of it; `first` is the place of its first word."""
        self._sums[2].append(word_sums(gradient, first))

    def finish(self) -> MicroBatchChecksums:
        """The checksums of all results so far."""
        found = []
        for sums in self._sums:
            words, places = torch.stack(sums).sum(0).tolist() if sums else (0, 0)
            found.append(Checksum(words % _MODULUS, places % _MODULUS))
        return MicroBatchChecksums(*found)


@torch.no_grad()
def word_sums(tensor: torch.Tensor, first: int = 0) -> torch.Tensor:
    """Both sums of a tensor's words, int64 [2], on its device; modulo 2^64, in two's complement.

    Args:
        first: place of its first word. Words have 32 bits, or of a tensor of another size as many as divide it.
    """
    flat = tensor.detach().contiguous().view(-1)
    size = next(size for size in _WORDS if flat.nbytes % size == 0)
    words = flat.view(_WORDS[size]) if flat.element_size() >= size else flat.view(torch.uint8).view(_WORDS[size])
    sums = torch.zeros(2, dtype=torch.int64, device=flat.device)
    places = torch.arange(min(PIECE, len(words)), device=flat.device)
    for start in range(0, len(words), PIECE):
        wide = words[start : start + PIECE].to(torch.int64)
        total = wide.sum()
        sums[0] += total
        sums[1] += wide.mul_(places[: len(wide)]).sum() + total * (first + start)
    return sums


def word_count(tensor: torch.Tensor) -> int:
    """Places that a weight takes up among the words of a stage's gradients: one of 64 bits per element at most."""
    return 2 * tensor.numel()
