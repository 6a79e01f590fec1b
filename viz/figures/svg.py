"""Timelines as SVG, written directly: rectangles, text and lines, the same bytes for the same tables.

For pages that show no script (a README), for `--export`, and for golden files. Several panels go under each other,
each with its own time axis; one legend ends the picture.
"""

from __future__ import annotations

from collections.abc import Sequence
from xml.sax.saxutils import escape, quoteattr

import numpy as np

from viz.figures.boxes import Box, boxes, group_edges
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
    PAINTS,
    PAPER,
    RULE,
    Paint,
    shade_of,
)
from viz.figures.time_axis import ticks, time_unit
from viz.labels import describe
from viz.lanes import Flag, LaneTable, Panel
from viz.numbers import short

LANE, TITLE, AXIS, GAP, LEGEND, RIGHT, TOP = 30, 30, 34, 14, 34, 16, 4
CHARACTER, TEXT = 6.6, 11
SMALLEST = 0.75
"""Share of their size down to which labels are made smaller to fit their boxes."""
"""Pixels that a character of a label takes at most, and the labels' font size."""


def svg(panels: Sequence[Panel], *, width: int = 960) -> str:
    """The picture as SVG text, `width` pixels wide. Operations carry their description as a tooltip."""
    gutter = _gutter(panels)
    body: list[str] = []
    top = TOP
    for panel in panels:
        body += _panel(panel, gutter, top, width - gutter - RIGHT)
        top += TITLE + LANE * panel.table.lanes + AXIS + GAP
    return _document(panels, body + _legend(panels, gutter, top), width, top + LEGEND)


def animation(panels: Sequence[Panel], *, seconds: float = 2.5, width: int = 960) -> str:
    """Pictures that take each other's place for `seconds` each, without end, as SVG text; all of the same workers.

    Where animations are not played, the last one is seen.
    """
    gutter, tall = _gutter(panels), max(panel.table.lanes for panel in panels)
    body: list[str] = []
    for place, panel in enumerate(panels):
        values = ";".join("1" if frame == place else "0" for frame in range(len(panels)))
        body += [
            f'<g opacity="{int(place == len(panels) - 1)}"><animate attributeName="opacity" calcMode="discrete"'
            f' values="{values}" dur="{_number(seconds * len(panels))}s" repeatCount="indefinite"/>',
            *_panel(panel, gutter, TOP, width - gutter - RIGHT),
            "</g>",
        ]
    top = TOP + TITLE + LANE * tall + AXIS + GAP
    return _document(panels, body + _legend(panels, gutter, top), width, top + LEGEND)


def _gutter(panels: Sequence[Panel]) -> float:
    return 22 + CHARACTER * max((len(label) for panel in panels for label in panel.table.labels), default=3)


def _document(panels: Sequence[Panel], body: Sequence[str], width: int, tall: float) -> str:
    """The whole of a picture around its `body`."""
    height = _number(tall)
    title = escape("; ".join(panel.title for panel in panels))
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}"'
            f' role="img" font-family={quoteattr(FONT)} font-size="{TEXT}" fill="{INK}">',
            f"<title>{title}</title>",
            "<defs>",
            *(_hatch(paint.key, paint.fill, paint.hatch) for paint in _hatched(panels)),
            _hatch("failed", FAILURE_BAND, FAILURE_HATCH),
            "</defs>",
            f'<rect width="{width}" height="{height}" fill="{PAPER}"/>',
            *body,
            "</svg>",
            "",
        ]
    )


def _hatched(panels: Sequence[Panel]) -> list[Paint]:
    """The paints that may be striped: all, those of later chunks where there are any."""
    chunks = max((panel.table.chunks for panel in panels), default=1)
    shades = dict.fromkeys(shade_of(chunk, chunks) for chunk in range(chunks))
    return [paint for shade in shades for paint in CHUNK_PAINTS[shade]]


def _number(value: float) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".")


def _hatch(key: str, fill: str, stripe: str) -> str:
    return (
        f'<pattern id="{key}-hatch" width="7" height="7" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
        f'<rect width="7" height="7" fill="{fill}"/><rect width="2.4" height="7" fill="{stripe}"/></pattern>'
    )


def _rect(x: float, y: float, width: float, height: float, rest: str) -> str:
    return f'<rect x="{_number(x)}" y="{_number(y)}" width="{_number(width)}" height="{_number(height)}" {rest}'


def _text(x: float, y: float, text: str, rest: str) -> str:
    return f'<text x="{_number(x)}" y="{_number(y)}" {rest}>{escape(text)}</text>'


