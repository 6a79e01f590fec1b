"""Graphs with one time axis: what is zoomed in one is zoomed in all, in the browser and without the server (see
`assets/linked.js`).

Everything inside `linked` follows, figures and lanes alike. A button of `show_button` zooms lanes of its workbench to a
place and selects it, or frames several places.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

from dash import ALL, Dash, Input, Output, dcc, html

from viz.pages import parts


class LaneInterval(NamedTuple):
    """A stretch of a lane of the drawn table, in the table's time."""

    lane: int
    start: float
    end: float


def linked(prefix: str, *children: Any) -> html.Div:
    """A block whose graphs, figures with identifiers from `graph_id`, share one time axis."""
    return html.Div([*children], id=f"{prefix}-linked", className="linked")


def graph_id(prefix: str, place: int) -> dict[str, Any]:
    """The identifier of the graph at that place."""
    return {"type": f"{prefix}-graph", "place": place}


def store(prefix: str) -> dcc.Store:
    """What the page must hold once, outside of what callbacks replace."""
    return dcc.Store(id=f"{prefix}-range")


def show_button(places: Sequence[LaneInterval], spoken: str = "", graph: int | None = None) -> html.Button:
    """A button that leads to places, all in one timeline: the one at `graph` of the block, else the one in use."""
    attributes: dict[str, Any] = {"data-places": json.dumps([list(place) for place in places])}
    if graph is not None:
        attributes["data-graph"] = str(graph)
    return html.Button("Show it", className="quiet", title=spoken or None, type="button", **attributes)


def register(app: Dash, prefix: str) -> None:
    """Add the callback that makes the graphs follow each other."""
    parts.in_browser(
        app,
        "follow",
        Output(f"{prefix}-range", "data"),
        Input({"type": f"{prefix}-graph", "place": ALL}, "relayoutData"),
    )
