"""Checksums of tensors (`recycle.exec.checksums`). Sums of whole numbers do not depend on the order, so a state may be
summed piece by piece, on any device.

Hosts also compare what they made of a micro-batch, where one has replayed the work of another: the output (of the last
stage its loss), the gradient by the input, and what the micro-batch adds to the gradients of the stage's weights, as it
comes out of the kernels. The gradients of a stage's weights come one by one, in an order that depends on how its
backward is split: each counts with the place that it has among all, so the order does not matter.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from recycle.exec.checksums import Checksum, MicroBatchChecksums, StateTensor

PIECE = 1 << 18
"""Words that are gone through at a time."""
_WORDS = {4: torch.int32, 2: torch.int16, 1: torch.uint8}
_MODULUS = 1 << 64


class RunningChecksum:
    """The checksum of tensors, taken piece by piece.

    Args:
        tensors: contiguous, of a multiple of 4 bytes each; not changed before `finish`.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._words = [tensor.view(-1).view(torch.int32) for tensor in tensors if tensor.numel()]
        device = self._words[0].device if self._words else torch.device("cpu")
        self._sums = torch.zeros(2, dtype=torch.int64, device=device)
        self._places = torch.empty(0, dtype=torch.int64)
        self._tensor = self._start = self._before = 0

    @torch.no_grad()
    def piece(self) -> bool:
        """Go through the next piece; whether there was one."""
        if self._tensor == len(self._words):
            return False
        words = self._words[self._tensor]
        stop = min(self._start + PIECE, len(words))
        if len(self._places) < stop - self._start:
            self._places = torch.arange(stop - self._start, device=words.device)
        _add_words(self._sums, words[self._start : stop], self._places, self._before + self._start)
        self._start = stop
        if stop == len(words):
            self._before += stop
            self._tensor, self._start = self._tensor + 1, 0
        return True

    def finish(self) -> Checksum:
        """Go through what is left; the checksum."""
        while self.piece():
            pass
        return _checksum(self._sums)


def layout_of(state: Sequence[torch.Tensor], named: dict[str, torch.Tensor]) -> list[StateTensor]:
    """Where the named views of a state's tensors lie in it, in order."""
    found: list[StateTensor] = []
    before = 0
    for tensor in state:
        begin, size = tensor.data_ptr(), tensor.nbytes
        found += (
            StateTensor(name, before + view.data_ptr() - begin, view.numel(), view.element_size())
            for name, view in named.items()
            if view.numel() and begin <= view.data_ptr() < begin + size
        )
        before += size
    return sorted(found, key=lambda one: one.first)


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
        none = torch.zeros(1, 2, dtype=torch.int64)
        return MicroBatchChecksums(*(_checksum((torch.stack(sums) if sums else none).sum(0)) for sums in self._sums))


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
        _add_words(sums, words[start : start + PIECE], places, first + start)
    return sums


def word_count(tensor: torch.Tensor) -> int:
    """Places that a weight takes up among the words of a stage's gradients: one of 64 bits per element at most."""
    return 2 * tensor.numel()


def _add_words(sums: torch.Tensor, words: torch.Tensor, places: torch.Tensor, first: int) -> None:
    """Add some words, of which the first has this place, to both sums; `places` counts from 0."""
    wide = words.to(torch.int64)
    total = wide.sum()
    sums[0] += total
    sums[1] += wide.mul_(places[: len(wide)]).sum() + total * first


def _checksum(sums: torch.Tensor) -> Checksum:
    words, places = (value % _MODULUS for value in sums.tolist())
    return Checksum(words, places)
