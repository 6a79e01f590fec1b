"""Timelines below each other as one self-contained picture, and its SVG.

The layout is a list of shapes: titles, lane names, operations, time axes, periods and a legend. This file draws them as
SVG, `figures.raster` in pixels. Equal tables give equal bytes of SVG.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import ceil
from typing import Literal, NamedTuple
from xml.sax.saxutils import escape, quoteattr

import numpy as np

from viz.figures.boxes import Box, boxes, group_edges, legend
from viz.figures.palette import (
    BAND,
    CHUNK_PAINTS,
    FAILURE,
    FAILURE_BAND,
    FAILURE_HATCH,
    FONT,
    GRID,
    INK,
    MUTED,
    PAPER,
    RULE,
    shade_of,
)
from viz.kinds import describe
from viz.lanes import LaneTable, Panel
from viz.numbers import UNITS, ticks, time_unit

LANE, TITLE, AXIS, GAP, LEGEND, RIGHT, TOP = 30, 30, 34, 14, 34, 16, 4
CHARACTER, TEXT = 6.6, 11
"""Maximum pixels of a label's character, and font size of labels."""
SMALLEST = 0.75
"""Smallest factor by which labels shrink to fit their boxes."""
BAND_HEIGHT = 26 / 30
"""Height of a failed worker's band in lanes."""
SVG_LIMIT = 20_000
"""Maximum operations of an SVG, and of boxes with labels: lines would be thinner than a pixel."""
NAME = 14
"""Smallest height of lanes that are all named."""
Anchor = Literal["start", "middle", "end"]
Point = tuple[float, float]


class Text(NamedTuple):
    """A line of text; x and the baseline y in pixels."""

    x: float
    y: float
    text: str
    anchor: Anchor = "start"
    fill: str = ""
    size: float = TEXT
    is_bold: bool = False


class Line(NamedTuple):
    points: Sequence[Point]
    stroke: str


class Rectangle(NamedTuple):
    """A rectangle; `hatch` is the key of its stripes."""

    x: float
    y: float
    width: float
    height: float
    fill: str
    stroke: str = ""
    hatch: str = ""


class Operation(NamedTuple):
    """A box of the table's operations; its upper left corner and size in pixels."""

    table: LaneTable
    box: Box
    x: float
    y: float
    width: float
    height: float


Shape = Text | Line | Rectangle | Operation


def svg(panels: Sequence[Panel], *, width: int = 960) -> str:
    """Return the picture as SVG text, `width` pixels wide. Operations have their description as a tooltip."""
    lanes = [LANE * panel.table.lanes for panel in panels]
    chunks, height = max((panel.table.chunks for panel in panels), default=1), _number(height_of(lanes))
    shades = dict.fromkeys(shade_of(chunk, chunks) for chunk in range(chunks))
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}"'
            f' role="img" font-family={quoteattr(FONT)} font-size="{TEXT}" fill="{INK}">',
            f"<title>{escape('; '.join(panel.title for panel in panels))}</title>",
            "<defs>",
            *(_hatch(paint.key, paint.fill, paint.hatch) for shade in shades for paint in CHUNK_PAINTS[shade]),
            _hatch("failed", FAILURE_BAND, FAILURE_HATCH),
            "</defs>",
            f'<rect width="{width}" height="{height}" fill="{PAPER}"/>',
            *map(_drawn, layout(panels, width, lanes)),
            "</svg>",
            "",
        ]
    )


def height_of(heights: Sequence[float]) -> float:
    """Return the height of a picture whose panels have lanes of the given total heights."""
    return TOP + sum(heights) + (TITLE + AXIS + GAP) * len(heights) + LEGEND


def layout(panels: Sequence[Panel], width: float, heights: Sequence[float]) -> Iterator[Shape]:
    """Lay out panels below each other; `heights` are the heights of their lanes."""
    left = 22 + CHARACTER * max((len(label) for panel in panels for label in panel.table.labels), default=3)
    top = float(TOP)
    for panel, height in zip(panels, heights, strict=True):
        yield from _panel(panel, left, top, width - left - RIGHT, height)
        top += TITLE + height + AXIS + GAP
    yield from _legend(panels, left, top)


def _panel(panel: Panel, left: float, top: float, width: float, height: float) -> Iterator[Shape]:
    table = panel.table
    span = panel.span or table.span or 1.0
    unit = time_unit(table, span)
    lanes_top, lanes_bottom, row = top + TITLE, top + TITLE + height, height / max(table.lanes, 1)
    yield Text(left, top + 12, panel.title, size=13, is_bold=True)
    yield Rectangle(left, lanes_top, width, height, BAND)
    for tick in ticks(span * unit.scale):
        x = left + tick / unit.scale * width / span
        yield Line([(x, lanes_top), (x, lanes_bottom + 4)], GRID)
        tick_text = f"{tick:g} {unit.word or UNITS}" if tick == 0 else f"{tick:g}"
        yield Text(x, lanes_bottom + 17, tick_text, "middle", MUTED)
    for lane in group_edges(table):
        yield Line([(left, lanes_top + row * lane), (left + width, lanes_top + row * lane)], RULE)
    every = max(1, ceil(NAME / row))
    for lane in range(0, table.lanes, every):
        yield Text(left - 8, lanes_top + row * (lane + 0.5) + 4, table.labels[lane], "end")
    for lane in np.flatnonzero(table.failed).tolist():
        band = lanes_top + row * (lane + 0.5 - BAND_HEIGHT / 2)
        yield Rectangle(left, band, width, row * BAND_HEIGHT, FAILURE_BAND, FAILURE, "failed")
    for box in boxes(table, is_labelled=is_labelled(panel, row)):
        if box.end > box.start:
            # Divide first: pixels per time would overflow for tiny times.
            x, long = left + box.start / span * width, (box.end - box.start) / span * width
            y = lanes_top + row * (box.lane + 0.5 + box.top)
            yield Operation(table, box, x, y, long, row * (box.bottom - box.top))
    if panel.period:
        period = unit.amount(panel.period)
        yield from _bracket(left, left + panel.period / span * width, lanes_top, f"period {period}")
    for lane in np.flatnonzero(table.failed).tolist() if every == 1 else ():
        middle = lanes_top + row * (lane + 0.5)
        at_end = table.offsets[lane + 1] > table.offsets[lane]
        x = left + width - 30 if at_end else left + width / 2
        yield Rectangle(x - 24, middle - 9, 48, 18, FAILURE)
        yield Text(x, middle + 4, "failed", "middle", is_bold=True)


