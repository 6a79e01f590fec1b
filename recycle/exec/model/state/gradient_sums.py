"""Where the gradients of a stage are added up: in one sum for its own parameters, and one for a shared weight.

They come from the store of delayed weight gradients, from layers that delay their own, and from autograd's hooks, and
are added to the sums and to the checksums of watched micro-batches (`IncomingGradients`).

First and last stage may share a weight. Each has a sum for its gradients, or both the same one where one worker hosts
them. Hosts add their sums up, buffer by buffer, or bucket by bucket of the stage's own. Units and shards of an
optimizer's state are ranges of all sums, one behind the other (`JoinedSums`); each sum keeps its own buffer, its grid,
and its mark of gradients out of bounds.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import accumulate
from typing import Literal, NamedTuple

import torch

from recycle.exec.model.integrity import ChecksumBuilder, word_count
from recycle.exec.model.state.accumulate import ACCUMULATORS, Accumulator, ExactSum, FlatLayout
from recycle.exec.model.state.optimizer import decays
from recycle.job import Job


class SumBuffer(NamedTuple):
    """A buffer of sums of gradients, and the range of the stage's parameters that it is of.

    Attributes:
        begin: of the range.
        size: its elements.
        buffer: flat [at least size]; what lies behind goes with the shard that has the range's last element.
        is_apart: whether it is summed over its hosts by itself, so that all of it is on each.
        is_own: whether it is that of the stage's own parameters, which is summed in buckets.
    """

    begin: int
    size: int
    buffer: torch.Tensor
    is_apart: bool = False
    is_own: bool = True

    def part(self, begin: int, end: int, first: int = 0, last: int | None = None) -> torch.Tensor:
        """The part of a range of the stage's parameters, as far as it lies between two elements of the buffer."""
        low, high = (min(max(0, bound - self.begin), self.size) for bound in (begin, end))
        if low < high == self.size:
            high = self.buffer.numel()
        low, high = max(low, first), high if last is None else min(high, last)
        return self.buffer[low : max(low, high)]


