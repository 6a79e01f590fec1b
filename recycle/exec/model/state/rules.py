"""Optimizers, and which of them steps a parameter with which learning rate and weight decay.

An optimizer keeps everything that it remembers in tensors of the parameters' shapes, so that workers copy it, undo
steps with it and store it in checkpoints. Add one as a class in `OPTIMIZERS`, or name your class in the job.
"""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from recycle.errors import JobError
from recycle.job import Job
from recycle.job.named import function_named
from recycle.job.sections import TrainSection

BALANCE_RATE = "balance_rate"
"""Attribute of a parameter that is moved against the sign of its mean gradient by this rate."""
ROW_BLOCKS = "row_blocks"
"""Attribute of a matrix made of several, in equal groups of rows: number of groups, rows of each matrix in a group."""
_IN_LAYER = re.compile(r"(?:^|\.)layers\.[^.]+\.")


class Update(NamedTuple):
    """What an optimizer gets for a step of one parameter, or of a part of several.

    Attributes:
        parameter: fp32, flat, or in its shape with `Optimizer.takes_whole`.
        gradient: the mean gradient after clipping, in the shape of `parameter`; may be overwritten.
        state: the tensors that `Optimizer.state` names, in the shape of `parameter`.
        steps: earlier steps, fp32 []; may be overwritten.
        rate: learning rate.
        blocks: `ROW_BLOCKS` of the parameter, or one group of all rows.
    """

    parameter: Tensor
    gradient: Tensor
    state: Sequence[Tensor]
    steps: Tensor
    rate: float
    weight_decay: float
    blocks: tuple[int, Sequence[int]]


class Optimizer(ABC):
    """The base class of optimizers; docs/guides/optimizers.md has an example.

    Attributes:
        state: names of its tensors of a parameter, fp32 in the parameter's shape and 0 at first. They are prefixes of
            the parameter's name in checkpoints.
        takes_whole: whether `step` needs whole parameters in their shape; otherwise it gets flat parts of any length.
    """

    state: ClassVar[tuple[str, ...]]
    takes_whole: ClassVar[bool] = False

    def __init__(self, train: TrainSection) -> None:
        self.train = train

    def takes(self, name: str, parameter: Tensor) -> bool:
        """Whether it steps a parameter, by its name in the whole model; AdamW steps the others."""
        return True

    @abstractmethod
    def step(self, update: Update) -> None:
        """Change the parameter and its state in place; the result must depend on `update` only."""


class AdamW(Optimizer):
    """Decoupled weight decay: Loshchilov and Hutter, https://arxiv.org/abs/1711.05101; the update is torch's."""

    state = ("exp_avg", "exp_avg_sq")

    def step(self, update: Update) -> None:
        average, square = update.state
        adamw(
            [update.parameter],
            [update.gradient],
            [average],
            [square],
            [],
            [update.steps],
            fused=True,
            amsgrad=False,
            beta1=self.train.beta1,
            beta2=self.train.beta2,
            lr=update.rate,
            weight_decay=update.weight_decay,
            eps=self.train.epsilon,
            maximize=False,
        )


class Muon(Optimizer):
    """Orthogonalized momentum for the matrices of layers: Jordan et al., https://kellerjordan.github.io/posts/muon.

    The weights of queries, keys and values, and both halves of a gated layer, are matrices by themselves.
    Updates are scaled to the usual size of AdamW's, so that both have one learning rate and weight decay: Liu et al.,
    Muon is Scalable for LLM Training, https://arxiv.org/abs/2502.16982, equation 4.
    """

    state = ("momentum_buffer",)
    takes_whole = True

    def takes(self, name: str, parameter: Tensor) -> bool:
        return parameter.dim() == 2 and _IN_LAYER.search(name) is not None

    def step(self, update: Update) -> None:
        (momentum,), beta, parameter = update.state, self.train.momentum, update.parameter
        momentum.lerp_(update.gradient, 1 - beta)
        parameter.mul_(1 - update.rate * update.weight_decay)
        groups, rows = update.blocks
        moved, directions = (
            torch.split(tensor.view(groups, sum(rows), -1), list(rows), 1)
            for tensor in (parameter, update.gradient.lerp_(momentum, beta))
        )
        for block, direction in zip(moved, directions, strict=True):
            matrix = orthogonalized(direction.flatten(0, 1))
            block.add_(matrix.view_as(block), alpha=-update.rate * (0.2 * math.sqrt(max(matrix.shape))))


_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Of x, x^3 and x^5 in Jordan's Newton-Schulz iteration, which brings singular values near 1 in five steps."""


