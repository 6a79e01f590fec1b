"""Layouts of the optimizer's state on a host of a stage: replicated by unit, or sharded.

With sharded state each host has all live parameters. The gradient sum and the live parameters are flat tensors of one
layout. A shard is a range of both, with bounds at norm blocks. Only owners hold a shard's moments. After a step, and at
the beginning of each generation, they send its parameters (`GATHER_PARAMS`), so undoing a step needs the owned shards
only. If layers may move, each unit is divided into shards separately.

Replicated state has separate tensors per unit (`UnitOptimizers`), which the next stage with the unit takes over.
"""

from __future__ import annotations

from abc import abstractmethod
from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import Parameter

from recycle.exec.model.stage import Naming, ReducedPart, Stage, StateLayout, StatePiece, bucket_key
from recycle.exec.model.state.accumulate import FlatLayout
from recycle.exec.model.state.gradient_sums import JoinedSums, SumBuffer
from recycle.exec.model.state.optimizer import (
    FlatOptimizer,
    StoredNames,
    UnitOptimizer,
    flattened,
    piece_of_step,
    runs_of,
)
from recycle.exec.model.state.rules import Rule
from recycle.exec.transport.base import Transport


class Shards(StateLayout):
    """The shards of one stage on one of its hosts; `pieces` are by number in the whole model.

    Args:
        first: number of the stage's first shard in the whole model.
        bounds: elements at which the shards begin, ordered by unit, and the end of the last: [count + 1].
    """

    kind = "shard"
    pieces: dict[int, StatePiece]

    def __init__(self, first: int, bounds: Sequence[int], weights: Tensor, sums: Sequence[SumBuffer]) -> None:
        self._first, self._bounds, self._weights, self._sums = first, list(bounds), weights, list(sums)
        self.pieces = {}

    @abstractmethod
    def _make(self, begin: int, end: int) -> StatePiece:
        """Create the initial state of a shard, a range of the parameters."""

    @abstractmethod
    def _norms(self, begin: int, end: int) -> list[float]:
        """Squared norms of a range of the summed gradients, as `Stage.gradient_norms_squared`."""

    @abstractmethod
    def _common(self, begin: int, end: int) -> Collection[int]:
        """Indices in the norms of a range that all tensor ranks of a worker share."""

    def settled(self) -> None:
        """Free the initial state; later shards are copied from their owners."""

    @property
    def all_numbers(self) -> range:
        return range(self._first, self._first + len(self._bounds) - 1)

    def own(self, numbers: Collection[int]) -> None:
        """Add shards of the stage to the held state; new shards get the initial state."""
        new = {number: self._make(*self._range(number)) for number in sorted(set(numbers) - self.pieces.keys())}
        self.pieces = dict(sorted((self.pieces | new).items()))

    def keep_only(self, numbers: Collection[int]) -> None:
        self.pieces = {number: shard for number, shard in self.pieces.items() if number in numbers}

    def units(self) -> Mapping[int, StatePiece]:
        return {}

    def parts(self, stage: Stage) -> dict[int, tuple[list[Tensor], Naming]]:
        return {number: (shard.state_tensors(), shard.named_state) for number, shard in self.pieces.items()}

    def gathered(self) -> list[Tensor]:
        return [self._weights]

    def apart(self, number: int) -> list[Tensor]:
        """The state of an owned shard, flat, without the live parameters, which come with gathers.

        Step counts come first, then moments, then parameters, so that it may be copied in pieces between steps.
        """
        live = self._weights.untyped_storage().data_ptr()
        apart = [
            tensor for tensor in self.pieces[number].state_tensors() if tensor.untyped_storage().data_ptr() != live
        ]
        return [tensor.detach().view(-1) for tensor in reversed(apart) if tensor.numel()]

    def bucket(self, stage: Stage, bucket: int, buckets: int) -> list[list[Tensor]]:
        begin, end = stage.bucket_bounds(buckets)[bucket : bucket + 2]
        own = next(buffer for buffer in self._sums if buffer.is_own)
        buffers = [[own.part(*bounds, begin, end) for bounds in pairwise(self._bounds)]]
        if bucket == buckets - 1:
            others = [buffer for buffer in self._sums if not (buffer.is_own or buffer.is_apart)]
            buffers += [[buffer.part(*bounds) for bounds in pairwise(self._bounds)] for buffer in others]
        return buffers

    def summed(self, stage: Stage) -> list[Tensor]:
        return [part for number in self.pieces for part in self._summed(number)]

    def _summed(self, number: int) -> list[Tensor]:
        return [buffer.part(*self._range(number)) for buffer in self._sums]

    def _range(self, number: int) -> tuple[int, int]:
        place = number - self._first
        return self._bounds[place], self._bounds[place + 1]

    def reduce(self, stage: Stage, transport: Transport, bucket: int, buckets: int) -> None:
        transport.reduce_scatter(stage.index, self.bucket(stage, bucket, buckets), bucket_key(bucket, buckets))

    def weights(self) -> list[Tensor]:
        return [self._weights[begin:end] for begin, end in pairwise(self._bounds)]

    def reduced(self, stage: Stage) -> Iterator[ReducedPart]:
        for number in self.pieces:
            words = sum(int(part.view(torch.int64).sum().item()) for part in self._summed(number))
            bounds = self._range(number)
            yield ReducedPart(number, self._norms(*bounds), self._common(*bounds), words % (1 << 64))

    def publish(self) -> None:
        for number, shard in self.pieces.items():
            if number not in self.incomplete:
                shard.publish()


