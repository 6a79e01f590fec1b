"""AdamW on the parameters of one unit of the model, held as one flat tensor, and its names in checkpoints.

The update is computed in fp32. Parameters of a narrower type are copies that follow the fp32 ones after each step.

Parameters are re-bound to parts of a flat tensor, decayed ones first, so that the optimizer works on two long tensors
and everything that a new host of the unit must copy is four tensors. The module that computes with them may be built
anew, for a stage of other units, around the same tensors (`bind`). Learning rate and clip factor are pure functions, so
that every worker derives the same step from the same record.

Tensor ranks cut each half of a gated layer by itself, so each half has a name of its own in checkpoints. Of tied stages
the first stores the shared weight.

Decoupled weight decay: Loshchilov and Hutter, https://arxiv.org/abs/1711.05101; the update itself is torch's.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple

import torch
from torch.optim.adamw import adamw

from recycle.exec.model.state.accumulate import FlatLayout
from recycle.exec.model.state.learning_rate import learning_rate
from recycle.exec.model.stored_tensors import piece_name, piece_of
from recycle.job.footprint import ON_CPU, ON_GPU
from recycle.job.sections import TrainSection

SHAPED = ("", "exp_avg.", "exp_avg_sq.", "rounded.")
"""Before a parameter's name: what of the state has its shape, see `OptimizerPiece.named_state`."""
UNROUNDED = 4
"""Tensors of a state without rounded parameters."""
COUNTED = "step."
"""Before a parameter's name: how many steps it has taken."""


def decays(parameter: torch.Tensor) -> bool:
    """Whether weight decay applies: to matrices, not to norms and biases."""
    return parameter.dim() > 1


def flattened(parameters: Sequence[torch.nn.Parameter], layout: FlatLayout) -> torch.Tensor:
    """The parameters as one flat tensor, fp32 [layout.size], whose parts they become in place of their own memory."""
    device = parameters[0].device if parameters else torch.device("cpu")
    flat = torch.zeros(layout.size, dtype=torch.float32, device=device)
    for parameter, view in zip(parameters, layout.views(flat), strict=True):
        view.copy_(parameter.data)
        parameter.data = view
    return flat


def decayed_until(parameters: Sequence[torch.nn.Parameter], layout: FlatLayout) -> int:
    """The element behind the last that decays. Raises ValueError when one that decays comes later."""
    decayed = [decays(parameter) for parameter in parameters]
    if decayed != sorted(decayed, reverse=True):
        raise ValueError("parameters that decay must come first")
    return layout.offsets[sum(decayed)] if sum(decayed) < len(parameters) else layout.size


def piece_of_step(device: torch.device) -> int:
    """Elements that a step works on at a time."""
    return (ON_CPU if device.type == "cpu" else ON_GPU).stepped


