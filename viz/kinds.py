"""How the viewer draws and finds each kind of instruction.

A kind of one's own enters a `Look` here, from the file that registers it (see docs/add-an-instruction.md); without one
it looks as reduces and steps do.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from recycle.ir.instruction import (
    KIND_CLASSES,
    Backward,
    BackwardInput,
    BackwardWeight,
    Beside,
    Forward,
    GatherParameters,
    Instruction,
    OptimizerStep,
    OverlappedPair,
    RecvActivation,
    RecvGradient,
    ReduceBucket,
    ReduceGradients,
    RedundantForward,
    Replay,
    SendActivation,
    SendGradient,
    StageWide,
    Transfer,
    WaitSendActivation,
    WaitSendGradient,
    WeightPart,
)


@dataclass(frozen=True)
class Look:
    """What the viewer adds to a kind.

    Attributes:
        paints: names of paints (`viz.figures.palette`), side by side; with several, what the kind makes is drawn after
            each other in the order of the row's `produces`.
        words: what finds it in the search, beside its token.
    """

    paints: tuple[str, ...] = ("optimizer",)
    words: tuple[str, ...] = ()


_TRANSFER = Look(("communication",), ("comm",))
LOOKS: dict[type[Instruction], Look] = {
    Forward: Look(("forward",)),
    Backward: Look(("input", "weight"), ("backward",)),
    BackwardInput: Look(("input",), ("backward",)),
    BackwardWeight: Look(("weight",), ("backward",)),
    WeightPart: Look(("weight",), ("backward", "bucket")),
    OverlappedPair: Look(("forward",), ("pair",)),
    SendActivation: _TRANSFER,
    RecvActivation: _TRANSFER,
    SendGradient: _TRANSFER,
    RecvGradient: _TRANSFER,
    ReduceBucket: Look(words=("reduce", "bucket")),
    ReduceGradients: Look(words=("reduce",)),
    OptimizerStep: Look(),
    GatherParameters: Look(words=("gather", "shard")),
    RedundantForward: Look(("redundant",), ("redundant",)),
    Replay: Look(("redundant",), ("replay", "check")),
    WaitSendActivation: Look(("communication",), ("wait",)),
    WaitSendGradient: Look(("communication",), ("wait",)),
}


def look_of(kind: type[Instruction]) -> Look:
    """How a kind looks."""
    return LOOKS.get(kind, Look())


def table_as_json() -> list[dict[str, Any]]:
    """What the JavaScript needs of the table: an object per kind, by number.

    `token` and `title` are the row's, `paints` and `words` the look's. `letter` is how a label begins, with the
    micro-batch behind it when `numbered`. `homed` tells kinds with a micro-batch from stage-wide ones; `transfer` kinds
    run beside computing; a `pair` is a forward and a backward at once.
    """
    return [
        {
            "token": cls.token,
            "title": cls.row.title,
            "letter": cls.token if cls.row.letter is None else cls.row.letter,
            "numbered": not issubclass(cls, Transfer | StageWide),
            "homed": not issubclass(cls, StageWide),
            "transfer": issubclass(cls, Beside),
            "pair": issubclass(cls, OverlappedPair),
            "paints": list(look_of(cls).paints),
            "words": list(look_of(cls).words),
        }
        for cls in KIND_CLASSES
    ]