class Summed(NamedTuple):
    """One of the sums.

    Attributes:
        sums: of some parameters' gradients.
        is_own: whether it is the stage's own.
        is_counted: whether its norms are part of the stage's; not where another stage counts them.
        is_apart: whether it is summed over its hosts by itself, so that all of it is on each.
        common: its blocks that all tensor ranks of a worker have alike.
    """

    sums: Accumulator
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
        layout: of all parameters, in order.
        grain: elements of a block.
    """

    def __init__(self, every: Sequence[Summed], divisor: int) -> None:
        begins = accumulate((one.sums.layout.size for one in every), initial=0)
        self._placed, self._divisor = list(zip(begins, every, strict=False)), divisor
        self.layout = FlatLayout([shape for one in every for shape in one.sums.layout.shapes])
        self.grain = every[0].sums.grain

    def parts(self) -> list[SumBuffer]:
        """The buffers of the sums, in order."""
        return [
            SumBuffer(begin, one.sums.layout.size, one.sums.buffer, one.is_apart, one.is_own)
            for begin, one in self._placed
        ]

    def mean(self, start: int, out: torch.Tensor) -> None:
        """The mean gradient from element `start` on, written into `out`."""
        for begin, one in self._placed:
            low, high = max(start, begin), min(start + len(out), begin + one.sums.layout.size)
            if low < high:
                one.sums.mean(self._divisor, out[low - start : high - start], low - begin)

    def norms_squared(self, begin: int, end: int) -> list[float]:
        """Squared norms of the mean gradient from one block up to another, those that this stage counts."""
        return [
            norm
            for first, one in self._placed
            if one.is_counted and max(begin, first) < (high := min(end, first + one.sums.layout.size))
            for norm in one.sums.mean_norms_squared(self._divisor, max(begin, first) - first, high - first)
        ]

    def common(self, begin: int, end: int) -> list[int]:
        """Places in `norms_squared` of the numbers that all tensor ranks of a worker have alike."""
        found, place = list[int](), 0
        for first, one in self._placed:
            size = one.sums.layout.size
            if not one.is_counted or not max(begin, first) < min(end, first + size):
                continue
            for number, (at, _) in enumerate(one.sums.layout.blocks(self.grain)):
                if begin <= first + at < end:
                    found += [place] if number in one.common else []
                    place += 1
            place += one.sums.has_mark and first + size <= end
        return found


class GradientSums(JoinedSums):
    """The sums of a stage's gradients.

    Args:
        job: how gradients are accumulated, and which stages share a weight.
        index: the stage.
        parameters: of the stage by name, unit by unit, in each those that decay first; a shared one comes before all
            others on the first stage, and else behind them.
        shared: name of the parameter that another stage has too; None where there is none.
        cut: names of those of which each tensor rank has a part of its own.
        tied: the sum of the shared weight's gradients that another stage of this worker has.
        device: of the sums.

    Attributes:
        own: of all parameters but a shared one.
        tied: of the shared weight; None where there is none.
    """

    def __init__(
        self,
        job: Job,
        index: int,
        parameters: Mapping[str, torch.nn.Parameter],
        shared: str | None,
        cut: Collection[str],
        tied: Accumulator | None,
        device: torch.device,
    ) -> None:
        divisor, self._has_ties = job.shape.global_micro_batches, bool(job.ties)
        accumulator = partial(ACCUMULATORS[job.train.accumulation], device=device)
        own, bound = {name: one for name, one in parameters.items() if name != shared}, job.train.gradient_exponent
        self.own: Accumulator = accumulator(FlatLayout([one.shape for one in own.values()]), divisor, bound)
        common: Collection[int] = ()
        if job.grid.tensor_parallel > 1:
            blocks = zip(own, self.own.blocks_of(), strict=True)
            whose = [name for name, count in blocks for _ in range(count)]
            common = {place for place, name in enumerate(whose) if name not in cut}
        every = [Summed(self.own, common=common)]
        self._place: dict[torch.Tensor, tuple[Accumulator, int]] = {
            parameter: (self.own, place) for place, parameter in enumerate(own.values())
        }
        self.tied: Accumulator | None = None
        if shared is not None:
            # Embedding and output layer each give a gradient, and each is rounded by itself.
            self.tied = tied or accumulator(FlatLayout([parameters[shared].shape]), 2 * divisor, bound)
            self._place[parameters[shared]] = self.tied, 0
            # A shared weight counts once, where the embedding is.
            one = Summed(self.tied, is_own=False, is_counted=index == 0, is_apart=self._has_ties)
            every.insert(0 if index == 0 else 1, one)
        super().__init__(every, divisor)
        # In each unit biases and norms come behind the weights: their gradients are there when those of their layers
        # are, so they may be in a later bucket, and in no earlier one.
        self._begins = [*(place for place, one in enumerate(own.values()) if decays(one)), len(own)]
        self._bounds: dict[int, Sequence[int]] = {}

    def clear(self) -> None:
        """Back to zero, for the next iteration."""
        for _, one in self._placed:
            one.sums.clear()
        for parameter in self._place:
            # An exception inside a backward may have left one behind.
            parameter.grad = None

    def place_of(self, parameter: torch.Tensor) -> tuple[Accumulator, int]:
        """The sum that a parameter's gradients are added to, and its position in the sum's layout."""
        return self._place[parameter]

    def buffers(self) -> list[torch.Tensor]:
        """What is summed over the stage's hosts."""
        return [self.own.buffer] + ([] if self._has_ties or self.tied is None else [self.tied.buffer])

    def tied_buffers(self) -> list[torch.Tensor]:
        """What is summed over the hosts of all stages that share a weight."""
        return [self.tied.buffer] if self._has_ties and self.tied is not None else []

    def bucket_bounds(self, buckets: int) -> Sequence[int]:
        """Where to cut the stage's own sum into so many buckets: [buckets + 1]."""
        if buckets not in self._bounds:
            self._bounds[buckets] = self.own.layout.cut(buckets, self._begins, self.own.buffer.numel())
        return self._bounds[buckets]

    def is_in_bucket(self, weight: torch.Tensor, bucket: int, buckets: int) -> bool:
        """Whether this bucket, of so many, has a weight's gradients."""
        begin, end = self.bucket_bounds(buckets)[bucket : bucket + 2]
        accumulator, position = self._place[weight]
        return accumulator is self.own and begin <= accumulator.layout.offsets[position] < end


