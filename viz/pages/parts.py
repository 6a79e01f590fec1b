"""Building blocks of pages and exports: cards, tables, buttons, figures, legend, and empty states."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import plotly.graph_objects as go
from dash import ClientsideFunction, Dash, dcc, html
from dash.development.base_component import Component

from viz.figures.boxes import legend as entries_of
from viz.lanes import LaneTable
from viz.numbers import short
from viz.sources import Place

T = TypeVar("T")
NOT_CACHED = "These lanes are no longer cached. Reload the page."


def figure_view(figure: go.Figure, identifier: Any, description: str) -> html.Div:
    """Build a figure with a description for screen readers."""
    graph = dcc.Graph(figure=figure, config=CONFIG, id=identifier)
    return div("lanes figure-view", tag(html.Div, graph, role="img", aria_label=description))


def tag(kind: Callable[..., T], *children: Any, **properties: Any) -> T:
    """Build a component of `dash.html`, of the class `kind`.

    Args:
        properties: those named `aria_…` or `data_…` become attributes with hyphens; those that are None are left out.
    """
    hyphened = {key: key.replace("_", "-") for key in properties if key.startswith(("aria_", "data_"))}
    own = {hyphened.get(key, key): value for key, value in properties.items() if value is not None}
    return kind([*children], **own)


def div(kind: str, *children: Any, **properties: Any) -> html.Div:
    return tag(html.Div, *children, className=kind, **properties)


def button(text: str, identifier: Any, description: str = "") -> html.Button:
    return tag(html.Button, text, id=identifier, n_clicks=0, className="quiet", title=description or None)


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
    head = html.Header([html.H2(title), html.P(caption, className="caption") if caption else None])
    return html.Section([head, *children], className="card")


def empty_state(text: str, remedy: str = "") -> html.Div:
    """Build the replacement for missing content: why it is missing, and how to get it."""
    return div("empty", html.P(text), hint(remedy) if remedy else None)


def loading_area(identifier: str) -> dcc.Loading:
    """Build a place for a callback's content, with a delayed sign of waiting.

    Earlier content stays visible; callbacks for parts of it show no sign.
    """
    seen: Any = {"target_components": {identifier: "children"}}
    style = {"visibility": "visible", "opacity": 0.5}
    return dcc.Loading(html.Div(id=identifier), delay_show=300, overlay_style=style, **seen)


def ledger(begin: float, share: float, colour: str) -> html.Div:
    """Build the bar of a share of the time for a table, right of the earlier shares, which are `begin` together."""
    size = {"marginLeft": f"{100 * begin:.3f}%", "width": f"{100 * share:.3f}%", "background": colour}
    return div("ledger", html.Div(style=size))


def problems(lines: Sequence[str]) -> Any:
    """Build the list of read errors or violations above the other content."""
    if not lines:
        return []
    items = [html.Li(line) for line in lines[:12]]
    if len(lines) > 12:
        items.append(html.Li(f"and {len(lines) - 12} more"))
    title = html.H2(count_text(len(lines), "problem"))
    return tag(html.Section, title, html.Ul(items), className="problems", role="alert")


def table(head: Sequence[object], rows: Sequence[Sequence[object]], kind: str = "") -> html.Div:
    """Build a table of cells as `cell_content` formats them.

    Args:
        kind: a class of `assets/style.css`; without one the first column names the rows.
    """
    top = html.Thead(html.Tr([html.Th(cell_content(cell), scope="col") for cell in head]))
    body = html.Tbody([_row(*map(cell_content, row), is_named=not kind) for row in rows])
    return div(f"facts {kind}".strip(), html.Table([top, body]))


def _row(first: Any, *others: Any, is_named: bool) -> html.Tr:
    return html.Tr([html.Th(first, scope="row") if is_named else html.Td(first), *map(html.Td, others)])


def cell_content(cell: object) -> str | Component:
    """Format a cell: numbers as in `viz.numbers`, text and components unchanged, a dash for None."""
    if cell is None:
        return "–"
    return short(cell) if isinstance(cell, float) else cell if isinstance(cell, Component) else str(cell)


def legend(tables: Sequence[LaneTable]) -> html.Ul:
    # The style sheet has the stripes.
    items = [swatch(each.text, f" {each.key}", "" if each.hatch else each.fill) for each in entries_of(tables)]
    return html.Ul(items, className="legend")


def swatch(text: str, kind: str, fill: str) -> html.Li:
    return html.Li([html.Span(className=f"swatch{kind}", style={"background": fill} if fill else {}), text])


CHARACTER = 6.8
"""Pixels per character of a lane's name."""
CONFIG: Any = {
    "showSendToCloud": False,  # plotly offers an upload of the figure by default
    "displaylogo": False,
    "responsive": True,
    "scrollZoom": False,
    "doubleClick": "autosize",
    "modeBarButtonsToRemove": ["select2d", "lasso2d", "autoScale2d"],
}
"""Configuration of all figures on pages."""


def gutter(*tables: LaneTable) -> int:
    """Return the pixels left of the axes for all `tables`: the longest lane name, busy share and group names."""
    longest = max((len(label) for table in tables for label in table.labels), default=3) + len(" 100 %")
    has_groups = any(table.shape.pipelines > 1 and table.shape.ranks > 1 for table in tables)
    return round(20 + CHARACTER * (longest + (len("▾ pipeline 999 (99)") if has_groups else 0)))


def show_button(places: Sequence[Place], description: str = "", **data: Any) -> html.Button:
    """Build a button that shows places of a timeline: `data_graph` in the block, or the current one without it."""
    data["data_places"] = json.dumps(places)
    return tag(html.Button, "Show it", className="quiet", title=description or None, type="button", **data)
