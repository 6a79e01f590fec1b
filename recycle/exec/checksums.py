"""Checksums that hosts compare, and what follows where they differ. Pure values: `recycle.exec.model` computes them.

A checksum has two sums over the words w_0, w_1, ... of 32 bits of tensors, modulo 2^64: of w_i, and of i times w_i. If
one bit of one word differs, the first sums differ by a power of two and the second ones by i times that, so that the
word can be computed.

Limits: three changes or more may together leave both sums as they are, which by chance they hardly do.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

PARAMETERS = 1 << 31
"""Added to the number of a stage, stands for the live parameters of the stage among numbers of shards."""
PARTS = ("activation", "input gradient", "weight gradient")
"""The fields of `MicroBatchChecksums`, in words."""
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
    """A bit of a sequence of words."""

    word: int
    bit: int


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


def differing_bit(one: Checksum, other: Checksum) -> BitPlace | None:
    """The one bit in which two sequences of words differ; None if it takes more than one to explain the checksums."""
    words, places = (one.words - other.words) % _MODULUS, (one.places - other.places) % _MODULUS
    for bit in range(_BITS):
        for sign in (1, -1):
            if words == (sign << bit) % _MODULUS:
                product = sign * places % _MODULUS
                return None if product % (1 << bit) else BitPlace(product >> bit, bit)
    return None


def described(place: BitPlace, layout: Sequence[StateTensor]) -> tuple[str, int, int] | None:
    """(tensor, index of its element, bit of that) of a place in a state; None where no named tensor lies."""
    byte, bit = place.word * _BITS // 8 + place.bit // 8, place.bit % 8
    for one in layout:
        if one.first <= byte < one.first + one.elements * one.size:
            index, within = divmod(byte - one.first, one.size)
            return one.name, index, 8 * within + bit
    return None
