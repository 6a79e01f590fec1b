"""Geometry of drawn operations, for all renderers: LaneTable -> boxes.

An operation fills its height with the paints of its kind, side by side: a whole backward is two boxes, sized like its
halves. An overlapped pair is a forward above a backward; transfers are thin strips below their lane's work, copies to
and from the host above. Coordinates are time and lanes: lane i spans i - 0.5 to i + 0.5.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from recycle.ir.instruction import Backward, Forward, Offload, OverlappedPair, RecvActivation, Reload, SendActivation
from recycle.ir.kinds import KIND_CLASSES, AsyncInstruction, Instruction
from viz.figures.palette import (
    CHUNK_PAINTS,
    FAILURE,
    FAILURE_BAND,
    FORWARD,
    INK,
    PAINTS,
    Paint,
    paint_named,
    shade_of,
)
from viz.kinds import backward_label, label, look_of
from viz.lanes import Flag, LaneTable

WORK_TOP, WORK_BOTTOM = -0.40, 0.34
STRIPS: dict[type[Instruction], tuple[float, float]] = {
    Offload: (-0.49, -0.455),
    Reload: (-0.445, -0.41),
    SendActivation: (0.36, 0.41),
    RecvActivation: (0.36, 0.41),
    AsyncInstruction: (0.42, 0.47),
}
"""Heights of the strips of what runs beside the work: copies to the host and back, activations, and all others."""
_MIDDLE = (WORK_TOP + WORK_BOTTOM) / 2


@dataclass(frozen=True, slots=True)
class Box:
    """A rectangle. Boxes of transfers are never `rerouted`: they are too thin for stripes and a border.

    Attributes:
        lane: lane of the box; `top` and `bottom` are relative to the lane's middle.
        label: text inside; on the first box of an operation and of a pair's backward only.
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


BoxPart = tuple[Paint, float, float, float, float]
"""(paint, begin and end as shares of the operation's time, top, bottom)."""


def box_parts(kind: int, weight_share: float) -> tuple[BoxPart, ...]:
    cls = KIND_CLASSES[kind]
    if issubclass(cls, OverlappedPair):
        forward = _side_by_side(Forward, weight_share, WORK_TOP, _MIDDLE)
        return forward + _side_by_side(Backward, weight_share, _MIDDLE, WORK_BOTTOM)
    heights = next((strip for base, strip in STRIPS.items() if issubclass(cls, base)), (WORK_TOP, WORK_BOTTOM))
    return _side_by_side(cls, weight_share, *heights)


def _side_by_side(cls: type[Instruction], weight_share: float, top: float, bottom: float) -> tuple[BoxPart, ...]:
    paints = [paint_named(name) for name in look_of(cls).paints]
    count = len(paints)
    turns = [0.0, 1.0 - weight_share, 1.0] if count == 2 else [place / count for place in range(count + 1)]
    parts = zip(paints, turns[:-1], turns[1:], strict=True)
    return tuple((paint, first, last, top, bottom) for paint, first, last in parts if last > first)


def boxes(table: LaneTable, *, is_labelled: bool = True) -> Iterator[Box]:
    """Iterate over the boxes of all operations, by lane and start; three times faster without labels."""
    kinds = table.kind.tolist()
    shades = [dict(zip(PAINTS, CHUNK_PAINTS[shade_of(i, table.chunks)], strict=True)) for i in range(table.chunks)]
    parts = {
        kind: [[(shaded[paint], *rest) for paint, *rest in box_parts(kind, table.weight_share)] for shaded in shades]
        for kind in set(kinds)
    }
    rerouted = table.has(Flag.REROUTED).tolist()
    start, end = table.start.tolist(), table.end.tolist()
    chunk = np.minimum(table.chunk, table.chunks - 1).tolist()
    for operation, (lane, kind) in enumerate(zip(table.lane.tolist(), kinds, strict=True)):
        begin, length = start[operation], end[operation] - start[operation]
        is_rerouted = rerouted[operation] and not issubclass(KIND_CLASSES[kind], AsyncInstruction)
        text = label(table, operation) if is_labelled else ""
        second_text = backward_label(table, operation) if is_labelled else ""
        for paint, first, last, top, bottom in parts[kind][chunk[operation]]:
            ends = begin + first * length, begin + last * length
            yield Box(operation, lane, *ends, top, bottom, paint, text, is_rerouted)
            text, second_text = second_text, ""


def group_edges(table: LaneTable) -> list[int]:
    """Return the lanes that start a new pipeline, or a new rank in lanes ordered by stage; [] if each has one lane."""
    steps = list(zip(table.workers, table.workers[1:], strict=False))
    by_pipeline = [i for i, (above, below) in enumerate(steps, 1) if above.pipeline != below.pipeline]
    by_rank = [i for i, (above, below) in enumerate(steps, 1) if above.rank != below.rank]
    fewest = min(by_pipeline, by_rank, key=len)
    return fewest if len(fewest) < len(steps) else []


class LegendEntry(NamedTuple):
    """An entry of the legend: a color, border or band.

    Attributes:
        key: CSS class on pages.
        fill, stroke: colors.
        hatch: key of the stripes.
    """

    text: str
    key: str
    fill: str
    stroke: str = ""
    hatch: str = ""


def legend(tables: Sequence[LaneTable]) -> list[LegendEntry]:
    """Return the legend entries for the colors, stripes and bands in some tables."""
    kinds = {int(kind) for table in tables for kind in np.flatnonzero(np.bincount(table.kind[table.end > table.start]))}
    paints = {paint for kind in kinds for paint, *_ in box_parts(kind, 0.5)}
    entries = [LegendEntry(paint.name, paint.key, paint.fill) for paint in PAINTS if paint in paints]
    if any(table.chunks > 1 for table in tables):
        entries.append(LegendEntry("Lighter: later chunks", "chunks", CHUNK_PAINTS[-1][0].fill))
    if any(table.has(Flag.REROUTED).any() for table in tables):
        entries.append(LegendEntry("Re-routed (home.index)", "rerouted", FORWARD.hatch, INK, FORWARD.key))
    if any(table.failed.any() for table in tables):
        entries.append(LegendEntry("Failed worker", "failed", FAILURE_BAND, FAILURE, "failed"))
    return entries
