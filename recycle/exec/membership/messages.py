"""What the register, commits and reports hold, and their texts."""

from __future__ import annotations

import json
from typing import Literal, TypeVar

import msgspec
from msgspec import Struct

GO, VOID = "go", "void"
Mode = Literal["staggered", "barrier"]
"""How the stages of an iteration step: each at once after its own reduce, to be validated by the commit; or all after
the commit."""


class Commit(Struct, frozen=True):
    """What the commit of an iteration fixes for everyone.

    Attributes:
        step: the iteration.
        loss: mean loss over its micro-batches.
        grad_norm: global norm of the mean gradient, before clipping.
        clip_factor: factor on the gradient; None when the step is skipped.
        mode: how it stepped.
        next_mode: how the next iteration steps, unless it is the first of a generation.
        recent: norms of the last iterations, this one included, that the next mode follows from; the oldest first.
        last: iteration after which all leave the generation. Said before any worker can have begun the one behind it.
        finished: this was the last iteration of the run.
        checkpoint: the state after this step is to be kept in a checkpoint.
    """

    step: int
    loss: float
    grad_norm: float
    clip_factor: float | None
    mode: Mode = "barrier"
    next_mode: Mode = "barrier"
    recent: list[float] = []
    last: int | None = None
    finished: bool = False
    checkpoint: bool = False


class GenerationRecord(Struct, frozen=True):
    """The register. `roles` maps processes (by the position they started in) to positions of the plan.

    Attributes:
        joins: process that joins -> process it copies the stage's state from.
        committed: last committed iteration, -1 before the first.
        commit: of the last committed iteration; None before the first.
        mode: of the iteration behind it.
    """

    generation: int
    live: list[str]
    roles: dict[str, str]
    plan: str
    committed: int = -1
    commit: Commit | None = None
    joins: dict[str, str] = {}
    mode: Mode = "barrier"


class Report(Struct, frozen=True):
    """A worker's part of a commit.

    Attributes:
        norms: squared gradient norm of each hosted stage, as floats whose exact sum it is. With tensor parallelism that
            of what this tensor rank alone holds.
        loss: its loss sum, last stage only.
        compute: `<stage><F|I|W|B>` -> (how many it ran, their seconds), without any wait for peers.
        replicated: likewise the squared norm of what all tensor ranks hold; without tensor parallelism nothing.
    """

    norms: dict[int, list[float]]
    loss: float | None
    compute: dict[str, tuple[int, float]] = {}
    replicated: dict[int, list[float]] = {}


Message = TypeVar("Message", GenerationRecord, Commit, Report)


def encode(message: GenerationRecord | Commit | Report) -> str:
    """The text of a message. Python's JSON, because it keeps NaN and infinity, which a bad gradient is reported by."""
    return json.dumps(msgspec.to_builtins(message, str_keys=True))


def decode(text: str, kind: type[Message]) -> Message:
    """The message that `encode` wrote."""
    return msgspec.convert(json.loads(text), type=kind, str_keys=True)
