"""Gradient sums of a stage: one for its own parameters, and one for a weight shared with another stage.

`IncomingGradients` adds the gradients of all sources to the sums and to the checksums of watched micro-batches.

The first and last stage may share a weight. Each has a sum for its gradients, or both use one sum if one worker hosts
them. Hosts reduce the sums buffer by buffer, and the stage's own sum optionally bucket by bucket. Units and shards of
the optimizer's state are ranges of the concatenated sums (`JoinedSums`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import accumulate
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from recycle.exec.model.integrity import ChecksumBuilder, word_count
from recycle.exec.model.state.accumulate import ACCUMULATORS, Accumulator, ExactSum, FlatLayout
from recycle.exec.model.state.rules import decays
from recycle.job import Job


class SumBuffer(NamedTuple):
    """A buffer of gradient sums, and its range in the stage's parameters.

    Attributes:
        buffer: flat [at least size]; extra elements go with the shard that holds the range's last element.
        is_apart: whether the buffer is reduced separately, so that every host has all of it.
        is_own: whether it is the sum of the stage's own parameters, which is reduced in buckets.
    """

    begin: int
    size: int
    buffer: Tensor
    is_apart: bool = False
    is_own: bool = True

    def part(self, begin: int, end: int, first: int = 0, last: int | None = None) -> Tensor:
        """The part of the buffer in a range of the stage's parameters, limited to buffer elements `first` to `last`."""
        low, high = (min(max(0, bound - self.begin), self.size) for bound in (begin, end))
        if low < high == self.size:
            high = self.buffer.numel()
        low, high = max(low, first), high if last is None else min(high, last)
        return self.buffer[low : max(low, high)]


class PartialSum(NamedTuple):
    """One of the sums.

    Attributes:
        is_own: whether it is the stage's own.
        is_counted: whether its norms are part of the stage's; false if another stage counts them.
        is_apart: whether it is reduced separately, so that every host has all of it.
        common: its blocks that are the same on all tensor ranks of a worker.
    """

    sums: Accumulator
    is_own: bool = True
    is_counted: bool = True
    is_apart: bool = False
    common: Collection[int] = ()


class JoinedSums:
    """Concatenated sums, with norms by blocks of `grain` elements; `divisor` is the number of their addends."""

    def __init__(self, every: Sequence[PartialSum], divisor: int) -> None:
        begins = accumulate((summed.sums.layout.size for summed in every), initial=0)
        self._placed, self.divisor = list(zip(begins, every, strict=False)), divisor
        self.layout = FlatLayout([shape for summed in every for shape in summed.sums.layout.shapes])
        self.grain = every[0].sums.grain

    def parts(self) -> list[SumBuffer]:
        return [
            SumBuffer(begin, summed.sums.layout.size, summed.sums.buffer, summed.is_apart, summed.is_own)
            for begin, summed in self._placed
        ]

    def mean(self, start: int, out: Tensor) -> None:
        """Write the mean gradient from element `start` into `out`."""
        for begin, summed in self._placed:
            low, high = max(start, begin), min(start + len(out), begin + summed.sums.layout.size)
            if low < high:
                summed.sums.mean(self.divisor, out[low - start : high - start], low - begin)

    def norms_squared(self, begin: int, end: int) -> list[float]:
        """Squared norms of the mean gradient per block in [begin, end), as far as this stage counts them."""
        return [
            norm
            for first, summed in self._placed
            if summed.is_counted and max(begin, first) < (high := min(end, first + summed.sums.layout.size))
            for norm in summed.sums.mean_norms_squared(self.divisor, max(begin, first) - first, high - first)
        ]

    def common(self, begin: int, end: int) -> list[int]:
        """Indices in `norms_squared` of the norms that all tensor ranks of a worker share."""
        indices, place = list[int](), 0
        for first, summed in self._placed:
            size = summed.sums.layout.size
            if not summed.is_counted or not max(begin, first) < min(end, first + size):
                continue
            for number, (at, _) in enumerate(summed.sums.layout.blocks(self.grain)):
                if begin <= first + at < end:
                    indices += [place] if number in summed.common else []
                    place += 1
            place += summed.sums.has_mark and first + size <= end
        return indices


