"""AdamW on flat tensors, and the names of its state in checkpoints.

The update is computed in fp32. Parameters of a narrower type are copies that follow the fp32 ones after each step.

Parameters are re-bound to parts of a flat tensor, decayed ones first, so that the optimizer works on two long runs and
everything that a new host of the unit must copy is four tensors. The module that computes with them may be built
anew, for a stage of other units, around the same tensors (`bind`). Learning rate and clip factor are pure functions, so
that every worker derives the same step from the same record.

Tensor ranks cut each half of a gated layer by itself, so each half has a name of its own in checkpoints. Of tied stages
the first stores the shared weight.

Decoupled weight decay: Loshchilov and Hutter, https://arxiv.org/abs/1711.05101; the update itself is torch's.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch.optim.adamw import adamw

from recycle.exec.model.state.accumulate import FlatLayout
from recycle.exec.model.state.learning_rate import learning_rate
from recycle.exec.model.stored_tensors import piece_name, piece_of
from recycle.job.footprint import ON_CPU, ON_GPU
from recycle.job.sections import TrainSection

SHAPED = ("", "exp_avg.", "exp_avg_sq.", "rounded.")
"""Before a parameter's name: what of the state has its shape, see `FlatOptimizer.named_state`."""
UNROUNDED = 4
"""Tensors of a state without rounded parameters."""
COUNTED = "step."
"""Before a parameter's name: how many steps it has taken."""


def decays(parameter: torch.Tensor) -> bool:
    """Whether weight decay applies: to matrices, not to norms and biases."""
    return parameter.dim() > 1


class Run(NamedTuple):
    """Elements behind each other that all decay, or all not."""

    begin: int
    end: int
    decays: bool


class StateNames(NamedTuple):
    """What lies where in a range of the state.

    Attributes:
        shaped: name in checkpoints of a parameter, a half of one, or the part of it that the range has -> first element
            and end in the range, and the shape of all of it.
        counted: parameters that begin in the range -> their first element.
    """

    shaped: Mapping[str, tuple[int, int, torch.Size]]
    counted: Mapping[str, int]


Mean = Callable[[int, torch.Tensor], object]
"""Takes a and a tensor, fp32 [n]: writes the mean gradient from element a on into it. Asked for each element once."""


def flattened(parameters: Sequence[torch.nn.Parameter], layout: FlatLayout) -> torch.Tensor:
    """The parameters as one flat tensor, fp32 [layout.size], whose parts they become in place of their own memory."""
    device = parameters[0].device if parameters else torch.device("cpu")
    flat = torch.zeros(layout.size, dtype=torch.float32, device=device)
    for parameter, view in zip(parameters, layout.views(flat), strict=True):
        view.copy_(parameter.data)
        parameter.data = view
    return flat


def runs_of(decaying: Iterable[bool], layout: FlatLayout, begin: int = 0, end: int | None = None) -> list[Run]:
    """The runs of a range of parameters that lie so.

    Args:
        decaying: whether each parameter decays.
        begin, end: elements at which the range begins and ends; all when left out.
    """
    runs: list[Run] = []
    ranges = zip(decaying, pairwise([*layout.offsets, layout.size]), strict=True)
    for decays, (low, high) in ranges:
        low, high = max(low, begin) - begin, min(high, layout.size if end is None else end) - begin
        if low < high and runs and runs[-1].decays == decays:
            runs[-1] = Run(runs[-1].begin, high, decays)
        elif low < high:
            runs.append(Run(low, high, decays))
    return runs


def piece_of_step(device: torch.device) -> int:
    """Elements that a step works on at a time."""
    return (ON_CPU if device.type == "cpu" else ON_GPU).stepped