def is_labelled(panel: Panel, row: float) -> bool:
    """Return whether operations have labels, in lanes of `row` pixels."""
    return row >= TEXT and len(panel.table) <= SVG_LIMIT


def _bracket(left: float, right: float, bottom: float, text: str) -> Iterator[Shape]:
    yield Line([(left, bottom - 2), (left, bottom - 9), (right, bottom - 9), (right, bottom - 2)], INK)
    middle, width = left + 0.75 * (right - left), CHARACTER * len(text) + 8
    yield Rectangle(middle - width / 2, bottom - 16, width, 13, PAPER)
    yield Text(middle, bottom - 5, text, "middle", is_bold=True)


def _legend(panels: Sequence[Panel], left: float, top: float) -> Iterator[Shape]:
    x = left
    for entry in legend([panel.table for panel in panels]):
        yield Rectangle(x, top, 18, 13, entry.fill, entry.stroke, entry.hatch)
        yield Text(x + 24, top + 10.5, entry.text)
        x += 24 + CHARACTER * len(entry.text) + 12


def _drawn(shape: Shape) -> str:
    match shape:
        case Text():
            return _text(shape)
        case Line(points, stroke):
            path = "M" + "L".join(f"{_number(x)} {_number(y)}" for x, y in points)
            return f'<path d="{path}" fill="none" stroke="{stroke}"/>'
        case Rectangle(x, y, width, height, fill, stroke, hatch):
            ground, border = f"url(#{hatch}-hatch)" if hatch else fill, f' stroke="{stroke}"' if stroke else ""
            return _rect(x, y, width, height, f' fill="{ground}"{border}')
        case Operation():
            return _operation(*shape)


def _number(value: float) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".")


def _hatch(key: str, fill: str, stripe: str) -> str:
    return (
        f'<pattern id="{key}-hatch" width="7" height="7" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
        f'<rect width="7" height="7" fill="{fill}"/><rect width="2.4" height="7" fill="{stripe}"/></pattern>'
    )


def _rect(x: float, y: float, width: float, height: float, attributes: str) -> str:
    return f'<rect x="{_number(x)}" y="{_number(y)}" width="{_number(width)}" height="{_number(height)}"{attributes}/>'


def _text(shape: Text) -> str:
    x, y, text, anchor, fill, size, is_bold = shape
    attributes = f' text-anchor="{anchor}"' if anchor != "start" else ""
    attributes += f' fill="{fill}"' if fill else ""
    attributes += f' font-size="{_number(size)}"' if size != TEXT else ""
    attributes += ' font-weight="600"' if is_bold else ""
    return f'<text x="{_number(x)}" y="{_number(y)}"{attributes}>{escape(text)}</text>'


def _operation(table: LaneTable, box: Box, x: float, top: float, width: float, height: float) -> str:
    fill = f"url(#{box.paint.key}-hatch)" if box.rerouted else box.paint.fill
    inset = 0.7 if box.rerouted and width > 3 else 0.0  # keeps the border off the neighbors
    stroke = f'stroke="{INK}" stroke-width="1.4"' if box.rerouted else f'stroke="{PAPER}" stroke-width="0.6"'
    mark = f"{box.paint.key} rerouted" if box.rerouted else box.paint.key
    tooltip = escape("\n".join(describe(table, box.operation, box.lane)))
    rectangle = _rect(x + inset, top + inset, width - 2 * inset, height - 2 * inset, f' fill="{fill}" {stroke}')
    text = ""
    room = width - (5 if box.rerouted else 2)  # inside the border
    share = min(1.0, room / label_width(box.label, box.rerouted)) if box.label else 0.0
    if share >= SMALLEST:
        position = x + width / 2, top + height / 2 + 4
        text = _text(Text(*position, box.label, "middle", box.paint.ink, TEXT * share, box.rerouted))
    return f'<g class="{mark}"><title>{tooltip}</title>{rectangle}{text}</g>'


def label_width(text: str, is_bold: bool) -> float:
    """Return the maximum pixels of a label over sans-serif fonts; W is the widest letter."""
    return sum(_WIDTHS.get(letter, DIGIT) for letter in text) * (1.12 if is_bold else 1.0)


DIGIT = 7.0
_WIDTHS = {"W": 11.0, "F": 6.8, "B": 7.6, "I": 4.0, "R": 7.6, ".": 3.6}
