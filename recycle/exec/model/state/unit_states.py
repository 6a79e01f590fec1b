"""The state of a stage, unit by unit: parameters, moments and step counts, each unit's in tensors of its own.

A unit is what may move to another worker, so its tensors outlive the stage: when the model is cut anew, the next stage
that has the unit takes them over. The sums of gradients belong to the stage, and lie in another order than its units.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial

import torch

from recycle.exec.model.stage import ReplicatedState, UnitState
from recycle.exec.model.state.accumulate import Accumulator
from recycle.exec.model.state.optimizer import OptimizerPiece, StoredNames, UnitOptimizer, piece_of_step
from recycle.job.sections import TrainSection


class UnitOptimizers(ReplicatedState):
    """The optimizers of a stage's units, as one.

    Args:
        units: of the stage, in order.
        unit_of: parameter -> its unit.
        parameters: of the stage, in the order of the layout of `sums`, those that decay first.
        sums: of the gradients; the parameters of the first come first.
        train, working_type: as of `UnitOptimizer`.
        divisor: of a sum of gradients.
        held: units whose state is there already; that of all others begins with the parameters as they are.
        stored: what parameters are called in checkpoints.

    Attributes:
        optimizers: of each unit.
        names: unit -> its parameters, in the order of its optimizer's layout.
    """

    def __init__(
        self,
        units: Sequence[int],
        unit_of: Mapping[str, int],
        parameters: Mapping[str, torch.nn.Parameter],
        sums: Sequence[Accumulator],
        train: TrainSection,
        working_type: torch.dtype,
        divisor: int,
        held: Mapping[int, UnitState],
        stored: StoredNames,
    ) -> None:
        self._divisor = divisor
        self.names: dict[int, list[str]] = {unit: [] for unit in units}
        for name in parameters:
            self.names[unit_of[name]].append(name)
        self.optimizers: dict[int, UnitOptimizer] = {}
        for unit, names in self.names.items():
            mine = [parameters[name] for name in names]
            state = held.get(unit)
            if isinstance(state, UnitOptimizer):
                state.bind(mine)
                self.optimizers[unit] = state
            else:
                self.optimizers[unit] = UnitOptimizer(mine, train, working_type)
        where: dict[str, tuple[Accumulator, int]] = {}
        names_in_order = iter(parameters)
        for accumulator in sums:
            for offset in accumulator.layout.offsets:
                where[next(names_in_order)] = accumulator, offset
        self._segments = {unit: list(self._segments_of(unit, where)) for unit in units}
        device = next(iter(parameters.values())).device if parameters else torch.device("cpu")
        # As `recycle.job.analytic` counts it, from the stage's size.
        size = min(piece_of_step(device), sum(optimizer.size for optimizer in self.optimizers.values()))
        # Kept, since a fresh tensor costs more in page faults than what fills it.
        scratch = torch.empty(size, dtype=torch.float32, device=device)
        self.pieces = {}
        for unit, optimizer in self.optimizers.items():
            names, layout = self.names[unit], optimizer.layout
            shapes, places = dict(zip(names, layout.shapes, strict=True)), dict(zip(names, layout.offsets, strict=True))
            named = stored.between(shapes, places, 0, layout.size)
            self.pieces[unit] = OptimizerPiece(optimizer, partial(self.write_mean, unit), scratch, named)

    def _segments_of(
        self, unit: int, where: Mapping[str, tuple[Accumulator, int]]
    ) -> Iterator[tuple[int, int, Accumulator, int]]:
        """(first and last element of a unit's tensors, where its gradients lie, from which element on), in order."""
        layout = self.optimizers[unit].layout
        ends = [*layout.offsets, layout.size][1:]
        last: tuple[int, int, Accumulator, int] | None = None
        for name, begin, end in zip(self.names[unit], layout.offsets, ends, strict=True):
            accumulator, offset = where[name]
            if last is not None and last[2] is accumulator and last[3] + last[1] - last[0] == offset:
                last = last[0], end, accumulator, last[3]
                continue
            if last is not None:
                yield last
            last = begin, end, accumulator, offset
        if last is not None:
            yield last

    def write_mean(self, unit: int, start: int, mean: torch.Tensor) -> None:
        """The mean gradient from element `start` of a unit's tensors on, fp32, written into `mean`."""
        for begin, end, accumulator, offset in self._segments[unit]:
            low, high = max(start, begin), min(start + len(mean), end)
            if low < high:
                accumulator.mean(self._divisor, mean[low - start : high - start], offset + low - begin)

    def units(self) -> Mapping[int, UnitState]:
        return self.optimizers

    def weights(self) -> list[torch.Tensor]:
        return [optimizer.live for optimizer in self.optimizers.values()]
