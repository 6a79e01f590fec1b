"""AdamW on the shards of a stage that this worker owns: each shard a flat optimizer on its range of the stage.

Each element is stepped as a host that holds the whole stage does it, to the same bits. Where layers may move the
stage's parameters lie unit by unit, and each unit is cut into shards by itself, at the same elements in every stage
that has it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise

import torch

from recycle.exec.model.accumulate import FlatLayout
from recycle.exec.model.joined_sums import JoinedSums
from recycle.exec.model.optimizer import COUNTED, SHAPED, FlatOptimizer, decays, flattened, piece_of_step
from recycle.exec.model.shards import Shards
from recycle.exec.model.stored_tensors import piece_name
from recycle.sections import TrainSection


class ShardedOptimizer:
    """What a stage's optimizer is where its state is sharded.

    Args:
        parameters: of the stage by name; their data moves into one flat tensor in `working_type`, in the order of
            `sums`. In the stage, or in each of its units, those that decay come first or last.
        halved: those that are two of equal size in checkpoints, and the ends of the halves' names.
        sums: of their gradients.
        train, working_type: as of `Optimizer`.
        first: number of the stage's first shard in the whole model.
        count: of its shards, or of those of each unit.
        units: of the stage, and the unit of each parameter, where shards are of units; else None.
        tells_shapes: whether names of pieces of a parameter say its shape, as is wanted of parts of tensor ranks.
    """

    def __init__(
        self,
        parameters: Mapping[str, torch.nn.Parameter],
        halved: tuple[set[str], tuple[str, str]],
        sums: JoinedSums,
        train: TrainSection,
        working_type: torch.dtype,
        first: int,
        count: int,
        units: tuple[range, Mapping[str, int]] | None = None,
        tells_shapes: bool = False,
    ) -> None:
        layout, listed = sums.layout, [parameters[name] for name in sums.names]
        self._sums, self._train, self._tells_shapes = sums, train, tells_shapes
        self._initial: torch.Tensor | None = flattened(listed, layout)
        self._decays = [decays(parameter) for parameter in listed]
        is_rounded = working_type != torch.float32
        self._weights = self._initial.to(working_type) if is_rounded else self._initial
        for parameter, view in zip(listed, layout.views(self._weights), strict=True):
            parameter.data = view
        self._places = dict(zip(sums.names, layout.offsets, strict=True))
        self._segments = dict(_segments(parameters, self._places, *halved))
        self._bounds = layout.shards(count, sums.grain)
        if units is not None:
            ends = _ends_of_units(units[0], [units[1][name] for name in sums.names], layout)
            each = [layout.shards(count, sums.grain, begin, end) for begin, end in pairwise(ends)]
            self._bounds = [*(bound for bounds in each for bound in bounds[:-1]), layout.size]
        size = min(piece_of_step(self._weights.device), layout.size)
        self._scratch = torch.empty(size, dtype=torch.float32, device=self._weights.device)
        self.shards = Shards(
            first,
            self._bounds,
            self._weights,
            sums.buffers(),
            self._make,
            sums.norms_squared,
            self._settled,
            sums.common,
        )

    def _settled(self) -> None:
        """Shards come from their owners from now on, not from the initial state."""
        self._initial = None

    def _make(self, place: int) -> OptimizerShard:
        begin, end = self._bounds[place : place + 2]
        live = self._weights[begin:end]
        masters, working = live, None
        if live.dtype != torch.float32:
            masters = torch.empty(end - begin, dtype=torch.float32, device=live.device)
            if self._initial is not None:
                masters.copy_(self._initial[begin:end])
            working = live
        is_new = self._initial is not None
        optimizer = FlatOptimizer(masters, self._decayed(begin, end), self._train, working, is_new)
        return OptimizerShard(optimizer, self._mean(begin), self._scratch, self._names(begin, end), working)

    def _decayed(self, begin: int, end: int) -> slice:
        """The elements of a shard that decay, counted from its first."""
        layout = self._sums.layout
        ranges = zip(self._decays, layout.offsets, [*layout.offsets, layout.size][1:], strict=True)
        there = [(decays, low, high) for decays, low, high in ranges if low < end and begin < high]
        if sum(one[0] != other[0] for one, other in pairwise(there)) > 1:
            raise ValueError("parameters that decay must come first, or last")
        mine = [(max(low, begin) - begin, min(high, end) - begin) for decays, low, high in there if decays]
        return slice(mine[0][0], mine[-1][1]) if mine else slice(0, 0)

    def _mean(self, begin: int) -> Callable[[int, torch.Tensor], object]:
        return lambda start, mean: self._sums.mean(begin + start, mean)

    def _names(self, begin: int, end: int) -> ShardNames:
        shaped = {
            piece_name(name, low - first, high - first, shape, self._tells_shapes): (low - begin, high - begin, shape)
            for name, (first, shape) in self._segments.items()
            if (low := max(first, begin)) < (high := min(first + shape.numel(), end))
        }
        counted = {name: place - begin for name, place in self._places.items() if begin <= place < end}
        return ShardNames(shaped, counted)


class ShardNames:
    """What lies where in a shard.

    Args:
        shaped: name in checkpoints of a parameter, a half of one, or the part of it that the shard has -> first element
            and end in the shard, and the shape of all of it.
        counted: parameters that begin in the shard -> their first element.
    """

    def __init__(self, shaped: Mapping[str, tuple[int, int, torch.Size]], counted: Mapping[str, int]) -> None:
        self.counted = counted
        self._shaped = shaped

    def views(self, prefix: str, flat: torch.Tensor) -> dict[str, torch.Tensor]:
        """Parts of a tensor laid out as the shard."""
        return {
            prefix + name: flat[begin:end].view(shape) if end - begin == shape.numel() else flat[begin:end]
            for name, (begin, end, shape) in self._shaped.items()
        }


class OptimizerShard:
    """The state of one shard (`Shard`).

    Args:
        optimizer: of its range.
        mean: as `FlatOptimizer.step` takes it.
        scratch: likewise.
        names: what lies where.
        working: its live parameters where they are rounded.
    """

    def __init__(
        self,
        optimizer: FlatOptimizer,
        mean: Callable[[int, torch.Tensor], object],
        scratch: torch.Tensor,
        names: ShardNames,
        working: torch.Tensor | None,
    ) -> None:
        self._optimizer, self._mean, self._scratch = optimizer, mean, scratch
        self._names, self._working = names, working

    @property
    def size(self) -> int:
        return self._optimizer.size

    def state_tensors(self) -> list[torch.Tensor]:
        return self._optimizer.state_tensors()

    def step(self, iteration: int, clip_factor: float, before: Sequence[torch.Tensor] | None, kept: int) -> None:
        self._optimizer.step(self._mean, iteration, clip_factor, before, kept, self._scratch)

    def keep(self, before: Sequence[torch.Tensor], start: int) -> int:
        return self._optimizer.keep(before, start)

    def publish(self) -> None:
        self._optimizer.publish()

    def named_state(self, tensors: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
        """The rounded parameters are made of the others, so to read them changes nothing."""
        counts, shaped = tensors[3], tensors[:3]
        if self._working is not None:
            shaped = [*shaped, tensors[0].to(self._working.dtype)]
        named: dict[str, torch.Tensor] = {}
        for prefix, tensor in zip(SHAPED, shaped, strict=False):
            named |= self._names.views(prefix, tensor)
        for name, place in self._names.counted.items():
            named[f"{COUNTED}{name}"] = self._optimizer.count_of(counts, place)
        return named


def _ends_of_units(units: range, of: Sequence[int], layout: FlatLayout) -> list[int]:
    """The elements at which the units of a stage begin, and the end of the last: [units + 1].

    Args:
        of: the unit of each parameter.

    Raises:
        ValueError: those of a unit do not lie together, or not in the order of the units.
    """
    if list(of) != sorted(of):
        raise ValueError("parameters must lie unit by unit")
    offsets = [*layout.offsets, layout.size]
    return [offsets[sum(one < unit for one in of)] for unit in (*units, units.stop)]


def _segments(
    parameters: Mapping[str, torch.nn.Parameter],
    places: Mapping[str, int],
    halved: set[str],
    ends: tuple[str, str],
) -> Iterator[tuple[str, tuple[int, torch.Size]]]:
    """(name in checkpoints, (first element in the stage, shape)) of each parameter, or of each of its halves."""
    for name, parameter in parameters.items():
        if name not in halved:
            yield name, (places[name], parameter.shape)
            continue
        half = parameter.data.chunk(2, 0)[0]
        for number, end in enumerate(ends):
            yield name + end, (places[name] + number * half.numel(), half.shape)