Half = Literal["I", "W"]


class IncomingGradients:
    """Takes the gradients of a stage's parameters.

    Args:
        sums: that they are added to.
        parameters: of the stage, in the order in which checksums count their words.
        summed: those whose gradients tensor ranks sum first.

    Attributes:
        making: takes checksums of what the backward under way makes; None where nobody wants them.
        placed: parameter -> the half of the backward that gave its gradient last.
    """

    def __init__(
        self,
        sums: GradientSums,
        parameters: Sequence[torch.nn.Parameter],
        summed: Collection[torch.nn.Parameter],
    ) -> None:
        self._sums, self._summed = sums, summed
        counts = [word_count(parameter) for parameter in parameters]
        self._first_word: dict[torch.Tensor, int] = dict(zip(parameters, accumulate(counts, initial=0), strict=False))
        self.placed: dict[torch.Tensor, Half] = {}
        self.reset()
        for parameter in parameters:
            # Fires for what autograd computes in I: norms, embeddings, biases outside the linear layers.
            parameter.register_post_accumulate_grad_hook(self._take_from_autograd)  # type: ignore[no-untyped-call]

    def reset(self) -> None:
        """No backward is under way, also where the last one was interrupted."""
        self.making: ChecksumBuilder | None = None
        self._half: Half | None = None
        self._is_scratch = False

    @contextmanager
    def of(self, making: ChecksumBuilder | None, half: Half | None = None, is_scratch: bool = False) -> Iterator[None]:
        """The gradients that come up inside are of one micro-batch.

        Args:
            making: takes their checksums.
            half: of the backward that is run; None for all of it.
            is_scratch: they are for checksums alone.
        """
        self.making, self._half, self._is_scratch = making, half, is_scratch
        yield
        self.making, self._is_scratch = None, False

    def add(self, parameter: torch.Tensor, gradient: torch.Tensor) -> None:
        """Take a parameter's gradient."""
        accumulator, position = self._sums.place_of(parameter)
        if parameter in self._summed:
            from megatron.core.parallel_state import get_tensor_model_parallel_group

            gradient = gradient.contiguous()
            torch.distributed.all_reduce(gradient, group=get_tensor_model_parallel_group())
        if self.making is not None:
            self.making.weight_gradient(self._first_word[parameter], gradient)
        if not self._is_scratch:
            accumulator.add(position, gradient)
            self._note(parameter)

    def add_product(self, weight: torch.Tensor, rows: torch.Tensor, inputs: torch.Tensor) -> None:
        """Take a matrix's gradient, which is the product of `rows`, transposed, and `inputs`."""
        accumulator, position = self._sums.place_of(weight)
        if self.making is not None:
            product = rows.t().matmul(inputs)
            self.making.weight_gradient(self._first_word[weight], product)
            if self._is_scratch:
                return
            if isinstance(accumulator, ExactSum):  # which would make it once more
                accumulator.add(position, product)
                self._note(weight)
                return
        accumulator.add_product(position, rows.t(), inputs)
        self._note(weight)

    def _note(self, parameter: torch.Tensor) -> None:
        if self._half is not None:
            self.placed[parameter] = self._half

    def _take_from_autograd(self, parameter: torch.Tensor) -> None:
        gradient, parameter.grad = parameter.grad, None
        # The hook fires for a weight of the store too, with nothing in it.
        if gradient is not None:
            self.add(parameter, gradient)