class ShardedOptimizer(Shards):
    """Sharded optimizer of a stage.

    Args:
        parameters: of the stage by name; their data moves into one flat tensor in `working_type`.
        count: number of shards, per stage or per unit.
        ends: elements at which the divided ranges (the stage, or each unit) begin and end.
        tells_shapes: whether names of pieces state the shape of the parameter, as needed for parts of tensor ranks.
    """

    def __init__(
        self,
        parameters: Mapping[str, Parameter],
        names: StoredNames,
        sums: JoinedSums,
        rules: Mapping[str, Rule],
        working_type: torch.dtype,
        first: int,
        count: int,
        ends: Sequence[int],
        tells_shapes: bool = False,
    ) -> None:
        layout, listed = sums.layout, list(parameters.values())
        self._joined, self._names, self._tells_shapes = sums, names, tells_shapes
        self._rules = {name: rules[name] for name in parameters}
        self._initial: Tensor | None = flattened(listed, layout)
        weights = self._initial.to(working_type)
        for parameter, view in zip(listed, layout.views(weights), strict=True):
            parameter.data = view
        parts = [layout.shards(count, sums.grain, begin, end) for begin, end in pairwise(ends)]
        bounds = [*(bound for part in parts for bound in part[:-1]), layout.size]
        self._scratch = scratch_of(layout.size, weights.device)
        super().__init__(first, bounds, weights, sums.parts())

    def settled(self) -> None:
        self._initial = None

    def _norms(self, begin: int, end: int) -> list[float]:
        return self._joined.norms_squared(begin, end)

    def _common(self, begin: int, end: int) -> Collection[int]:
        return self._joined.common(begin, end)

    def _make(self, begin: int, end: int) -> FlatOptimizer:
        live = self._weights[begin:end]
        masters, working = live, None
        if live.dtype != torch.float32:
            masters = torch.empty(end - begin, dtype=torch.float32, device=live.device)
            if self._initial is not None:
                masters.copy_(self._initial[begin:end])
            working = live
        runs = runs_of(self._rules.values(), self._joined.layout, begin, end)
        piece = FlatOptimizer(masters, runs, working, is_new=self._initial is not None)
        names = self._names.between(self._rules, self._joined.layout, begin, end, self._tells_shapes)
        piece.attach(self._joined.mean, begin, self._scratch, names)
        return piece


class UnitOptimizers(StateLayout):
    """The optimizers of a stage's units; other units than those in `held` start from the current parameters."""

    pieces: dict[int, UnitOptimizer]

    def __init__(
        self,
        ends: Mapping[int, tuple[int, int]],
        parameters: Mapping[str, Parameter],
        names: StoredNames,
        sums: JoinedSums,
        rules: Mapping[str, Rule],
        working_type: torch.dtype,
        held: Mapping[int, StatePiece],
    ) -> None:
        self.pieces = {}
        layout = sums.layout
        device = next(iter(parameters.values())).device if parameters else torch.device("cpu")
        places = dict(zip(parameters, layout.offsets, strict=True))
        # Reused, because a fresh tensor costs more in page faults than the computation that fills it.
        wholes = (each.numel() for name, each in parameters.items() if rules[name].optimizer.takes_whole)
        scratch = scratch_of(layout.size, device, max(wholes, default=0))
        for unit, (begin, end) in ends.items():
            unit_parameters = {name: each for name, each in parameters.items() if begin <= places[name] < end}
            piece = held.get(unit)
            if isinstance(piece, UnitOptimizer):
                piece.bind(list(unit_parameters.values()))
            else:
                piece = UnitOptimizer(unit_parameters, rules, working_type)
            piece.attach(sums.mean, begin, scratch, names.between(parameters, layout, begin, end))
            self.pieces[unit] = piece

    def weights(self) -> list[Tensor]:
        return [piece.live for piece in self.pieces.values()]


def scratch_of(size: int, device: torch.device, largest: int = 0) -> Tensor:
    """Space for the mean gradients of a piece, of at most `size` elements; `largest` of those stepped as a whole."""
    return torch.empty(max(min(piece_of_step(device), size), largest), dtype=torch.float32, device=device)


def ends_of_units(units: range, unit_of_parameter: Sequence[int], layout: FlatLayout) -> dict[int, tuple[int, int]]:
    """Unit of a stage -> the elements at which it begins and ends."""
    offsets = [*layout.offsets, layout.size]
    return {
        unit: (offsets[bisect_left(unit_of_parameter, unit)], offsets[bisect_right(unit_of_parameter, unit)])
        for unit in units
    }
