"""Optimizers on flat tensors, and the names of their state in checkpoints.

The update is computed in fp32. Parameters of a narrower type are copies of the fp32 ones, updated after each step.
Parameters are views of a flat tensor, ordered by rule, so AdamW works on two long runs and a new host copies four
tensors. Tensor ranks split each half of a gated layer separately, so each half has its own name in checkpoints.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from recycle.exec.model.state.accumulate import FlatLayout
from recycle.exec.model.state.learning_rate import learning_rate
from recycle.exec.model.state.rules import AdamW, Rule, Update
from recycle.exec.model.stored_tensors import piece_name, piece_of
from recycle.job.footprint import ON_CPU, ON_GPU

ROUNDED = "rounded."
"""Prefix of a parameter's name for its rounded copy, see `FlatOptimizer.named_state`."""
COUNTED = "step."
"""Prefix of a parameter's name for its step count."""


class Run(NamedTuple):
    """Adjacent elements with the same rule; `shape` is that of a parameter which is stepped as a whole."""

    begin: int
    end: int
    rule: Rule
    shape: Sequence[int] = (-1,)

    def pieces(self, elements: int) -> Iterator[slice]:
        """Parts of at most `elements`, or the whole parameter."""
        elements = elements if self.shape == (-1,) else self.end - self.begin
        for start in range(self.begin, self.end, elements):
            yield slice(start, min(start + elements, self.end))


class StateNames(NamedTuple):
    """Names of the parts of a range of the state, with first element and end in the range, and whole shape."""

    shaped: Mapping[str, tuple[int, int, torch.Size]]
    counted: Mapping[str, int]


Mean = Callable[[int, Tensor], object]
"""Takes (a, tensor): writes the mean gradient from element a into the tensor, fp32 [n]. Called once per element."""


def flattened(parameters: Sequence[Parameter], layout: FlatLayout) -> Tensor:
    """Move the parameters into one flat tensor, fp32 [layout.size], and make them views of it."""
    device = parameters[0].device if parameters else torch.device("cpu")
    flat = torch.zeros(layout.size, dtype=torch.float32, device=device)
    for parameter, view in zip(parameters, layout.views(flat), strict=True):
        view.copy_(parameter.data)
        parameter.data = view
    return flat


def runs_of(rules: Iterable[Rule], layout: FlatLayout, begin: int = 0, end: int | None = None) -> list[Run]:
    runs: list[Run] = []
    ranges = zip(rules, layout.shapes, pairwise([*layout.offsets, layout.size]), strict=True)
    for rule, shape, (low, high) in ranges:
        low, high = max(low, begin) - begin, min(high, layout.size if end is None else end) - begin
        if low < high and rule.optimizer.takes_whole:
            runs.append(Run(low, low + shape.numel(), rule, shape))
        elif low < high and runs and runs[-1].rule == rule:
            runs[-1] = Run(runs[-1].begin, high, rule)
        elif low < high:
            runs.append(Run(low, high, rule))
    return runs


def piece_of_step(device: torch.device) -> int:
    return (ON_CPU if device.type == "cpu" else ON_GPU).stepped


class FlatOptimizer:
    """The optimizers of a flat tensor: one unit or shard (`StatePiece`).

    Args:
        parameters: fp32 [n], updated by steps: the live parameters, or the fp32 masters of rounded ones.
        working: [n], the live parameters if they are not `parameters`; not part of the state.
        is_new: whether moments start at 0; otherwise they are left uninitialized, to be copied from elsewhere.
    """

    def __init__(
        self, parameters: Tensor, runs: Sequence[Run], working: Tensor | None = None, is_new: bool = True
    ) -> None:
        self.parameters, self._runs, self._working = parameters, list(runs), working
        make = torch.zeros_like if is_new else torch.empty_like
        # Name -> first element and tensor, which spans all runs whose optimizers have a tensor of that name.
        self._moments: dict[str, tuple[int, Tensor]] = {}
        for name in dict.fromkeys(name for run in runs for name in run.rule.optimizer.state):
            spanned = [run for run in runs if name in run.rule.optimizer.state]
            begin, end = spanned[0].begin, spanned[-1].end
            self._moments[name] = begin, make(parameters[begin:end])
        # Step counts of decayed and of other parameters, in one tensor.
        self._counts = torch.zeros(2, dtype=torch.float32, device=parameters.device)
        self._piece = piece_of_step(parameters.device)

    def attach(self, mean: Mean, begin: int, scratch: Tensor, names: StateNames) -> None:
        """Attach to a stage. Pieces of a stage share `scratch`, fp32, see `scratch_of`."""
        self._mean, self._begin, self._scratch, self._names = mean, begin, scratch, names

    @property
    def live(self) -> Tensor:
        return self.parameters if self._working is None else self._working

    @torch.no_grad()
    def step(self, iteration: int, clip_factor: float) -> None:
        """Apply one update, with the learning rate of an iteration and a factor on the gradient."""
        for run in self._runs:
            rule, count = run.rule, self._counts[int(not run.rule.decays)]
            for piece in run.pieces(self._piece):
                mean = self._scratch[: piece.stop - piece.start]
                self._mean(self._begin + piece.start, mean)
                if clip_factor != 1.0:
                    mean.mul_(clip_factor)
                moments = (self._moments[name] for name in rule.optimizer.state)
                state = [flat[piece.start - begin : piece.stop - begin] for begin, flat in moments]
                parameter, gradient, *state = (
                    tensor.view(*run.shape) for tensor in (self.parameters[piece], mean, *state)
                )
                scaled = learning_rate(rule.optimizer.train, iteration) * rule.scale
                update = Update(parameter, gradient, state, count.clone(), scaled, rule.weight_decay, rule.blocks)
                rule.optimizer.step(update)
                self._publish(piece)
        # A count without a parameter has no name, so a checkpoint could not restore it: it stays 0.
        for decays in {run.rule.decays for run in self._runs}:
            self._counts[int(not decays)] += 1

    def state_tensors(self) -> list[Tensor]:
        """The live tensors: parameters, tensors of the optimizers, step counts."""
        return [self.parameters, *(flat for _, flat in self._moments.values()), self._counts]

    def named_state(self, tensors: Sequence[Tensor]) -> dict[str, Tensor]:
        """Each parameter by its name, and by prefixes its optimizer's tensors, step count and rounded copy.

        The prefixes are the names in `Optimizer.state`, such as `exp_avg.`, then `step.` and `rounded.`.
        """
        end = 1 + len(self._moments)
        (parameters, *moments), (counts, *rounded) = tensors[:end], tensors[end:]
        if self.live.dtype != torch.float32 and not rounded:
            rounded = [parameters.to(self.live.dtype)]
        kept = [("", 0, parameters)]
        kept += [(f"{name}.", at[0], flat) for (name, at), flat in zip(self._moments.items(), moments, strict=True)]
        kept += [(ROUNDED, 0, flat) for flat in rounded]
        named: dict[str, Tensor] = {}
        for prefix, first, flat in kept:
            for name, (begin, end, shape) in self._names.shaped.items():
                if prefix in ("", ROUNDED) or prefix[:-1] in self._rule_at(begin).optimizer.state:
                    view = flat[begin - first : end - first]
                    named[prefix + name] = view.view(shape) if len(view) == shape.numel() else view
        for name, place in self._names.counted.items():
            group = int(not self._rule_at(place).decays)
            named[COUNTED + name] = counts[group : group + 1]
        return named

    def _rule_at(self, place: int) -> Rule:
        return next(run.rule for run in self._runs if place < run.end)

    def publish(self) -> None:
        self._publish(slice(None))

    @torch.no_grad()
    def _publish(self, piece: slice) -> None:
        if self._working is not None:
            self._working[piece].copy_(self.parameters[piece])


