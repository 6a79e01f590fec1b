"""Where the gradients of a stage are added up: in one sum for its own parameters, and one for a shared weight.

First and last stage may share a weight. Each has a sum for its gradients, or both the same one where one worker hosts
them. Hosts add their sums up, buffer by buffer, or bucket by bucket of the stage's own.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import partial
from types import MappingProxyType

import torch

from recycle.exec.model.state.accumulate import ACCUMULATORS, Accumulator, FlatLayout
from recycle.exec.model.state.joined_sums import JoinedSums, Summed
from recycle.exec.model.state.optimizer import decays
from recycle.job import Job


class GradientSums:
    """The sums of a stage's gradients.

    Args:
        job: how gradients are accumulated, and which stages share a weight.
        index: the stage.
        parameters: of the stage by name: a shared one first, then those that decay; or then unit by unit.
        is_shared: whether the first of them is shared.
        cut: names of those of which each tensor rank has a part of its own.
        tied: the sum of the shared weight's gradients that another stage of this worker has.
        device: of the sums.
        units: of the parameters, where they lie unit by unit: then a bucket has whole units.

    Attributes:
        own: of all parameters but a shared one.
        tied: of the shared weight; None where there is none.
        replicated: places in `norms_squared` of numbers that all tensor ranks of a worker have alike.
    """

    def __init__(
        self,
        job: Job,
        index: int,
        parameters: Mapping[str, torch.nn.Parameter],
        is_shared: bool,
        cut: Collection[str],
        tied: Accumulator | None,
        device: torch.device,
        units: Mapping[str, int] = MappingProxyType({}),
    ) -> None:
        self._divisor, self._has_ties = job.shape.global_micro_batches, bool(job.ties)
        self._is_first, self._is_last = index == 0, index == job.shape.stages - 1
        names, listed, count = list(parameters), list(parameters.values()), int(is_shared)
        self._names, self._count = names, count
        accumulator = partial(ACCUMULATORS[job.train.accumulation], device=device)
        bound, shapes = job.train.gradient_exponent, [parameter.shape for parameter in listed]
        self.own: Accumulator = accumulator(FlatLayout(shapes[count:]), self._divisor, bound)
        if is_shared and tied is None:
            # Embedding and output layer each give a gradient, and each is rounded by itself.
            tied = accumulator(FlatLayout(shapes[:1]), 2 * self._divisor, bound)
        self.tied = tied if is_shared else None
        self.replicated: Collection[int] = ()
        if job.grid.tensor_parallel > 1:
            counts = zip(names[count:], self.own.blocks_of(), strict=True)
            whose = [name for name, blocks in counts for _ in range(blocks)]
            self.replicated = [place for place, name in enumerate(whose) if name not in cut]
        # Biases get their gradients with the weights of their layers, whichever bucket these are in.
        self._begins: Collection[int] = range(sum(decays(parameter) for parameter in listed[count:]) + 1)
        self._is_by_unit = bool(units)
        if units:
            of = [units[name] for name in names[count:]]
            self._begins = [*(place for place, one in enumerate(of) if one not in of[:place]), len(of)]
        self._bounds: dict[int, Sequence[int]] = {}
        self._place: dict[torch.Tensor, tuple[Accumulator, int]] = {
            parameter: (self.own, place) for place, parameter in enumerate(listed[count:])
        }
        if self.tied is not None:
            self._place[listed[0]] = (self.tied, 0)

    def all(self) -> list[Accumulator]:
        """The shared weight's, then that of all other parameters: in the order of the parameters."""
        return [self.own] if self.tied is None else [self.tied, self.own]

    def joined(self) -> JoinedSums:
        """All as one flat range."""
        shared, own = self._names[: self._count], self._names[self._count :]
        summed = [Summed(self.own, own, common=set(self.replicated))]
        if self.tied is not None:
            is_counted = self._is_first or not self._is_last
            tied = Summed(self.tied, shared, is_own=False, is_counted=is_counted, is_apart=self._has_ties)
            # Unit by unit it is of the embedding, which comes first, or of the head, which comes last.
            summed.insert(0 if is_counted or not self._is_by_unit else len(summed), tied)
        return JoinedSums(summed, self._divisor)

    def clear(self) -> None:
        """Back to zero, for the next iteration."""
        for accumulator in self.all():
            accumulator.clear()
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

    def norms_squared(self) -> list[float]:
        """Squared norms of the mean gradient, block by block."""
        # A shared weight counts once, where the embedding is.
        counted = [self.own] if self._is_last and not self._is_first else self.all()[::-1]
        return [part for accumulator in counted for part in accumulator.mean_norms_squared(self._divisor)]

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
