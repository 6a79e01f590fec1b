"""The sums of a stage's gradients as one flat range: the stage's own, and that of a weight that tied stages share.

Shards of an optimizer's state are ranges of it. Each sum keeps its own buffer, its grid, and its mark of gradients out
of bounds.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

import torch

from recycle.exec.model.state.accumulate import Accumulator, FlatLayout
from recycle.exec.model.state.shards import SumBuffer


class Summed(NamedTuple):
    """One of the sums.

    Attributes:
        sums: of some parameters' gradients.
        names: of the parameters.
        is_own: whether it is the stage's own.
        is_counted: whether its norms are part of the stage's; not where another stage counts them.
        is_apart: whether it is summed over its hosts by itself, so that all of it is on each.
        common: its blocks that all tensor ranks of a worker have alike.
    """

    sums: Accumulator
    names: Sequence[str]
    is_own: bool = True
    is_counted: bool = True
    is_apart: bool = False
    common: Collection[int] = ()


class JoinedSums:
    """Sums one behind the other.

    Args:
        every: in the order of the parameters.
        divisor: of a sum of gradients.

    Attributes:
        names: of all parameters, in order.
        layout: of them.
        grain: elements of a block.
    """

    def __init__(self, every: Sequence[Summed], divisor: int) -> None:
        self._every, self._divisor = list(every), divisor
        self.names = [name for one in every for name in one.names]
        self.layout = FlatLayout([shape for one in every for shape in one.sums.layout.shapes])
        self.grain = every[0].sums.grain

    def buffers(self) -> list[SumBuffer]:
        """Of the sums, in order."""
        return [
            SumBuffer(begin, one.sums.layout.size, one.sums.buffer, one.is_apart, one.is_own)
            for begin, one in self._placed()
        ]

    def mean(self, start: int, out: torch.Tensor) -> None:
        """The mean gradient from element `start` on, written into `out`."""
        for begin, one in self._placed():
            low, high = max(start, begin), min(start + len(out), begin + one.sums.layout.size)
            if low < high:
                one.sums.mean(self._divisor, out[low - start : high - start], low - begin)

    def norms_squared(self, begin: int, end: int) -> list[float]:
        """Squared norms of the mean gradient from one block up to another, those that this stage counts."""
        return [
            norm
            for first, one in self._placed()
            if one.is_counted and max(begin, first) < (high := min(end, first + one.sums.layout.size))
            for norm in one.sums.mean_norms_squared(self._divisor, max(begin, first) - first, high - first)
        ]

    def common(self, begin: int, end: int) -> list[int]:
        """Places in `norms_squared` of the numbers that all tensor ranks of a worker have alike."""
        found, place = list[int](), 0
        for first, one in self._placed():
            size = one.sums.layout.size
            if not one.is_counted or not max(begin, first) < min(end, first + size):
                continue
            for number, (at, _) in enumerate(one.sums.layout.blocks(self.grain)):
                if begin <= first + at < end:
                    found += [place] if number in one.common else []
                    place += 1
            place += one.sums.has_mark and first + size <= end
        return found

    def _placed(self) -> Iterator[tuple[int, Summed]]:
        """(where it begins, sum)."""
        begin = 0
        for one in self._every:
            yield begin, one
            begin += one.sums.layout.size