class FlatOptimizer:
    """AdamW over a flat tensor: what of a stage steps by itself, a unit or a shard (`StatePiece`).

    Args:
        parameters: fp32 [n], what is updated: the live parameters, or those that they are rounded from.
        runs: of the elements, in order.
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
        runs: Sequence[Run],
        train: TrainSection,
        working: torch.Tensor | None = None,
        is_new: bool = True,
    ) -> None:
        self._train, self.parameters, self._runs, self._working = train, parameters, list(runs), working
        make = torch.zeros_like if is_new else torch.empty_like
        self._averages = make(parameters)
        self._squares = make(parameters)
        # Of what decays and of what does not, side by side in one tensor.
        self._counts = torch.zeros(2, dtype=torch.float32, device=parameters.device)
        self._piece = piece_of_step(parameters.device)

    def attach(self, mean: Mean, begin: int, scratch: torch.Tensor, names: StateNames) -> None:
        """Be a part of a stage.

        Args:
            mean: gives the stage's gradient.
            begin: the first element in the stage.
            scratch: fp32 [as many as there are, or as `piece_of_step`], overwritten; pieces of a stage share one.
            names: what lies where.
        """
        self._mean, self._begin, self._scratch, self._names = mean, begin, scratch, names

    @property
    def live(self) -> torch.Tensor:
        """What the model computes with, [n]."""
        return self.parameters if self._working is None else self._working

    @torch.no_grad()
    def step(self, iteration: int, clip_factor: float) -> None:
        """One update, with the learning rate of an iteration and a factor on the gradient."""
        rate = learning_rate(self._train, iteration)
        for run in self._runs:
            count = self._counts[int(not run.decays)]
            for start in range(run.begin, run.end, self._piece):
                piece = slice(start, min(start + self._piece, run.end))
                mean = self._scratch[: piece.stop - piece.start]
                self._mean(self._begin + start, mean)
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
                    weight_decay=self._train.weight_decay if run.decays else 0.0,
                    eps=self._train.epsilon,
                    maximize=False,
                )
                if self._working is not None:
                    self._working[piece].copy_(self.parameters[piece])
        # A count without a parameter has no name, so a checkpoint could not bring it back: it stays 0.
        for decays in {run.decays for run in self._runs}:
            self._counts[int(not decays)] += 1

    def state_tensors(self) -> list[torch.Tensor]:
        """Parameters, first and second moments, step counts: the live tensors."""
        return [self.parameters, self._averages, self._squares, self._counts]

    def named_state(self, tensors: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
        """Each parameter under its name, its moments and step count under `exp_avg.`, `exp_avg_sq.` and `step.` before
        it, a rounded one under `rounded.`.

        Rounded parameters that are no part of the state are made of the others: to read them changes nothing.
        """
        if self.live.dtype != torch.float32 and len(tensors) == UNROUNDED:
            tensors = [*tensors, tensors[0].to(self.live.dtype)]
        named = {
            prefix + name: flat[begin:end].view(shape) if end - begin == shape.numel() else flat[begin:end]
            for prefix, flat in zip(SHAPED, [*tensors[:3], *tensors[4:]], strict=False)
            for name, (begin, end, shape) in self._names.shaped.items()
        }
        for name, place in self._names.counted.items():
            group = next(int(not run.decays) for run in self._runs if place < run.end)
            named[COUNTED + name] = tensors[3][group : group + 1]
        return named

    @torch.no_grad()
    def publish(self) -> None:
        """Write the live parameters that follow from the state."""
        if self._working is not None:
            self._working.copy_(self.parameters)


class UnitOptimizer(FlatOptimizer):
    """AdamW over the parameters of a unit; where they are rounded, the rounded ones are part of its state.

    Args:
        parameters: fp32, of the unit; their data moves into one flat tensor, or into a copy of it in `working_type`.
        train: as of `FlatOptimizer`.
        working_type: in which the model computes.

    Attributes:
        layout: where each parameter lies in `parameters`.
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
        super().__init__(flat, runs_of(map(decays, parameters), self.layout), train, working)
        self.bind(parameters)

    def bind(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        """Have parameters of the layout's shapes be the live ones, or their copies in the working type."""
        for parameter, view in zip(parameters, self.layout.views(self.live), strict=True):
            parameter.data = view

    def state_tensors(self) -> list[torch.Tensor]:
        """Parameters, first and second moments, step counts, then the rounded parameters if any: the live tensors."""
        state = super().state_tensors()
        return state if self._working is None else [*state, self._working]


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
