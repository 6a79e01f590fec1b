"""AdamW on flat tensors, and the names of its state in checkpoints.

The update is computed in fp32. Parameters of a narrower type are copies of the fp32 ones, updated after each step.
Parameters are views of a flat tensor, decayed ones first, so the optimizer works on two long runs and a new host copies
four tensors. Tensor ranks split each half of a gated layer separately, so each half has its own name in checkpoints.

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
"""Prefixes of a parameter's name for tensors of its shape, see `FlatOptimizer.named_state`."""
UNROUNDED = 4
"""Number of tensors of a state without rounded parameters."""
COUNTED = "step."
"""Prefix of a parameter's name for its step count."""


def decays(parameter: torch.Tensor) -> bool:
    """Whether weight decay applies: to matrices, not to norms and biases."""
    return parameter.dim() > 1


BALANCE_RATE = "balance_rate"
"""Attribute of a parameter that is moved against the sign of its mean gradient by this rate, instead of by AdamW."""


class Rule(NamedTuple):
    """How a step changes a parameter: by AdamW, or by `balance_rate` against the gradient's sign if that is not 0."""

    decays: bool
    balance_rate: float = 0.0


def rule_of(parameter: torch.Tensor) -> Rule:
    """Return the rule of a parameter."""
    return Rule(decays(parameter), getattr(parameter, BALANCE_RATE, 0.0))


class Run(NamedTuple):
    """Adjacent elements with the same rule."""

    begin: int
    end: int
    rule: Rule


class StateNames(NamedTuple):
    """Names of the parts of a range of the state, with first element and end in the range, and whole shape."""

    shaped: Mapping[str, tuple[int, int, torch.Size]]
    counted: Mapping[str, int]


Mean = Callable[[int, torch.Tensor], object]
"""Takes (a, tensor): writes the mean gradient from element a into the tensor, fp32 [n]. Called once per element."""


def flattened(parameters: Sequence[torch.nn.Parameter], layout: FlatLayout) -> torch.Tensor:
    """Move the parameters into one flat tensor, fp32 [layout.size], and make them views of it."""
    device = parameters[0].device if parameters else torch.device("cpu")
    flat = torch.zeros(layout.size, dtype=torch.float32, device=device)
    for parameter, view in zip(parameters, layout.views(flat), strict=True):
        view.copy_(parameter.data)
        parameter.data = view
    return flat


def runs_of(rules: Iterable[Rule], layout: FlatLayout, begin: int = 0, end: int | None = None) -> list[Run]:
    runs: list[Run] = []
    ranges = zip(rules, pairwise([*layout.offsets, layout.size]), strict=True)
    for rule, (low, high) in ranges:
        low, high = max(low, begin) - begin, min(high, layout.size if end is None else end) - begin
        if low < high and runs and runs[-1].rule == rule:
            runs[-1] = Run(runs[-1].begin, high, rule)
        elif low < high:
            runs.append(Run(low, high, rule))
    return runs


def piece_of_step(device: torch.device) -> int:
    return (ON_CPU if device.type == "cpu" else ON_GPU).stepped


class FlatOptimizer:
    """AdamW over a flat tensor: one unit or shard (`StatePiece`).

    Args:
        parameters: fp32 [n], updated by steps: the live parameters, or the fp32 masters of rounded ones.
        working: [n], the live parameters if they are not `parameters`; not part of the state.
        is_new: whether moments start at 0; otherwise they are left uninitialized, to be copied from elsewhere.
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
        # Step counts of decayed and of other parameters, in one tensor.
        self._counts = torch.zeros(2, dtype=torch.float32, device=parameters.device)
        self._piece = piece_of_step(parameters.device)

    def attach(self, mean: Mean, begin: int, scratch: torch.Tensor, names: StateNames) -> None:
        """Attach to a stage. Pieces of a stage share `scratch`, fp32 [min(n, `piece_of_step`)]."""
        self._mean, self._begin, self._scratch, self._names = mean, begin, scratch, names

    @property
    def live(self) -> torch.Tensor:
        return self.parameters if self._working is None else self._working

    @torch.no_grad()
    def step(self, iteration: int, clip_factor: float) -> None:
        """Apply one update, with the learning rate of an iteration and a factor on the gradient."""
        rate = learning_rate(self._train, iteration)
        for run in self._runs:
            count = self._counts[int(not run.rule.decays)]
            for start in range(run.begin, run.end, self._piece):
                piece = slice(start, min(start + self._piece, run.end))
                mean = self._scratch[: piece.stop - piece.start]
                self._mean(self._begin + start, mean)
                if run.rule.balance_rate:
                    self.parameters[piece].sub_(mean.sign_(), alpha=run.rule.balance_rate)
                    self._publish(piece)
                    continue
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
                    weight_decay=self._train.weight_decay if run.rule.decays else 0.0,
                    eps=self._train.epsilon,
                    maximize=False,
                )
                self._publish(piece)
        # A count without a parameter has no name, so a checkpoint could not restore it: it stays 0.
        for decays in {run.rule.decays for run in self._runs}:
            self._counts[int(not decays)] += 1

    def state_tensors(self) -> list[torch.Tensor]:
        """The live tensors: parameters, first and second moments, step counts."""
        return [self.parameters, self._averages, self._squares, self._counts]

    def named_state(self, tensors: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
        """Each parameter by its name, and by prefixes its moments, step count and rounded copy.

        The prefixes are `exp_avg.`, `exp_avg_sq.`, `step.` and `rounded.`.
        """
        if self.live.dtype != torch.float32 and len(tensors) == UNROUNDED:
            tensors = [*tensors, tensors[0].to(self.live.dtype)]
        named = {
            prefix + name: flat[begin:end].view(shape) if end - begin == shape.numel() else flat[begin:end]
            for prefix, flat in zip(SHAPED, [*tensors[:3], *tensors[4:]], strict=False)
            for name, (begin, end, shape) in self._names.shaped.items()
        }
        for name, place in self._names.counted.items():
            group = next(int(not run.rule.decays) for run in self._runs if place < run.end)
            named[COUNTED + name] = tensors[3][group : group + 1]
        return named

    def publish(self) -> None:
        self._publish(slice(None))

    @torch.no_grad()
    def _publish(self, piece: slice) -> None:
        if self._working is not None:
            self._working[piece].copy_(self.parameters[piece])


class UnitOptimizer(FlatOptimizer):
    """AdamW over the parameters of a unit; rounded parameters are part of its state.

    The data of the parameters moves into one flat tensor, or into a copy of it in `working_type`.
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
        super().__init__(flat, runs_of(map(rule_of, parameters), self.layout), train, working)
        self.bind(parameters)

    def bind(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        for parameter, view in zip(parameters, self.layout.views(self.live), strict=True):
            parameter.data = view

    def state_tensors(self) -> list[torch.Tensor]:
        """The live tensors: parameters, first and second moments, step counts, then rounded parameters if any."""
        state = super().state_tensors()
        return state if self._working is None else [*state, self._working]


HALVES = (".gate", ".up")
"""Suffixes of a gated layer's parameter name for its halves."""


class StoredNames:
    """The names of a stage's parameters in checkpoints.

    `cut` has the dimension split between tensor ranks; None for a whole parameter of this rank only.
    """

    def __init__(self, cut: Mapping[str, int | None], halved: Collection[str]) -> None:
        self.cut, self.halved = dict(cut), set(halved)

    def cuts(self) -> Mapping[str, int | None]:
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
    dropped = {f"{prefix}{shared}" for prefix in (*SHAPED, COUNTED)}
    return {name: view for name, view in named.items() if (piece_of(name) or (name,))[0] not in dropped}
