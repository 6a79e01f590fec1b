"""Checksums that hosts compare, and what their differences show. Pure values; `recycle.exec.model` computes them.

A checksum has two sums over the 32-bit words w_0, w_1, ... of tensors, modulo 2^64: of w_i, and of i times w_i. One
wrong bit in word i changes them by a power of two and i times that power: the ratio is i. Three changes may cancel.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

PARAMETERS = 1 << 31
"""Offset added to a stage's number for its live parameters, in reports that number shards."""
PARTS = ("activation", "input gradient", "weight gradient")
"""The fields of `MicroBatchChecksums` as text."""
_BITS, _MODULUS = 32, 1 << 64


class Checksum(NamedTuple):
    """Both sums, modulo 2^64."""

    words: int
    places: int


NOTHING = Checksum(0, 0)


class MicroBatchChecksums(NamedTuple):
    """Checksums of a stage's results for a micro-batch; `NOTHING` for a result that the stage does not have."""

    activation: Checksum = NOTHING
    input_gradient: Checksum = NOTHING
    weight_gradient: Checksum = NOTHING


class BitPlace(NamedTuple):
    """A bit in a sequence of words."""

    word: int
    bit: int


class StateTensor(NamedTuple):
    """A named tensor among the words of a state: first byte, number of elements, and bytes per element."""

    name: str
    first: int
    elements: int
    size: int


def differing_bit(first: Checksum, second: Checksum) -> BitPlace | None:
    """Return the only bit in which two sequences of words differ; None if one bit does not explain the checksums."""
    words, places = (first.words - second.words) % _MODULUS, (first.places - second.places) % _MODULUS
    for bit in range(_BITS):
        for sign in (1, -1):
            if words == (sign << bit) % _MODULUS:
                product = sign * places % _MODULUS
                return None if product % (1 << bit) else BitPlace(product >> bit, bit)
    return None


def locate(place: BitPlace, layout: Sequence[StateTensor]) -> tuple[str, int, int] | None:
    """Return (tensor, index of the element, bit in the element) of a place in a state; None outside named tensors."""
    byte, bit = place.word * _BITS // 8 + place.bit // 8, place.bit % 8
    for tensor in layout:
        if tensor.first <= byte < tensor.first + tensor.elements * tensor.size:
            index, within = divmod(byte - tensor.first, tensor.size)
            return tensor.name, index, 8 * within + bit
    return None
