"""The parts that pages and exports are made of: cards, tables, the legend, figures of timelines, and empty states."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import plotly.graph_objects as go
from dash import dcc, html
from dash.development.base_component import Component

from viz.figures.palette import PAINTS
from viz.figures.timeline import CONFIG, note, timeline_figure
from viz.lanes import Panel, on_one_axis

Cell = str | float | int | Component | None
"""Of a table: text, a number, a component, or None where there is nothing."""


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


def table(head: Sequence[str], rows: Sequence[Sequence[Cell]], kind: str = "") -> html.Div:
    """A table. Its first column names the rows, unless it is of another `kind` (a class of `assets/pages.css`)."""
    top = html.Thead(html.Tr([html.Th(cell, scope="col") for cell in head]))
    body = html.Tbody([_row(row, is_named=not kind) for row in rows])
    return html.Div(html.Table([top, body]), className=f"facts {kind}".strip())


def _row(cells: Sequence[Cell], is_named: bool) -> html.Tr:
    first, *others = map(show, cells)
    return html.Tr([html.Th(first, scope="row") if is_named else html.Td(first), *map(html.Td, others)])


def show(cell: Cell) -> str | Component:
    """A number with at most 5 significant digits, text and components as they are, a dash for None."""
    if cell is None:
        return "–"
    return f"{cell:.5g}" if isinstance(cell, float) else cell if isinstance(cell, Component) else str(cell)


def legend() -> html.Ul:
    """What colours, stripes and bands mean."""
    entries = [_entry(paint.name, paint.key, paint.fill) for paint in PAINTS]
    entries += [_entry("Re-routed, with its home: F1.0", "rerouted"), _entry("Failed worker", "failed")]
    return html.Ul(entries, className="legend")


def _entry(text: str, key: str, colour: str = "") -> html.Li:
    style: dict[str, Any] = {"style": {"background": colour}} if colour else {}
    return html.Li([html.Span(className=f"swatch {key}", **style), text])


def pictures(panels: Sequence[Panel], nothing: str) -> html.Section | html.Div:
    """Timelines as figures that need no server, on one time axis; `nothing` is the text where there are none."""
    if not panels:
        return empty(nothing)
    shown = []
    for panel in on_one_axis(panels):
        figure = graph(timeline_figure(panel.table, span=panel.span))
        left_out = [html.P(note(panel.table), className="hint")] if note(panel.table) else []
        shown += [html.Div([html.H3(panel.title), figure], className="lanes"), *left_out]
    return card("Timelines", *shown, legend())
