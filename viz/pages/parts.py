"""Building blocks of pages and exports: cards, tables, buttons, figures, legend, and empty states."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

import plotly.graph_objects as go
from dash import ClientsideFunction, Dash, dcc, html
from dash.development.base_component import Component

from recycle.ir.check import Findings, explain
from viz.details import headline
from viz.figures.boxes import LegendEntry
from viz.figures.boxes import legend as entries_of
from viz.lane_cache import TimedLanes
from viz.lanes import LaneTable
from viz.numbers import short
from viz.sources import Place

NOT_CACHED = "These lanes are no longer cached. Reload the page."
Cell = str | float | int | Component | None
"""Cell of a table: text, a number, a component, or None if empty."""


def graph(figure: go.Figure, identifier: Any, kind: str = "") -> dcc.Graph:
    config: Any = CONFIG
    return dcc.Graph(figure=figure, config=config, id=identifier, className=kind)


def figure_view(title: str, figure: go.Figure, identifier: Any, description: str) -> html.Div:
    """Build a figure with its heading and a description for screen readers."""
    image = html.Div(graph(figure, identifier, "timeline"), **attributes(role="img", aria_label=description))
    return div("lanes figure-view", *([html.H3(title)] if title else []), image)


def attributes(**values: str | None) -> Any:
    """Return HTML attributes by names valid in Python: `aria_label` for aria-label."""
    return {name.replace("_", "-"): value for name, value in values.items() if value is not None}


def div(kind: str, *children: Any, **properties: Any) -> html.Div:
    return html.Div([*children], className=kind, **properties)


def button(text: str, identifier: dict[str, Any], description: str = "") -> html.Button:
    return html.Button(text, id=identifier, n_clicks=0, className="quiet", title=description or None)


def count_text(count: int, noun: str) -> str:
    """Format a count: `1 error`, `1,200 errors`."""
    return f"{count:,} {noun}{'s' * (count != 1)}"


def in_browser(app: Dash, function: str, *arguments: Any, prevent_initial_call: bool | str = True) -> None:
    """Add a callback answered by a function of `assets/`; `arguments` as in `Dash.callback`."""
    add: Any = app.clientside_callback
    add(ClientsideFunction("recycle", function), *arguments, prevent_initial_call=prevent_initial_call)


def hint(text: str) -> html.P:
    return html.P(text, className="hint")


def chips(words: Iterable[str]) -> html.P:
    return html.P([html.Span(word) for word in words], className="chips")


def card(title: str, *children: Any, caption: str = "") -> html.Section:
    head = [html.H2(title), *([html.P(caption, className="caption")] if caption else [])]
    return html.Section([html.Header(head), *children], className="card")


def empty_state(text: str, remedy: str = "") -> html.Div:
    """Build the replacement for missing content: why it is missing, and how to get it."""
    return html.Div([html.P(text), *([hint(remedy)] if remedy else [])], className="empty")


def loading_area(identifier: str) -> dcc.Loading:
    """Build a place for a callback's content, with a delayed sign of waiting.

    Earlier content stays visible; callbacks for parts of it show no sign.
    """
    target: Any = {identifier: "children"}
    return dcc.Loading(
        html.Div(id=identifier),
        delay_show=300,
        target_components=target,
        overlay_style={"visibility": "visible", "opacity": 0.5},
    )


def problems(lines: Sequence[str]) -> Any:
    """Build the list of read errors or violations above the other content."""
    if not lines:
        return []
    items = [html.Li(line) for line in lines[:12]]
    if len(lines) > 12:
        items.append(html.Li(f"and {len(lines) - 12} more"))
    return html.Section(
        [html.H2(count_text(len(lines), "problem")), html.Ul(items)], className="problems", role="alert"
    )


def table(head: Sequence[Cell], rows: Sequence[Sequence[Cell]], kind: str = "") -> html.Div:
    """Build a table. The first column names the rows, except for another `kind` (a class of `assets/style.css`)."""
    top = html.Thead(html.Tr([html.Th(cell_content(cell), scope="col") for cell in head]))
    body = html.Tbody([_row(row, is_named=not kind) for row in rows])
    return html.Div(html.Table([top, body]), className=f"facts {kind}".strip())


def _row(cells: Sequence[Cell], is_named: bool) -> html.Tr:
    first, *others = map(cell_content, cells)
    return html.Tr([html.Th(first, scope="row") if is_named else html.Td(first), *map(html.Td, others)])


def findings(title: str, found_items: Findings, max_rows: int, buttons: Sequence[Cell] = ()) -> html.Section:
    rows = []
    for place, finding in enumerate(found_items[:max_rows]):
        rule = explain(finding.rule)
        position = f"#{finding.position}" if finding.position is not None else ""
        row = [
            html.Span(finding.severity, className=f"severity {finding.severity}"),
            html.Abbr(finding.rule, title=rule.documentation if rule else ""),
            f"{finding.worker or ''} {position}".strip() or None,
            html.Code(finding.instruction) if finding.instruction else None,
            html.Div([finding.message, html.Div(finding.hint, className="hint")]),
        ]
        rows.append([*row, *buttons[place : place + 1]])
    head = ["", "rule", "worker, position", "instruction", "problem and remedy", *([""] if buttons else [])]
    omitted = len(found_items[max_rows:]) + sum(found_items.more.values())
    caption = f"The first {len(rows)}; {omitted:,} more from `recycle check`." if omitted else ""
    return card(title, table(head, rows, "findings rules"), caption=caption)


def cell_content(cell: Cell) -> str | Component:
    """Format a cell: numbers as in `viz.numbers`, text and components unchanged, a dash for None."""
    if cell is None:
        return "–"
    return short(cell) if isinstance(cell, float) else cell if isinstance(cell, Component) else str(cell)


def legend(tables: Sequence[LaneTable]) -> html.Ul:
    return html.Ul([_entry(entry) for entry in entries_of(tables)], className="legend")


def _entry(entry: LegendEntry) -> html.Li:
    style: dict[str, Any] = {} if entry.hatch else {"style": {"background": entry.fill}}  # else the style sheet's
    return html.Li([html.Span(className=f"swatch {entry.key}", **style), entry.text])


TOP, BOTTOM, RIGHT = 26, 4, 14
CHARACTER = 6.8
"""Pixels per character of a lane's name."""
CONFIG: dict[str, Any] = {
    "showSendToCloud": False,  # plotly offers an upload of the figure by default
    "displaylogo": False,
    "responsive": True,
    "scrollZoom": False,
    "modeBarButtonsToRemove": ["select2d", "lasso2d", "autoScale2d"],
}
"""Configuration of all figures on pages."""