class FlatOptimizer:
    """AdamW over a flat tensor.

    Args:
        parameters: fp32 [n], what is updated: the live parameters, or those that they are rounded from.
        decayed: the elements that decay, at the beginning or at the end.
        train: betas, epsilon, weight decay and the course of the learning rate.
        working: [n], the live parameters where they are not `parameters`; no part of the state.
        is_new: whether moments begin at 0. Else they are to be copied from elsewhere, and filling them would only have
            the host find memory for them in a moment in which others wait.

    Attributes:
        parameters: as given.
    """

    def __init__(
        self,
        parameters: torch.Tensor,
        decayed: slice,
        train: TrainSection,
        working: torch.Tensor | None = None,
        is_new: bool = True,
    ) -> None:
        self._train, self.parameters, self._working = train, parameters, working
        begin, end = decayed.start, decayed.stop
        self._parts = (decayed, slice(0, begin) if begin else slice(end, len(parameters)))
        make = torch.zeros_like if is_new else torch.empty_like
        self._averages = make(parameters)
        self._squares = make(parameters)
        # One count per part, decayed and not, side by side in one tensor.
        self._counts = torch.zeros(len(self._parts), dtype=torch.float32, device=parameters.device)
        self._piece = piece_of_step(parameters.device)

    @property
    def size(self) -> int:
        """n."""
        return len(self.parameters)

    @property
    def live(self) -> torch.Tensor:
        """What the model computes with, [n]."""
        return self.parameters if self._working is None else self._working

    @torch.no_grad()
    def step(
        self,
        gradient: Callable[[int, torch.Tensor], object],
        iteration: int,
        clip_factor: float,
        before: Sequence[torch.Tensor] | None = None,
        kept: int = 0,
        scratch: torch.Tensor | None = None,
    ) -> None:
        """One update.

        Args:
            gradient: called with a and a tensor, fp32 [n], writes the mean gradient from element a on into it; asked
                for each element once.
            iteration: whose learning rate applies.
            clip_factor: factor on the gradient.
            before: takes the state as it was, laid out as `state_tensors`.
            kept: elements of it that `keep` has copied already.
            scratch: fp32 [as many as there are, or as `piece_of_step`], overwritten; units of a stage share one.
        """
        if scratch is None:
            scratch = torch.empty_like(self.parameters[: self._piece])
        if before is not None:
            before[3].copy_(self._counts, non_blocking=True)
        rate = learning_rate(self._train, iteration)
        for part, count, decay in zip(self._parts, self._counts, (self._train.weight_decay, 0.0), strict=True):
            if part.start == part.stop:
                continue  # a count without a parameter has no name, so a checkpoint could not bring it back
            counted = count + 1
            for start in range(part.start, part.stop, self._piece):
                piece = slice(start, min(start + self._piece, part.stop))
                if before is not None and kept < piece.stop:
                    self._copy(before, slice(max(start, kept), piece.stop))
                mean = scratch[: piece.stop - piece.start]
                gradient(start, mean)
                if clip_factor != 1.0:
                    mean.mul_(clip_factor)
                adamw(
                    [self.parameters[piece]],
                    [mean],
                    [self._averages[piece]],
                    [self._squares[piece]],
                    [],
                    [count.clone()],
                    fused=True,
                    amsgrad=False,
                    beta1=self._train.beta1,
                    beta2=self._train.beta2,
                    lr=rate,
                    weight_decay=decay,
                    eps=self._train.epsilon,
                    maximize=False,
                )
                if self._working is not None:
                    self._working[piece].copy_(self.parameters[piece])
            count.copy_(counted)

    @torch.no_grad()
    def keep(self, before: Sequence[torch.Tensor], start: int) -> int:
        """Copy a piece of the state, from element `start` on, into `before`, laid out as `state_tensors`.

        Returns:
            the element behind it; `start` when nothing was left. The step counts are copied by `step`.
        """
        stop = min(start + self._piece, len(self.parameters))
        self._copy(before, slice(start, stop))
        return stop

    def _copy(self, before: Sequence[torch.Tensor], piece: slice) -> None:
        for into, tensor in zip((*before[:3], *before[4:]), self._shaped(), strict=True):
            into[piece].copy_(tensor[piece], non_blocking=True)  # where `into` is on the host; in order on the device

    def _shaped(self) -> list[torch.Tensor]:
        """What of the state is laid out as the parameters are, in the order of SHAPED."""
        return [self.parameters, self._averages, self._squares]

    def state_tensors(self) -> list[torch.Tensor]:
        """Parameters, first and second moments, step counts: the live tensors."""
        return [self.parameters, self._averages, self._squares, self._counts]

    def count_of(self, counts: torch.Tensor, element: int) -> torch.Tensor:
        """Of step counts, [1], that of an element."""
        group = 0 if self._parts[0].start <= element < self._parts[0].stop else 1
        return counts[group : group + 1]

    @torch.no_grad()
    def publish(self) -> None:
        """Write the live parameters that follow from the state."""
        if self._working is not None:
            self._working.copy_(self.parameters)