def _panel(panel: Panel, left: float, top: float, width: float) -> list[str]:
    table = panel.table
    span = panel.span or table.span or 1.0
    scale, unit = time_unit(table, span)
    pixels = width / span
    lanes_top, lanes_bottom = top + TITLE, top + TITLE + LANE * table.lanes
    parts = [
        _text(left, top + 18, panel.title, 'font-size="13" font-weight="600"'),
        _rect(left, lanes_top, width, lanes_bottom - lanes_top, f'fill="{BAND}"/>'),
    ]
    for tick in ticks(span * scale):
        x = left + tick / scale * pixels
        parts.append(
            f'<line x1="{_number(x)}" y1="{_number(lanes_top)}" x2="{_number(x)}" y2="{_number(lanes_bottom + 4)}"'
            f' stroke="{GRID}"/>'
        )
        shown = f"{tick:g}" + (f" {unit}" if unit and tick else "")
        parts.append(_text(x, lanes_bottom + 17, shown, f'text-anchor="middle" fill="{MUTED}"'))
    for lane in group_edges(table):
        y = _number(lanes_top + LANE * lane)
        parts.append(f'<line x1="{_number(left)}" y1="{y}" x2="{_number(left + width)}" y2="{y}" stroke="{RULE}"/>')
    for lane, label in enumerate(table.labels):
        middle = lanes_top + LANE * (lane + 0.5)
        parts.append(_text(left - 8, middle + 4, label, 'text-anchor="end"'))
        if table.failed[lane]:
            parts.append(
                _rect(left, middle - 13, width, 26, f'class="failed" fill="url(#failed-hatch)" stroke="{FAILURE}"/>')
            )
    parts += [_operation(table, box, left, lanes_top, pixels) for box in boxes(table) if box.end > box.start]
    if panel.period:
        shown = f"period {short(panel.period * scale)}" + (f" {unit}" if unit else "")
        parts += _bracket(left, left + panel.period * pixels, lanes_top, shown)
    for lane in np.flatnonzero(table.failed).tolist():
        middle = lanes_top + LANE * (lane + 0.5)
        at_end = table.offsets[lane + 1] > table.offsets[lane]
        x = left + width - 30 if at_end else left + width / 2
        parts.append(_rect(x - 24, middle - 9, 48, 18, f'rx="3" fill="{FAILURE}"/>'))
        parts.append(_text(x, middle + 4, "failed", 'text-anchor="middle" font-weight="600"'))
    return parts


def _bracket(left: float, right: float, bottom: float, text: str) -> list[str]:
    """A bracket above the lanes from one time to another, with what it spans behind its middle."""
    path = f"M{_number(left)} {_number(bottom - 2)}v-7H{_number(right)}v7"
    middle, width = left + 0.75 * (right - left), CHARACTER * len(text) + 8
    return [
        f'<path class="period" d="{path}" fill="none" stroke="{INK}"/>',
        _rect(middle - width / 2, bottom - 16, width, 13, f'fill="{PAPER}"/>'),
        _text(middle, bottom - 5, text, 'text-anchor="middle" font-weight="600"'),
    ]


def _operation(table: LaneTable, box: Box, left: float, lanes_top: float, pixels: float) -> str:
    x, width = left + box.start * pixels, (box.end - box.start) * pixels
    middle = lanes_top + LANE * (box.lane + 0.5)
    top, height = middle + LANE * box.top, LANE * (box.bottom - box.top)
    fill = f"url(#{box.paint.key}-hatch)" if box.rerouted else box.paint.fill
    inset = 0.7 if box.rerouted and width > 3 else 0.0  # keeps a border of its own beside its neighbours
    stroke = f'stroke="{INK}" stroke-width="1.4"' if box.rerouted else f'stroke="{PAPER}" stroke-width="0.6"'
    mark = f"{box.paint.key} rerouted" if box.rerouted else box.paint.key
    tooltip = escape("\n".join(describe(table, box.operation, box.lane)))
    rectangle = _rect(x + inset, top + inset, width - 2 * inset, height - 2 * inset, f'fill="{fill}" {stroke}/>')
    text = ""
    room = width - (5 if box.rerouted else 2)  # within its border
    share = min(1.0, room / label_width(box.label, box.rerouted)) if box.label else 0.0
    if share >= SMALLEST:
        weight = ' font-weight="600"' if box.rerouted else ""
        size = f' font-size="{_number(TEXT * share)}"' if share < 1 else ""
        ink = f'text-anchor="middle" fill="{box.paint.ink}"{weight}{size}'
        text = _text(x + width / 2, top + height / 2 + 4, box.label, ink)
    return f'<g class="{mark}"><title>{tooltip}</title>{rectangle}{text}</g>'


def label_width(text: str, is_bold: bool) -> float:
    """Pixels that a label takes at most, in the widest of the fonts: sans-serif letters differ, W is the widest."""
    return sum(_WIDTHS.get(letter, DIGIT) for letter in text) * (1.12 if is_bold else 1.0)


DIGIT = 7.0
_WIDTHS = {"W": 11.0, "F": 6.8, "B": 7.6, "I": 4.0, "R": 7.6, ".": 3.6}


def _legend(panels: Sequence[Panel], left: float, top: float) -> list[str]:
    used = {box.paint for panel in panels for box in boxes(panel.table) if box.end > box.start}
    entries = [(paint.name, f'fill="{paint.fill}"/>') for paint in PAINTS if paint in used]
    if any(panel.table.chunks > 1 for panel in panels):
        entries.append(("lighter: later chunks", f'fill="{CHUNK_PAINTS[-1][0].fill}"/>'))
    if any(panel.table.has(Flag.REROUTED).any() for panel in panels):
        entries.append(("Re-routed (home.index)", f'fill="url(#forward-hatch)" stroke="{INK}" stroke-width="1.4"/>'))
    if any(panel.table.failed.any() for panel in panels):
        entries.append(("Failed worker", f'fill="url(#failed-hatch)" stroke="{FAILURE}"/>'))
    parts, x = [], left
    for name, style in entries:
        parts.append(_rect(x, top, 18, 13, style))
        parts.append(_text(x + 24, top + 10.5, name, ""))
        x += 24 + CHARACTER * len(name) + 12
    return parts
