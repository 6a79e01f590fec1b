"""Graphs with one time axis: what is zoomed in one is zoomed in all, in the browser and without the server (see
`assets/linked.js`).

Everything inside `linked` follows, figures and lanes alike. `goto` is a store that zooms all of them to a place and
selects it in one of them, or frames several; the store `range` says what is shown, a moment after the last change.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from dash import ALL, Dash, Input, Output, State, ctx, dcc, html, no_update

from recycle.errors import RecycleError
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


def stores(prefix: str) -> list[Any]:
    """What the page must hold once, outside of what callbacks replace."""
    return [dcc.Store(id=f"{prefix}-goto"), dcc.Store(id=f"{prefix}-range")]


def goto(places: Sequence[LaneInterval], graph: int = 0) -> dict[str, Any]:
    """For the store: the places to go to, all in the graph at that place of the block."""
    return {"graph": graph, "places": [list(place) for place in places]}


def show_button(prefix: str, what: Any, place: int, spoken: str = "") -> html.Button:
    """A button that leads to the place that the page's `place_of` (see `register`) knows by `what` and `place`."""
    return parts.button("Show it", {"type": f"{prefix}-show", "what": what, "place": place}, spoken)


def register(app: Dash, prefix: str, place_of: Callable[..., dict[str, Any] | None], *states: State) -> None:
    """Add the callbacks that make the graphs follow each other, and the buttons lead to their places.

    Args:
        place_of: `what` and `place` of a button, then the values of `states` -> where to go, as of `goto`; None, or a
            RecycleError or IndexError, where there is no such place.
    """
    parts.in_browser(
        app,
        "follow",
        Output(f"{prefix}-range", "data"),
        Input({"type": f"{prefix}-graph", "place": ALL}, "relayoutData"),
        Input({"type": "lanes-axes", "name": ALL}, "relayoutData"),
        Input(f"{prefix}-goto", "data"),
    )

    pressed: dict[str, Any] = {"type": f"{prefix}-show", "what": ALL, "place": ALL}

    @app.callback(Output(f"{prefix}-goto", "data"), Input(pressed, "n_clicks"), *states, prevent_initial_call=True)
    def go(clicks: list[int], *values: Any) -> Any:
        chosen = ctx.triggered_id
        if chosen is None or not any(clicks):
            return no_update
        try:
            return place_of(chosen["what"], chosen["place"], *values) or no_update
        except (RecycleError, IndexError):
            return no_update
