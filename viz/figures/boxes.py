"""Where things are drawn: operations of a LaneTable -> boxes, for all renderers alike.

A whole backward is two boxes, green then orange, in proportion to its halves; an overlapped pair is a forward above a
backward; a transfer is a thin strip below its lane's work. Coordinates are time along, lanes down: lane i fills
i - 0.5 to i + 0.5.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from recycle.ir.instruction import (
    KIND_CLASSES,
    Backward,
    BackwardInput,
    BackwardWeight,
    Forward,
    OptimizerStep,
    OverlappedPair,
    RecvActivation,
    RecvGradient,
    ReduceGradients,
    SendActivation,
    SendGradient,
)
from recycle.ir.redundant_forward import RedundantForward
from viz.figures.palette import BACKWARD_INPUT, BACKWARD_WEIGHT, COMMUNICATION, FORWARD, OPTIMIZER, REDUNDANT, Paint
from viz.figures.time_axis import time_unit
from viz.lanes import NO_PIPELINE, Flag, LaneTable

WORK_TOP, WORK_BOTTOM, STRIP_TOP, STRIP_BOTTOM = -0.40, 0.34, 0.36, 0.46
_MIDDLE = (WORK_TOP + WORK_BOTTOM) / 2


@dataclass(frozen=True, slots=True)
class Box:
    """One rectangle. A transfer's is never `rerouted`: it is too thin for stripes and a border.

    Attributes:
        operation: its place in the LaneTable.
        lane: lane that it lies in; `top` and `bottom` are relative to the lane's middle.
        start, end: time.
        label: text inside; empty on all boxes of an operation but the first.
    """

    operation: int
    lane: int
    start: float
    end: float
    top: float
    bottom: float
    paint: Paint
    label: str
    rerouted: bool


Part = tuple[Paint, float, float, float, float]
"""Paint, begin and end as shares of the operation's time, top, bottom."""


def _whole(paint: Paint) -> Callable[[float], tuple[Part, ...]]:
    return lambda weight_share: ((paint, 0.0, 1.0, WORK_TOP, WORK_BOTTOM),)


def _strip(weight_share: float) -> tuple[Part, ...]:
    return ((COMMUNICATION, 0.0, 1.0, STRIP_TOP, STRIP_BOTTOM),)


def _backward(weight_share: float, top: float = WORK_TOP) -> tuple[Part, ...]:
    turn = 1.0 - weight_share
    parts = ((BACKWARD_INPUT, 0.0, turn, top, WORK_BOTTOM), (BACKWARD_WEIGHT, turn, 1.0, top, WORK_BOTTOM))
    return tuple(part for part in parts if part[2] > part[1])


def _pair(weight_share: float) -> tuple[Part, ...]:
    return ((FORWARD, 0.0, 1.0, WORK_TOP, _MIDDLE), *_backward(weight_share, _MIDDLE))


PARTS: dict[int, Callable[[float], tuple[Part, ...]]] = {
    Forward.kind: _whole(FORWARD),
    Backward.kind: _backward,
    BackwardInput.kind: _whole(BACKWARD_INPUT),
    BackwardWeight.kind: _whole(BACKWARD_WEIGHT),
    OverlappedPair.kind: _pair,
    SendActivation.kind: _strip,
    RecvActivation.kind: _strip,
    SendGradient.kind: _strip,
    RecvGradient.kind: _strip,
    ReduceGradients.kind: _whole(OPTIMIZER),
    OptimizerStep.kind: _whole(OPTIMIZER),
    RedundantForward.kind: _whole(REDUNDANT),
}


def boxes(table: LaneTable) -> Iterator[Box]:
    """The boxes of all operations, lane by lane, in order of start."""
    kinds = [int(kind) for kind in table.kind]
    parts = {kind: PARTS[kind](table.weight_share) for kind in set(kinds)}
    rerouted = table.has(Flag.REROUTED).tolist()
    start, end = table.start.tolist(), table.end.tolist()
    for operation, (lane, kind) in enumerate(zip(table.lane.tolist(), kinds, strict=True)):
        begin, length = start[operation], end[operation] - start[operation]
        text = label(table, operation)
        for paint, first, last, top, bottom in parts[kind]:
            from_, to = begin + first * length, begin + last * length
            away = rerouted[operation] and paint is not COMMUNICATION
            yield Box(operation, lane, from_, to, top, bottom, paint, text, away)
            text = ""


def label(table: LaneTable, operation: int) -> str:
    """Letter and micro-batch: `F4`, with its home when it is re-routed: `F1.4`. R reduces, S steps; transfers none."""
    kind = int(table.kind[operation])
    if kind in LETTERS:
        return LETTERS[kind]
    index = int(table.micro_batch[operation])
    away = bool(table.flags[operation] & Flag.REROUTED)
    mine = f"{table.pipeline[operation]}.{index}" if away else str(index)
    return f"{'F' if kind == OverlappedPair.kind else KIND_CLASSES[kind].token}{mine}"


LETTERS = {
    SendActivation.kind: "",
    RecvActivation.kind: "",
    SendGradient.kind: "",
    RecvGradient.kind: "",
    ReduceGradients.kind: "R",
    OptimizerStep.kind: "S",
}
NAMES = {
    Forward.kind: "forward",
    Backward.kind: "backward (input and weight)",
    BackwardInput.kind: "backward for the input",
    BackwardWeight.kind: "backward for the weights",
    OverlappedPair.kind: "forward and backward, overlapped",
    SendActivation.kind: "activation sent",
    RecvActivation.kind: "activation awaited",
    SendGradient.kind: "gradient sent",
    RecvGradient.kind: "gradient awaited",
    ReduceGradients.kind: "reduction of the stage's gradients",
    OptimizerStep.kind: "optimizer step",
    RedundantForward.kind: "forward of the next stage, run again on its copy",
}


def describe(table: LaneTable, operation: int, lane: int) -> list[str]:
    """What a person wants to know of an operation, a line each: instruction, kind, worker, times, home, marks."""
    instruction = table.instruction(operation)
    start, end = float(table.start[operation]), float(table.end[operation])
    begin, until, long = map(time_unit(table).text, (start, end, end - start))
    lines = [
        str(instruction),
        NAMES[int(table.kind[operation])],
        f"worker {table.labels[lane]}, stage {table.stage[operation]}",
        f"start {begin}, end {until}, takes {long}",
    ]
    home = table.pipeline[operation]
    if home != NO_PIPELINE:
        away = bool(table.flags[operation] & Flag.REROUTED)
        lines.append(f"home pipeline {home}" + (", re-routed to this peer" if away else ""))
    if isinstance(instruction, OverlappedPair):
        lines.append(f"backward's home pipeline {instruction.backward.micro_batch.pipeline}")
    if table.flags[operation] & Flag.CRITICAL:
        lines.append("on the critical path")
    if table.flags[operation] & Flag.VIOLATION:
        lines.append("breaks a rule")
    return lines


def group_edges(table: LaneTable) -> list[int]:
    """Lanes before which a new pipeline begins, or a new rank in lanes ordered by stage; none if each has one lane."""
    steps = list(zip(table.workers, table.workers[1:], strict=False))
    by_pipeline = [i for i, (above, below) in enumerate(steps, 1) if above.pipeline != below.pipeline]
    by_rank = [i for i, (above, below) in enumerate(steps, 1) if above.rank != below.rank]
    fewest = min(by_pipeline, by_rank, key=len)
    return fewest if len(fewest) < len(steps) else []
