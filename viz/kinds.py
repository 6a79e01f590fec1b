"""How the viewer draws, finds, labels and describes each kind of instruction.

A kind of one's own enters a `Look` here, from the file that registers it (see docs/guides/add-an-instruction.md);
without one it looks as reduces and steps do. Each text is a template that stands here alone: the browser gets all of
them with the lanes (`viz.lane_cache`) and fills them in the same way.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

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
from recycle.ir.kinds import is_kind, reads_kinds
from viz.lanes import Flag, LaneTable
from viz.numbers import TimeUnit, time_unit


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


@reads_kinds
def kinds() -> tuple[dict[str, Any], ...]:
    """How each kind is written and found, by number, for the browser too.

    `token` and `title` are the row's, `paints` and `words` the look's. `letter` is how a label begins, with the
    micro-batch behind it when `numbered`. `homed` tells kinds with a micro-batch from stage-wide ones; `transfer` kinds
    run beside computing; a `pair` is a forward and a backward at once.
    """
    return tuple(
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
    )


LABEL, LABEL_AWAY = "{letter}{micro_batch}", "{letter}{home}"
"""Of a kind with a micro-batch; where that runs on a peer, its home pipeline stands before it."""
LINES: tuple[tuple[str, str], ...] = (
    ("always", "{instruction}"),
    ("always", "{title}"),
    ("always", "worker {worker}, stage {stage}"),
    ("always", "start {start}, end {end}, takes {takes}"),
    ("at home", "home pipeline {pipeline}"),
    ("away", "home pipeline {pipeline}, re-routed to this peer"),
    ("pair", "backward's home pipeline {backward_pipeline}"),
    ("CRITICAL", "on the critical path"),
    ("VIOLATION", "breaks a rule"),
)
"""(when it holds, line) of a tooltip: always, of a micro-batch on its home pipeline or away from it, of a pair (whose
second half only the server knows), or of a `Flag`."""
MARKS = {Flag.REROUTED: "re-routed", Flag.CRITICAL: "critical path", Flag.VIOLATION: "breaks a rule"}


def label(table: LaneTable, operation: int) -> str:
    """Letter and micro-batch: `F4`, with its home when it is re-routed: `F1.4`; letters only of stage-wide kinds."""
    kind = kinds()[table.kind[operation]]
    if not kind["numbered"]:
        return str(kind["letter"])
    is_away = bool(table.flags[operation] & Flag.REROUTED)
    return (LABEL_AWAY if is_away else LABEL).format(
        letter=kind["letter"],
        micro_batch=table.micro_batch[operation],
        home=f"{table.pipeline[operation]}.{table.micro_batch[operation]}",
    )


def backward_label(table: LaneTable, operation: int) -> str:
    """The label of the backward of an overlapped pair, `B3`, or with its home; "" of anything else."""
    if table.paired is None or not kinds()[table.kind[operation]]["pair"]:
        return ""
    home, index = (int(column[operation]) for column in table.paired)
    is_away = home != int(table.workers[int(np.searchsorted(table.offsets, operation, side="right")) - 1].pipeline)
    return (LABEL_AWAY if is_away else LABEL).format(letter=Backward.token, micro_batch=index, home=f"{home}.{index}")


def describe(table: LaneTable, operation: int, lane: int, unit: TimeUnit | None = None) -> list[str]:
    """What a person wants to know of an operation, a line each: instruction, kind, worker, times, home, marks.

    Args:
        unit: of its times, that of the table if left out.
    """
    kind = kinds()[table.kind[operation]]
    start, end = float(table.start[operation]), float(table.end[operation])
    time, flags = (unit or time_unit(table)).text, Flag(int(table.flags[operation]))
    holds = {"always", *(str(flag.name) for flag in Flag if flag & flags)}
    if kind["homed"]:
        holds.add("away" if flags & Flag.REROUTED else "at home")
    instruction = table.instruction(operation)
    values: dict[str, Any] = {
        "instruction": instruction,
        "title": kind["title"],
        "worker": table.labels[lane],
        "stage": table.stage[operation],
        "start": time(start),
        "end": time(end),
        "takes": time(end - start),
        "pipeline": table.pipeline[operation],
    }
    if isinstance(instruction, OverlappedPair):
        holds.add("pair")
        values["backward_pipeline"] = instruction.backward.micro_batch.pipeline
    return [line.format(**values) for when, line in LINES if when in holds]


def listed(kind: npt.NDArray[np.uint8]) -> npt.NDArray[np.bool_]:
    """Which of some kinds count as instructions wherever they are counted: what a schedule file lists as its work,
    without transfers, reduces and steps."""
    return ~is_kind(kind, (Beside, StageWide))


def marks(table: LaneTable, operation: int) -> str:
    """The marks of an operation in words, with commas between."""
    return ", ".join(text for flag, text in MARKS.items() if table.flags[operation] & flag)


def summary(table: LaneTable) -> str:
    """The timeline in a sentence."""
    dead = [label for label, failed in zip(table.labels, table.failed, strict=True) if failed]
    away = int((table.has(Flag.REROUTED) & listed(table.kind)).sum())
    text = f"{int(listed(table.kind).sum()):,} instructions on {table.lanes} workers"
    if dead:
        text += f"; failed: {', '.join(dead)}"
    if away:
        text += f"; {away:,} instructions re-routed to peers"
    return text + "."
