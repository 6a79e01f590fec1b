"""AdamW on the shards of a stage that this worker owns: each shard a flat optimizer on its range of the stage.

Each element is stepped as a host that holds the whole stage does it, to the same bits. Where layers may move the
stage's parameters lie unit by unit, and each unit is cut into shards by itself, at the same elements in every stage
that has it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise

import torch

from recycle.exec.model.state.accumulate import FlatLayout
from recycle.exec.model.state.joined_sums import JoinedSums
from recycle.exec.model.state.optimizer import FlatOptimizer, OptimizerPiece, decays, flattened, piece_of_step
from recycle.exec.model.state.shards import Shards
from recycle.exec.model.state.stored_names import StoredNames
from recycle.job.sections import TrainSection


class ShardedOptimizer:
    """What a stage's optimizer is where its state is sharded.

    Args:
        parameters: of the stage by name; their data moves into one flat tensor in `working_type`, in the order of
            `sums`. In the stage, or in each of its units, those that decay come first or last.
        names: what they are called in checkpoints.
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
        names: StoredNames,
        sums: JoinedSums,
        train: TrainSection,
        working_type: torch.dtype,
        first: int,
        count: int,
        units: tuple[range, Mapping[str, int]] | None = None,
        tells_shapes: bool = False,
    ) -> None:
        layout, listed = sums.layout, [parameters[name] for name in sums.names]
        self._sums, self._train, self._names, self._tells_shapes = sums, train, names, tells_shapes
        self._initial: torch.Tensor | None = flattened(listed, layout)
        self._decays = [decays(parameter) for parameter in listed]
        is_rounded = working_type != torch.float32
        self._weights = self._initial.to(working_type) if is_rounded else self._initial
        for parameter, view in zip(listed, layout.views(self._weights), strict=True):
            parameter.data = view
        self._places = dict(zip(sums.names, layout.offsets, strict=True))
        self._shapes = {name: parameter.shape for name, parameter in parameters.items()}
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

    def _make(self, place: int) -> OptimizerPiece:
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
        names = self._names.between(self._shapes, self._places, begin, end, self._tells_shapes)
        return OptimizerPiece(optimizer, self._mean(begin), self._scratch, names)

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
