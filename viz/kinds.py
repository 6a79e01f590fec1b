"""Appearance of instruction kinds in the viewer: drawing, search, labels and descriptions.

The file that registers a new kind adds its `Look` here (docs/guides/add-an-instruction.md). All text templates are
here: the browser receives them with the lanes (`viz.lane_cache`) and fills them in the same way.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from recycle.ir.columns import Flags
from recycle.ir.instruction import (
    KIND_CLASSES,
    AsyncInstruction,
    Backward,
    BackwardInput,
    BackwardWeight,
    Forward,
    GatherParameters,
    Instruction,
    Offload,
    OptimizerStep,
    OverlappedPair,
    RecvActivation,
    RecvGradient,
    ReduceBucket,
    ReduceGradients,
    RedundantForward,
    Reload,
    Replay,
    SendActivation,
    SendGradient,
    StageWide,
    WaitSendActivation,
    WaitSendGradient,
    WeightPart,
)
from recycle.ir.kinds import is_kind, reads_kinds
from viz.lanes import Flag, LaneTable
from viz.numbers import TimeUnit, time_unit


class Look(NamedTuple):
    """Appearance of a kind.

    Attributes:
        paints: names of paints (`viz.figures.palette`), side by side; several paints follow the order of the row's
            `produces`.
        words: search words besides the token.
    """

    paints: tuple[str, ...] = ("optimizer",)
    words: tuple[str, ...] = ()


_TRANSFER, _HOST_COPY, _WAIT = (Look(("communication",), words) for words in (("comm",), ("host", "copy"), ("wait",)))
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
    Offload: _HOST_COPY,
    Reload: _HOST_COPY,
    WaitSendActivation: _WAIT,
    WaitSendGradient: _WAIT,
}


def look_of(kind: type[Instruction]) -> Look:
    return LOOKS.get(kind, Look())


@reads_kinds
def kinds() -> tuple[dict[str, Any], ...]:
    """Return notation and search words of each kind, by number; also for the browser.

    `token` and `title` come from the row, `paints` and `words` from the look. A label begins with `letter`, followed by
    the micro-batch if `numbered`. `homed` kinds have a micro-batch, others are stage-wide. `transfer` kinds overlap
    compute; a `pair` is a simultaneous forward and backward.
    """
    return tuple(
        {
            "token": cls.token,
            "title": cls.row.title,
            "letter": cls.token if cls.row.letter is None else cls.row.letter,
            "numbered": not issubclass(cls, AsyncInstruction | StageWide),
            "homed": not issubclass(cls, StageWide),
            "transfer": issubclass(cls, AsyncInstruction),
            "pair": issubclass(cls, OverlappedPair),
            "paints": list(look_of(cls).paints),
            "words": list(look_of(cls).words),
        }
        for cls in KIND_CLASSES
    )


LABEL, LABEL_REROUTED = "{letter}{micro_batch}", "{letter}{home}"
"""Labels of kinds with a micro-batch; a micro-batch on a peer is prefixed with its home pipeline."""
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
"""(condition, line) of a tooltip; conditions are "always", the micro-batch's place, "pair", or a `Flag`.

Only the server knows the second half of a pair.
"""
MARKS = {Flag.REROUTED: "re-routed", Flag.CRITICAL: "critical path", Flag.VIOLATION: "breaks a rule"}


def label(table: LaneTable, operation: int) -> str:
    """Return letter and micro-batch: `F4`, with the home if re-routed: `F1.4`; only letters for stage-wide kinds."""
    kind = kinds()[table.kind[operation]]
    if not kind["numbered"]:
        return str(kind["letter"])
    home = table.pipeline[operation], table.micro_batch[operation]
    return _numbered(kind["letter"], *home, bool(table.flags[operation] & Flag.REROUTED))


def _numbered(letter: str, home: int, index: int, is_away: bool) -> str:
    return (LABEL_REROUTED if is_away else LABEL).format(letter=letter, micro_batch=index, home=f"{home}.{index}")


def backward_label(table: LaneTable, operation: int) -> str:
    """Return the label of an overlapped pair's backward, such as `B3`; "" for other operations."""
    if table.paired is None or not kinds()[table.kind[operation]]["pair"]:
        return ""
    home, index = (int(column[operation]) for column in table.paired)
    return _numbered(Backward.token, home, index, home != table.workers[table.lane_of(operation)].pipeline)


def describe(table: LaneTable, operation: int, lane: int, unit: TimeUnit | None = None) -> list[str]:
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


def is_schedule_work(kind: npt.NDArray[np.uint8]) -> Flags:
    """Return whether kinds count as instructions: the work in a schedule file, without transfers, reduces and steps."""
    return ~is_kind(kind, (AsyncInstruction, StageWide))


def mark_text(table: LaneTable, operation: int) -> str:
    return ", ".join(text for flag, text in MARKS.items() if table.flags[operation] & flag)


def summary(table: LaneTable) -> str:
    failed, work = np.flatnonzero(table.failed).tolist(), is_schedule_work(table.kind)
    text = f"{int(work.sum()):,} instructions on {table.lanes} workers"
    if failed:
        text += f"; failed: {', '.join(table.labels[lane] for lane in failed)}"
    if rerouted := int((table.has(Flag.REROUTED) & work).sum()):
        text += f"; {rerouted:,} instructions re-routed to peers"
    return text + "."
