"""A checksum of tensors that also says where a single bit differs.

Two sums over the words w_0, w_1, ... of 32 bits that tensors have one behind the other, modulo 2^64: of w_i, and of i
times w_i. If one bit of one word differs, the first sums differ by a power of two and the second ones by i times that,
so that the word can be computed. Sums of whole numbers do not depend on the order, so a state may be gone through piece
by piece, on any device.

Limits: three changes or more may together leave both sums as they are, which by chance they hardly do.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

PIECE = 1 << 18
"""Words that are gone through at a time."""
_BITS, _MODULUS = 32, 1 << 64


class Checksum(NamedTuple):
    """Both sums, modulo 2^64."""

    words: int
    places: int


class BitPlace(NamedTuple):
    """A bit of a sequence of words."""

    word: int
    bit: int


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
        wide = words[self._start : stop].to(torch.int64)
        if len(self._places) < len(wide):
            self._places = torch.arange(len(wide), device=wide.device)
        total = wide.sum()
        self._sums[0] += total
        self._sums[1] += wide.mul_(self._places[: len(wide)]).sum() + total * (self._before + self._start)
        self._start = stop
        if stop == len(words):
            self._before += stop
            self._tensor, self._start = self._tensor + 1, 0
        return True

    def finish(self) -> Checksum:
        """Go through what is left; the checksum."""
        while self.piece():
            pass
        words, places = (value % _MODULUS for value in self._sums.tolist())
        return Checksum(words, places)


def differing_bit(one: Checksum, other: Checksum) -> BitPlace | None:
    """The one bit in which two sequences of words differ; None if it takes more than one to explain the checksums."""
    words, places = (one.words - other.words) % _MODULUS, (one.places - other.places) % _MODULUS
    for bit in range(_BITS):
        for sign in (1, -1):
            if words == (sign << bit) % _MODULUS:
                product = sign * places % _MODULUS
                return None if product % (1 << bit) else BitPlace(product >> bit, bit)
    return None


class StateTensor(NamedTuple):
    """A named tensor among the words of a state.

    Attributes:
        name: of the tensor.
        first: byte at which it begins.
        elements, size: how many it has, and their bytes.
    """

    name: str
    first: int
    elements: int
    size: int


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


def described(place: BitPlace, layout: Sequence[StateTensor]) -> tuple[str, int, int] | None:
    """(tensor, index of its element, bit of that) of a place in a state; None where no named tensor lies."""
    byte, bit = place.word * _BITS // 8 + place.bit // 8, place.bit % 8
    for one in layout:
        if one.first <= byte < one.first + one.elements * one.size:
            index, within = divmod(byte - one.first, one.size)
            return one.name, index, 8 * within + bit
    return None