class UnitOptimizer(FlatOptimizer):
    """AdamW over the parameters of a unit; where they are rounded, the rounded ones are part of its state.

    Args:
        parameters: fp32, of the unit, those that decay first (see `decays`); their data moves into one flat tensor, or
            into a copy of it in `working_type`.
        train: as of `FlatOptimizer`.
        working_type: in which the model computes.

    Attributes:
        layout: where each parameter lies in `parameters`, and in the gradient given to `step`.
    """

    def __init__(
        self,
        parameters: Sequence[torch.nn.Parameter],
        train: TrainSection,
        working_type: torch.dtype = torch.float32,
    ) -> None:
        self.layout = FlatLayout([parameter.shape for parameter in parameters])
        flat = flattened(parameters, self.layout)
        working = None if working_type == torch.float32 else flat.to(working_type)
        super().__init__(flat, slice(0, decayed_until(parameters, self.layout)), train, working)
        self.bind(parameters)

    def bind(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        """Have parameters of the layout's shapes be the live ones, or their copies in the working type."""
        for parameter, view in zip(parameters, self.layout.views(self.live), strict=True):
            parameter.data = view

    def _shaped(self) -> list[torch.Tensor]:
        shaped = super()._shaped()
        return shaped if self._working is None else [*shaped, self._working]

    def state_tensors(self) -> list[torch.Tensor]:
        """Parameters, first and second moments, step counts, then the rounded parameters if any: the live tensors."""
        state = super().state_tensors()
        return state if self._working is None else [*state, self._working]


class StateNames(NamedTuple):
    """What lies where in a range of the state.

    Attributes:
        shaped: name in checkpoints of a parameter, a half of one, or the part of it that the range has -> first element
            and end in the range, and the shape of all of it.
        counted: parameters that begin in the range -> their first element.
    """

    shaped: Mapping[str, tuple[int, int, torch.Size]]
    counted: Mapping[str, int]


class OptimizerPiece:
    """What of a stage steps by itself, a unit or a shard (`StatePiece`).

    Args:
        optimizer: of its range.
        gradient, scratch: as `FlatOptimizer.step` takes them.
        names: what lies where.
    """

    def __init__(
        self,
        optimizer: FlatOptimizer,
        gradient: Callable[[int, torch.Tensor], object],
        scratch: torch.Tensor,
        names: StateNames,
    ) -> None:
        self._optimizer, self._gradient, self._scratch, self._names = optimizer, gradient, scratch, names
        self.size, self.state_tensors = optimizer.size, optimizer.state_tensors
        self.keep, self.publish = optimizer.keep, optimizer.publish

    def step(self, iteration: int, clip_factor: float, before: Sequence[torch.Tensor] | None, kept: int) -> None:
        self._optimizer.step(self._gradient, iteration, clip_factor, before, kept, self._scratch)

    def named_state(self, tensors: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
        """Each parameter under its name, its moments and step count under `exp_avg.`, `exp_avg_sq.` and `step.` before
        it, a rounded one under `rounded.`.

        Rounded parameters that are no part of the state are made of the others: to read them changes nothing.
        """
        live = self._optimizer.live
        if live.dtype != torch.float32 and len(tensors) == UNROUNDED:
            tensors = [*tensors, tensors[0].to(live.dtype)]
        named = {
            prefix + name: flat[begin:end].view(shape) if end - begin == shape.numel() else flat[begin:end]
            for prefix, flat in zip(SHAPED, [*tensors[:3], *tensors[4:]], strict=False)
            for name, (begin, end, shape) in self._names.shaped.items()
        }
        for name, place in self._names.counted.items():
            named[COUNTED + name] = self._optimizer.count_of(tensors[3], place)
        return named


HALVES = (".gate", ".up")
"""Behind the name of a gated layer's parameter: its halves."""


class StoredNames:
    """The names of one stage.

    Args:
        cut: parameter -> the dimension that tensor ranks cut; None where each has one of its own.
        halved: parameters of gated layers.

    Attributes:
        cut, halved: as given.
    """

    def __init__(self, cut: Mapping[str, int | None], halved: Collection[str]) -> None:
        self.cut, self.halved = dict(cut), set(halved)

    def cuts(self) -> Mapping[str, int | None]:
        """As `Stage.cuts`."""
        counts = {f"{COUNTED}{name}": None for name, dimension in self.cut.items() if dimension is None}
        return counts | {
            f"{prefix}{name}{half}": dimension
            for prefix in SHAPED
            for name, dimension in self.cut.items()
            for half in self._halves_of(name)
        }

    def _halves_of(self, name: str) -> Sequence[str]:
        return HALVES if name in self.halved else ("",)

    def between(
        self,
        shapes: Mapping[str, torch.Size],
        places: Mapping[str, int],
        begin: int,
        end: int,
        tells_shapes: bool = False,
    ) -> StateNames:
        """The names of a range of the state.

        Args:
            shapes: of parameters.
            places: their first elements in one flat layout.
            begin, end: elements of it at which the range begins and ends.
            tells_shapes: as of `piece_name`.
        """
        shaped: dict[str, tuple[int, int, torch.Size]] = {}
        for name, shape in shapes.items():
            part = torch.Size([shape[0] // 2, *shape[1:]]) if name in self.halved else shape
            for number, half in enumerate(self._halves_of(name)):
                first = places[name] + number * part.numel()
                low, high = max(first, begin), min(first + part.numel(), end)
                if low < high:
                    piece = piece_name(name + half, low - first, high - first, part, tells_shapes)
                    shaped[piece] = low - begin, high - begin, part
        return StateNames(shaped, {name: place - begin for name, place in places.items() if begin <= place < end})


def without_shared(named: Mapping[str, torch.Tensor], shared: str) -> dict[str, torch.Tensor]:
    """The same tensors but those of the shared weight, or of a piece of it."""
    dropped = {f"{prefix}{shared}" for prefix in (*SHAPED, COUNTED)}
    return {name: view for name, view in named.items() if (piece_of(name) or (name,))[0] not in dropped}
