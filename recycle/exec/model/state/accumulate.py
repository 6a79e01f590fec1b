"""Gradient accumulation over the micro-batches of one stage, in one flat buffer.

With `exact` the sum does not depend on the order, the assignment of micro-batches, or the reduction over hosts. Every
addend is rounded to a multiple of 2^-q and summed in fp64. Each partial sum is a multiple of 2^-q below 2^(53-q), so no
addition rounds. With N addends of at most 2^e each, q = 53 - ceil(log2 N) - e. `fast` sums in fp32 in execution order.

The bound 2^e is tested on every addend; a larger or non-finite addend makes the norm of the whole buffer NaN. Entries
below 2^-(q+1) vanish: with e = 6 and N = 32 that is 2^-43. Scaling by a power of two and rounding are exact in fp32.
On GPUs with Triton one kernel adds a whole gradient (fused_sums.py); elsewhere about ten operations per piece.
"""

from __future__ import annotations

import math
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache

import torch
from torch import Tensor

from recycle.errors import first_line
from recycle.job.footprint import ON_CPU, ON_GPU

ALIGNMENT = 64
"""Alignment in a flat tensor, in elements (256 bytes): kernels may give other bits for unaligned matrices."""


class FlatLayout:
    """Positions of a list of tensors in one flat tensor of `size` elements, including alignment gaps."""

    def __init__(self, shapes: Sequence[torch.Size]) -> None:
        self.shapes = tuple(shapes)
        self.offsets: list[int] = []
        self.size = 0
        for shape in self.shapes:
            self.offsets.append(self.size)
            self.size += -(-shape.numel() // ALIGNMENT) * ALIGNMENT

    def views(self, flat: Tensor) -> list[Tensor]:
        """The tensors in `flat` [at least size], each in its own shape."""
        return [
            flat[offset : offset + shape.numel()].view(shape)
            for offset, shape in zip(self.offsets, self.shapes, strict=True)
        ]

    def blocks(self, elements: int) -> list[tuple[int, int]]:
        """(first element, end) of blocks of at most `elements` that cover each tensor, without gaps."""
        return [
            (offset + begin, offset + min(begin + elements, shape.numel()))
            for offset, shape in zip(self.offsets, self.shapes, strict=True)
            for begin in range(0, shape.numel(), elements)
        ]

    def shards(self, count: int, elements: int, begin: int, end: int) -> list[int]:
        """Bounds of `count` shards of about equal size in a range of a flat tensor: [count + 1].

        Shards begin at `blocks`, so that the norms of shards have the same terms as the norms of the whole.
        """
        return _nearest([*(at for at, _ in self.blocks(elements) if begin <= at < end), end], begin, end, count)

    def cut(self, buckets: int, places: Iterable[int], size: int) -> list[int]:
        """Bounds of buckets of about equal size in a flat tensor of `size` elements: [buckets + 1].

        Buckets begin at the tensors with index in `places`. The last bucket includes all elements after the tensors.
        """
        offsets = [*self.offsets, self.size]
        return _nearest([offsets[place] for place in places], 0, size, buckets)


def _nearest(places: Sequence[int], begin: int, end: int, count: int) -> list[int]:
    """Split a range into `count` parts at the places nearest to equal shares: [count + 1]."""
    wanted = [begin + (end - begin) * part / count for part in range(1, count)]
    return [begin, *(min(places, key=lambda place: abs(place - cut)) for cut in wanted), end]


def grid_exponent(addends: int, exponent: int) -> int:
    """q of the grid 2^-q on which `addends` numbers of at most 2^exponent each sum exactly in fp64."""
    return 53 - math.ceil(math.log2(addends)) - exponent


class Accumulator(ABC):
    """A flat sum of gradients, processed in chunks so that no temporary has its size.

    Attributes:
        buffer: the live flat tensor, which a reduction over the stage's hosts sums in place.
        has_mark: whether an out-of-bounds mark follows the norms.
    """

    has_mark = False

    def __init__(self, layout: FlatLayout, buffer: Tensor) -> None:
        self.layout, self.buffer = layout, buffer
        self.grain = (ON_CPU if buffer.is_cpu else ON_GPU).normed
        self._blocks = layout.blocks(self.grain)
        self._views = layout.views(buffer)
        self._targets = [_chunks(view.view(-1)) for view in self._views]

    @abstractmethod
    def add(self, position: int, addend: Tensor) -> None:
        """Add one micro-batch's gradient of the parameter at `position` of the layout."""

    def add_product(self, position: int, left: Tensor, right: Tensor) -> None:
        """Add `left` @ `right`, a micro-batch's gradient of a matrix."""
        self.add(position, left.matmul(right))

    def clear(self) -> None:
        self.buffer.zero_()

    def mean(self, divisor: int, out: Tensor, start: int = 0) -> None:
        """Write the sum divided by `divisor`, from element `start`, into `out`, fp32 [at most layout.size]."""
        for target, part in zip(_chunks(out), _chunks(self.buffer[start : start + len(out)]), strict=True):
            # One division, then one cast: two roundings for any number of hosts.
            target.copy_(torch.div(part, divisor))

    def mean_norms_squared(self, divisor: int, begin: int = 0, end: int | None = None) -> list[float]:
        """Squared Euclidean norms of the mean, in fp64, of the blocks that begin in a range; by default of the rest.

        Each depends only on its block. At least one is not finite if any addend was out of bounds.
        """
        end = self.layout.size if end is None else end
        blocks = [block for block in self._blocks if begin <= block[0] < end]
        squares = torch.empty(len(blocks), dtype=torch.float64, device=self.buffer.device)
        scratch = squares.new_empty(max((last - first for first, last in blocks), default=0))
        for square, (first, last) in zip(squares, blocks, strict=True):
            wide = scratch[: last - first].copy_(self.buffer[first:last])
            torch.dot(wide, wide, out=square)
        return [square / divisor**2 for square in squares.tolist()]


@cache
def fused_add(device: torch.device) -> Callable[..., None] | None:
    """The kernel that adds a whole gradient in one launch (`FusedAdd`); None on CPUs and without Triton."""
    if device.type != "cuda":
        return None
    try:
        from recycle.exec.model.state.fused_sums import compiled_for

        return compiled_for(device)
    except Exception as error:  # it is missing, lacks a C compiler, or does not support the GPU
        print(f"exact sums are slow without Triton: {first_line(error)}", file=sys.stderr, flush=True)
        return None


class ExactSum(Accumulator):
    """Sum on a fixed grid in fp64, of at most `addends` addends of at most 2^exponent.

    The buffer is one aligned block longer than the layout. Its first extra entry becomes NaN if an addend is out of
    bounds, and a reduction carries the NaN to every host.
    """

    has_mark = True

    def __init__(self, layout: FlatLayout, addends: int, exponent: int, device: torch.device) -> None:
        super().__init__(layout, torch.zeros(layout.size + ALIGNMENT, dtype=torch.float64, device=device))
        grid = grid_exponent(addends, exponent)
        self._scale, self._unit, self._bound = self._limits = 2.0**grid, 2.0**-grid, 2.0**exponent
        self._violation = self.buffer[layout.size]
        self._fused = fused_add(device)

    @torch.no_grad()
    def add(self, position: int, addend: Tensor) -> None:
        addend = addend.reshape(-1)
        if self._fused is not None:
            self._fused(self._views[position].view(-1), self._violation, addend, *self._limits)
            return
        for target, part in zip(self._targets[position], _chunks(addend), strict=True):
            part = part.float()
            self._test(part)
            target.add_(torch.mul(part, self._scale).round_(), alpha=self._unit)

    def mean_norms_squared(self, divisor: int, begin: int = 0, end: int | None = None) -> list[float]:
        norms = super().mean_norms_squared(divisor, begin, end)
        return [*norms, float(self._violation)] if end is None or end == self.layout.size else norms

    def is_within_bounds(self) -> bool:
        """Whether all addends were, on all hosts once the buffer is reduced. Waits for the device."""
        return math.isfinite(float(self._violation))

    def _test(self, addend: Tensor) -> None:
        low, high = torch.aminmax(addend)
        # Both comparisons are written so that NaN fails the test.
        if addend.is_cpu:
            if not (low.item() >= -self._bound and high.item() <= self._bound):
                self._violation.fill_(math.nan)
        else:
            # Reading a value back would synchronize with the device.
            inside = (low >= -self._bound) & (high <= self._bound)
            self._violation.add_(torch.where(inside, 0.0, math.nan))


class FastSum(Accumulator):
    """Plain fp32 sum in execution order; the bits depend on the order and on the split over hosts."""

    def __init__(self, layout: FlatLayout, addends: int, exponent: int, device: torch.device) -> None:
        super().__init__(layout, torch.zeros(layout.size, dtype=torch.float32, device=device))

    @torch.no_grad()
    def add(self, position: int, addend: Tensor) -> None:
        for target, part in zip(self._targets[position], _chunks(addend.reshape(-1)), strict=True):
            target.add_(part)

    @torch.no_grad()
    def add_product(self, position: int, left: Tensor, right: Tensor) -> None:
        if left.dtype == self.buffer.dtype:
            self._views[position].addmm_(left, right)
        else:
            super().add_product(position, left, right)


ACCUMULATORS: Mapping[str, type[ExactSum] | type[FastSum]] = {"exact": ExactSum, "fast": FastSum}
"""`[train] accumulation` -> class."""


def _chunks(flat: Tensor) -> tuple[Tensor, ...]:
    return torch.split(flat, (ON_CPU if flat.is_cpu else ON_GPU).added)