class GradientSums(JoinedSums):
    """The gradient sums of a stage.

    Args:
        parameters: of the stage by name, unit by unit, decayed parameters first in each unit. A shared parameter comes
            first on the first stage, and last elsewhere.
        shared: name of the parameter that another stage has too; None without one.
        cut: names of parameters that are split between tensor ranks.
        tied: gradient sum of the shared weight, from another stage of this worker.
    """

    def __init__(
        self,
        job: Job,
        index: int,
        parameters: Mapping[str, Parameter],
        shared: str | None,
        cut: Collection[str],
        tied: Accumulator | None,
        device: torch.device,
    ) -> None:
        divisor, self._has_ties = job.shape.global_micro_batches, bool(job.ties)
        accumulator = partial(ACCUMULATORS[job.train.accumulation], exponent=job.train.gradient_exponent, device=device)
        own = {name: parameter for name, parameter in parameters.items() if name != shared}
        self.own: Accumulator = accumulator(FlatLayout([parameter.shape for parameter in own.values()]), divisor)
        common: Collection[int] = ()
        if job.grid.tensor_parallel > 1:
            blocks = [name for name, each in own.items() for _ in range(0, each.numel(), self.own.grain)]
            common = {place for place, name in enumerate(blocks) if name not in cut}
        sums = [PartialSum(self.own, common=common)]
        self._place: dict[Tensor, tuple[Accumulator, int]] = {
            parameter: (self.own, place) for place, parameter in enumerate(own.values())
        }
        self.tied: Accumulator | None = None
        if shared is not None:
            # Embedding and output layer each add a gradient, and each is rounded separately.
            self.tied = tied or accumulator(FlatLayout([parameters[shared].shape]), 2 * divisor)
            self._place[parameters[shared]] = self.tied, 0
            # The norm of a shared weight counts once, at the embedding.
            tied_part = PartialSum(self.tied, is_own=False, is_counted=index == 0, is_apart=self._has_ties)
            sums.insert(0 if index == 0 else 1, tied_part)
        super().__init__(sums, divisor)
        # In each unit biases and norms follow the weights. Their gradients come in the layers' I, so a later bucket may
        # hold them, but not an earlier one.
        self._begins = [*(place for place, parameter in enumerate(own.values()) if decays(parameter)), len(own)]
        self._bounds: dict[int, Sequence[int]] = {}

    def clear(self) -> None:
        for _, summed in self._placed:
            summed.sums.clear()
        for parameter in self._place:
            # An exception inside a backward may have left a gradient.
            parameter.grad = None

    def place_of(self, parameter: Tensor) -> tuple[Accumulator, int]:
        return self._place[parameter]

    def buffers(self) -> list[Tensor]:
        return [self.own.buffer] + ([] if self._has_ties or self.tied is None else [self.tied.buffer])

    def tied_buffers(self) -> list[Tensor]:
        return [self.tied.buffer] if self._has_ties and self.tied is not None else []

    def bucket_bounds(self, buckets: int) -> Sequence[int]:
        if buckets not in self._bounds:
            self._bounds[buckets] = self.own.layout.cut(buckets, self._begins, self.own.buffer.numel())
        return self._bounds[buckets]

    def is_in_bucket(self, weight: Tensor, bucket: int, buckets: int) -> bool:
        begin, end = self.bucket_bounds(buckets)[bucket : bucket + 2]
        accumulator, position = self._place[weight]
        return accumulator is self.own and begin <= accumulator.layout.offsets[position] < end


Half = Literal["I", "W"]


class IncomingGradients:
    """Receives the gradients of a stage's parameters.

    Args:
        parameters: of the stage, in the order in which checksums count their words.
        summed: parameters whose gradients are first summed over the tensor ranks.

    Attributes:
        placed: parameter -> the half of the backward that last computed its gradient.
    """

    def __init__(self, sums: GradientSums, parameters: Sequence[Parameter], summed: Collection[Parameter]) -> None:
        self._sums, self._summed = sums, summed
        counts = [word_count(parameter) for parameter in parameters]
        self._first_word: dict[Tensor, int] = dict(zip(parameters, accumulate(counts, initial=0), strict=False))
        self.placed: dict[Tensor, Half] = {}
        self.reset()
        for parameter in parameters:
            # Called for gradients that autograd computes in I: norms, embeddings, biases outside the linear layers.
            parameter.register_post_accumulate_grad_hook(self._take_from_autograd)  # type: ignore[no-untyped-call]

    def reset(self) -> None:
        """Reset the state of the current backward, also after an interruption."""
        self.checksums: ChecksumBuilder | None = None
        self._half: Half | None = None
        self._is_scratch = False

    @contextmanager
    def attributed_to(
        self, checksums: ChecksumBuilder | None, half: Half | None = None, is_scratch: bool = False
    ) -> Iterator[None]:
        """Attribute gradients inside the block to one micro-batch; scratch gradients are for checksums only."""
        self.checksums, self._half, self._is_scratch = checksums, half, is_scratch
        yield
        self.checksums, self._is_scratch = None, False

    def add(self, parameter: Tensor, gradient: Tensor) -> None:
        accumulator, position = self._sums.place_of(parameter)
        if parameter in self._summed:
            from megatron.core.parallel_state import get_tensor_model_parallel_group

            gradient = gradient.contiguous()
            torch.distributed.all_reduce(gradient, group=get_tensor_model_parallel_group())
        if self.checksums is not None:
            self.checksums.weight_gradient(self._first_word[parameter], gradient)
        if not self._is_scratch:
            accumulator.add(position, gradient)
            self._note(parameter)

    def add_product(self, weight: Tensor, rows: Tensor, inputs: Tensor) -> None:
        """Add a matrix's gradient, the product of transposed `rows` and `inputs`."""
        accumulator, position = self._sums.place_of(weight)
        if self.checksums is not None:
            product = rows.t().matmul(inputs)
            self.checksums.weight_gradient(self._first_word[weight], product)
            if self._is_scratch:
                return
            if isinstance(accumulator, ExactSum):  # avoids a second product
                accumulator.add(position, product)
                self._note(weight)
                return
        accumulator.add_product(position, rows.t(), inputs)
        self._note(weight)

    def _note(self, parameter: Tensor) -> None:
        if self._half is not None:
            self.placed[parameter] = self._half

    def _take_from_autograd(self, parameter: Tensor) -> None:
        gradient, parameter.grad = parameter.grad, None
        # The hook also runs for weights of the store, without a gradient.
        if gradient is not None:
            self.add(parameter, gradient)
