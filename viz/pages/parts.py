"""The parts that pages are made of: cards, tables, the legend, a timeline with its caption, and empty states."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import plotly.graph_objects as go
from dash import dcc, html

from viz.figures.palette import PAINTS
from viz.figures.timeline import CONFIG, note, timeline_figure
from viz.lane_cache import Explainer, LaneCache
from viz.lanes import Flag, LaneTable, Panel, on_one_axis
from viz.pages.lanes_view import lanes_view

Cell = str | float | int | None


def graph(figure: go.Figure, **properties: Any) -> dcc.Graph:
    """A figure, with the one configuration that no graph may lack (see `CONFIG`)."""
    config: Any = CONFIG
    return dcc.Graph(figure=figure, config=config, **properties)


def card(title: str, *children: Any, caption: str = "") -> html.Section:
    """A titled block of the page."""
    head = [html.H2(title), *([html.P(caption, className="caption")] if caption else [])]
    return html.Section([html.Header(head), *children], className="card")


def empty(text: str, hint: str = "") -> html.Div:
    """What stands where there is nothing to draw: why, and what would put something there."""
    return html.Div([html.P(text), *([html.P(hint, className="hint")] if hint else [])], className="empty")


def awaited(identifier: str) -> dcc.Loading:
    """A place that a callback fills, with a sign of waiting when that takes long; what stands there stays in sight, and
    callbacks for parts of it do not count."""
    target: Any = {identifier: "children"}
    return dcc.Loading(
        html.Div(id=identifier),
        delay_show=300,
        target_components=target,
        overlay_style={"visibility": "visible", "opacity": 0.5},
    )


def problems(lines: Sequence[str]) -> Any:
    """What could not be read or breaks a rule, above everything else that could be drawn."""
    if not lines:
        return []
    shown = [html.Li(line) for line in lines[:12]]
    if len(lines) > 12:
        shown.append(html.Li(f"and {len(lines) - 12} more"))
    count = "1 problem" if len(lines) == 1 else f"{len(lines)} problems"
    return html.Section([html.H2(count), html.Ul(shown)], className="problems", role="alert")


def table(head: Sequence[str], rows: Sequence[Sequence[Cell]]) -> html.Div:
    """A table whose first column names the rows; None is a dash."""
    body = [html.Tr([html.Th(show(row[0]), scope="row"), *(html.Td(show(cell)) for cell in row[1:])]) for row in rows]
    return html.Div(
        html.Table([html.Thead(html.Tr([html.Th(cell, scope="col") for cell in head])), html.Tbody(body)]),
        className="facts",
    )


def show(cell: Cell) -> str:
    """A number with at most 5 significant digits, text as it is, a dash for None."""
    if cell is None:
        return "–"
    return f"{cell:.5g}" if isinstance(cell, float) else str(cell)


def legend() -> html.Ul:
    """What colours, stripes and bands mean."""
    entries = [_entry(paint.name, paint.key, paint.fill) for paint in PAINTS]
    entries += [_entry("Re-routed, with its home: F1.0", "rerouted"), _entry("Failed worker", "failed")]
    return html.Ul(entries, className="legend")


def _entry(text: str, key: str, colour: str = "") -> html.Li:
    style: dict[str, Any] = {"style": {"background": colour}} if colour else {}
    return html.Li([html.Span(className=f"swatch {key}", **style), text])


def pictures(panels: Sequence[Panel], nothing: str) -> html.Section | html.Div:
    """Timelines as figures that need no server, on one time axis; `nothing` is said where there are none."""
    if not panels:
        return empty(nothing)
    shown = []
    for panel in on_one_axis(panels):
        figure = graph(timeline_figure(panel.table, span=panel.span))
        left_out = [html.P(note(panel.table), className="hint")] if note(panel.table) else []
        shown += [html.Div([html.H3(panel.title), figure], className="lanes"), *left_out]
    return card("Timelines", *shown, legend())


def timeline(
    title: str,
    lanes: LaneTable,
    name: str,
    cache: LaneCache,
    *,
    explainer: Explainer | None = None,
    span: float | None = None,
    linked: str = "",
) -> html.Div:
    """A timeline with its heading and what a screen reader says of it; arguments as of `lanes_view`."""
    spoken = f"{title}. {summary(lanes)}"
    drawn = lanes_view(name, lanes, cache, spoken=spoken, explainer=explainer, span=span, linked=linked)
    return html.Div([html.H3(title), drawn], className="lanes")


def summary(lanes: LaneTable) -> str:
    """The timeline in a sentence."""
    dead = [label for label, failed in zip(lanes.labels, lanes.failed, strict=True) if failed]
    away = int(lanes.has(Flag.REROUTED).sum())
    text = f"{len(lanes)} operations on {lanes.lanes} workers"
    if dead:
        text += f"; failed: {', '.join(dead)}"
    if away:
        text += f"; {away} operations re-routed to peers"
    return text + "."
