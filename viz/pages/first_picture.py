"""What stands in a timeline's place until the browser has its operations and Plotly has drawn the axes.

The server's picture of all lanes under a plain axis needs no script: it is there a second earlier in a browser that was
just started, however many operations there are. The canvas covers the same place with the same colours, and takes over.
"""

from __future__ import annotations

from typing import Any

from dash import html

from viz.figures.time_axis import OVERHANG, ticks, time_unit
from viz.lanes import LaneTable

MOST_NAMES = 24


def first_picture(table: LaneTable, source: str, span: float, margins: tuple[int, int, int, int]) -> html.Div:
    """The picture with its axes.

    Args:
        source: address of the picture of all lanes over the table's span.
        span: length of the time axis, at least the table's own.
        margins: pixels left of, above, right of and below the axes.
    """
    left, top, right, bottom = margins
    place: dict[str, Any] = {"left": left, "top": top, "right": right, "bottom": bottom}
    start, share = OVERHANG / (1 + 2 * OVERHANG), 1 / (1 + 2 * OVERHANG)
    unit = time_unit(table, span)
    length = span * unit.scale
    wide: Any = {"left": _percent(start), "width": _percent(share * table.span / span)}
    *before, last = ticks(length, OVERHANG)
    texts = [f"{tick:.6g}" for tick in before] + [f"{last:.6g}{unit.word and ' ' + unit.word}"]
    shown = [
        html.Span(text, className="tick", style={"left": _percent(start + share * tick / length)})
        for tick, text in zip((*before, last), texts, strict=True)
    ]
    every = max(1, -(-table.lanes // MOST_NAMES))
    names = [
        html.Span(table.labels[lane], className="name", style={"top": _percent((lane + 0.5) / table.lanes)})
        for lane in range(0, table.lanes, every)
    ]
    picture = html.Img(src=source, alt="", style=wide)
    hidden: dict[str, Any] = {"aria-hidden": "true"}  # the canvas says what is shown
    return html.Div([picture, *shown, *names], className="lanes-first", style=place, **hidden)


def _percent(share: float) -> str:
    return f"{100 * share:.4f}%"