def margins(table: LaneTable, left: int | None = None) -> tuple[int, int, int, int]:
    """Return the pixels left of, above, right of and below the axes.

    Args:
        left: pixels for lane names, if other timelines on the page have longer names.
    """
    return left or gutter(table), TOP, RIGHT, BOTTOM


def gutter(*tables: LaneTable) -> int:
    """Return the pixels left of the axes for all `tables`: the longest lane name, busy share and group names."""
    longest = max((len(label) for table in tables for label in table.labels), default=3) + len(" 100 %")
    has_groups = any(table.shape.pipelines > 1 and table.shape.ranks > 1 for table in tables)
    return round(20 + CHARACTER * (longest + (len("▾ pipeline 999 (99)") if has_groups else 0)))


def headline_figures(entry: TimedLanes) -> list[Any]:
    return [
        html.Span([f"{figure.name} ", html.Strong(figure.value)], title=figure.meaning) for figure in headline(entry)
    ]


def show_button(places: Sequence[Place], description: str = "", graph: int | None = None) -> html.Button:
    """Build a button that shows places of one timeline: `graph` in the block, or the current one if None."""
    target = attributes(data_places=json.dumps(places), data_graph=None if graph is None else str(graph))
    return html.Button("Show it", className="quiet", title=description or None, type="button", **target)