class UnitOptimizer(FlatOptimizer):
    """The optimizers of a unit's parameters, by name; rounded parameters are part of its state.

    The data of the parameters moves into one flat tensor, or into a copy of it in `working_type`.
    """

    def __init__(
        self, parameters: Mapping[str, Parameter], rules: Mapping[str, Rule], working_type: torch.dtype = torch.float32
    ) -> None:
        listed = list(parameters.values())
        self.layout = FlatLayout([parameter.shape for parameter in listed])
        flat = flattened(listed, self.layout)
        working = None if working_type == torch.float32 else flat.to(working_type)
        runs = runs_of((rules[name] for name in parameters), self.layout)
        super().__init__(flat, runs, working)
        self.bind(listed)

    def bind(self, parameters: Sequence[Parameter]) -> None:
        for parameter, view in zip(parameters, self.layout.views(self.live), strict=True):
            parameter.data = view

    def state_tensors(self) -> list[Tensor]:
        """The live tensors: as `FlatOptimizer`, then rounded parameters if any."""
        state = super().state_tensors()
        return state if self._working is None else [*state, self._working]


HALVES = (".gate", ".up")
"""Suffixes of a gated layer's parameter name for its halves."""


class StoredNames:
    """The names of a stage's parameters in checkpoints.

    `cut` has the dimension split between tensor ranks; None for a whole parameter of this rank only. `state` names the
    tensors of the optimizers.
    """

    def __init__(
        self, cut: Mapping[str, int | None], halved: Collection[str], state: Collection[str] = AdamW.state
    ) -> None:
        self.cut, self.halved = dict(cut), set(halved)
        self._prefixes = ("", *(f"{name}." for name in state), ROUNDED)

    def cuts(self) -> Mapping[str, int | None]:
        counts = {f"{COUNTED}{name}": None for name, dimension in self.cut.items() if dimension is None}
        return counts | {
            f"{prefix}{name}{half}": dimension
            for prefix in self._prefixes
            for name, dimension in self.cut.items()
            for half in self._halves_of(name)
        }

    def _halves_of(self, name: str) -> Sequence[str]:
        return HALVES if name in self.halved else ("",)

    def between(
        self, names: Iterable[str], layout: FlatLayout, begin: int, end: int, tells_shapes: bool = False
    ) -> StateNames:
        """Names of the parts of a range of the parameters `names`, which have this layout."""
        shaped: dict[str, tuple[int, int, torch.Size]] = {}
        counted: dict[str, int] = {}
        for name, shape, place in zip(names, layout.shapes, layout.offsets, strict=True):
            if begin <= place < end:
                counted[name] = place - begin
            part = torch.Size([shape[0] // 2, *shape[1:]]) if name in self.halved else shape
            for number, half in enumerate(self._halves_of(name)):
                first = place + number * part.numel()
                low, high = max(first, begin), min(first + part.numel(), end)
                if low < high:
                    piece = piece_name(name + half, low - first, high - first, part, tells_shapes)
                    shaped[piece] = low - begin, high - begin, part
        return StateNames(shaped, counted)


def without_shared(named: Mapping[str, Tensor], shared: str) -> dict[str, Tensor]:
    wholes = {name: (piece_of(name) or (name,))[0] for name in named}
    return {name: view for name, view in named.items() if not f".{wholes[name]}".endswith(f".{shared}")}