def orthogonalized(matrix: Tensor) -> Tensor:
    """Return U V' of a matrix U S V', approximately, with singular values between 0.7 and 1.2; bf16 in its shape."""
    linear, cubic, quintic = _COEFFICIENTS
    is_tall = matrix.shape[0] > matrix.shape[1]
    x = (matrix.t() if is_tall else matrix).bfloat16()
    x = x / x.norm().clamp(min=1e-7)
    for _ in range(5):
        gram = x @ x.t()
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=cubic, alpha=quintic), x, beta=linear)
    return x.t() if is_tall else x


class SGD(Optimizer):
    """Momentum as torch.optim.SGD has it, with weight decay added to the gradient."""

    state = ("momentum_buffer",)

    def step(self, update: Update) -> None:
        (momentum,) = update.state
        decayed = update.gradient.add_(update.parameter, alpha=update.weight_decay)
        update.parameter.add_(momentum.mul_(self.train.momentum).add_(decayed), alpha=-update.rate)


class _Balance(Optimizer):
    state = AdamW.state  # unused, but checkpoints have it

    def __init__(self, train: TrainSection, balance_rate: float) -> None:
        super().__init__(train)
        self._rate = balance_rate

    def step(self, update: Update) -> None:
        update.parameter.sub_(update.gradient.sign_(), alpha=self._rate)


OPTIMIZERS: Mapping[str, type[Optimizer]] = {"adamw": AdamW, "muon": Muon, "sgd": SGD}
"""`[train] optimizer` -> class."""


def optimizer_named(text: str, key: str, folders: Sequence[str] = ()) -> type[Optimizer]:
    """The class that a job names. Raises JobError if it cannot be imported, or is not an `Optimizer`."""
    if text in OPTIMIZERS:
        return OPTIMIZERS[text]
    named: Any = function_named(text, key, folders)
    if not (isinstance(named, type) and issubclass(named, Optimizer)):
        raise JobError(f"{key}: {text} is not a class derived from recycle.exec.Optimizer")
    return named


def require_optimizers(job: Job) -> None:
    """Raise JobError if an optimizer of the job is unknown, or needs whole parameters that the job divides."""
    for key, text in job.train.optimizers().items():
        if not optimizer_named(text, key, job.model.import_from or ()).takes_whole:
            continue
        for divides, remedy in (
            (job.train.sharded_optimizer, "[train] sharded_optimizer = false"),
            (job.grid.tensor_parallel > 1, "[shape] tensor_parallel = 1"),
        ):
            if divides:
                raise JobError(f'{key}: "{text}" needs whole matrices, and this job divides them; set {remedy}')


def decays(parameter: Tensor) -> bool:
    """Whether weight decay applies by default: to matrices, not to norms and biases."""
    return parameter.dim() > 1


class Rule(NamedTuple):
    """How a step changes a parameter.

    Attributes:
        scale: factor of the learning rate.
        blocks: see `Update`.
        decays: whether its steps are counted with the decayed parameters' or the others', see `FlatOptimizer`.
        order: order of rules in a unit that keeps the state of an optimizer together.
    """

    optimizer: Optimizer
    scale: float
    weight_decay: float
    blocks: tuple[int, Sequence[int]]
    decays: bool
    order: tuple[Any, ...]


def rules_of(train: TrainSection, parameters: Mapping[str, Tensor], folders: Sequence[str] = ()) -> dict[str, Rule]:
    """The rules of parameters, by their names in the whole model. Raises JobError as `optimizer_named` does.

    Args:
        folders: where modules of optimizers are looked for.
    """
    made = cache(lambda text: optimizer_named(text, "[train] optimizer", folders)(train))
    balancing = cache(lambda rate: _Balance(train, rate))

    def rule_of(name: str, parameter: Tensor) -> Rule:
        is_decayed = decays(parameter)
        place = next((place for place, group in enumerate(train.groups) if group.has(name)), len(train.groups))
        scale, weight_decay, text = 1.0, None, train.optimizer
        if place < len(train.groups):
            group = train.groups[place]
            scale, weight_decay, text = group.learning_rate_scale, group.weight_decay, group.optimizer or text
        if weight_decay is None:
            weight_decay = train.weight_decay if is_decayed else 0.0
        optimizer: Optimizer = made(text)
        if balance_rate := getattr(parameter, BALANCE_RATE, 0.0):
            optimizer = balancing(balance_rate)
        elif not optimizer.takes(name, parameter):
            optimizer = made("adamw")
        kind = type(optimizer)
        # Decayed parameters come first; where they meet the others, both are AdamW's.
        order = not is_decayed, (kind is AdamW) == is_decayed, kind.__qualname__, balance_rate, place
        blocks = getattr(parameter, ROW_BLOCKS, (1, tuple(parameter.shape[:1]))) if optimizer.takes_whole else (1, ())
        return Rule(optimizer, scale, weight_decay, blocks, is_decayed, order)

    return {name: rule_of(name, parameter) for name, parameter in parameters.items()}
