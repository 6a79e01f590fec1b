"""Timelines of one block on the same axis: what compare, explain, what-if and validate draw with.

Small ones are figures, with text and outlines; large ones go to the canvas. Figures have no ground of their own and
one width of the lanes' names, so that axes lie under each other and the page's colours, light or dark, show through
(`assets/pages.css`).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import plotly.graph_objects as go
from dash import dcc, html

from viz.figures.axes import gutter as canvas_gutter
from viz.figures.boxes import time_unit
from viz.figures.ghost import add_ghost
from viz.figures.timeline import BAR_LIMIT, note, timeline_figure
from viz.lanes import Grouping, LaneTable
from viz.pages import parts
from viz.pages.lanes_view import lanes_view as canvas_view
from viz.pages.linked import graph_id
from viz.shelf import Shelf, Source

CHARACTER, NARROWEST = 7.0, 44
"""Pixels that a character of a lane's name takes, and the least that names have."""


def grouping_choice(identifier: str) -> html.Div:
    """How lanes are ordered: by pipeline, or by stage, which puts peers side by side."""
    options: Any = [{"label": "by pipeline", "value": "pipeline"}, {"label": "by stage", "value": "stage"}]
    return html.Div(
        [html.Span("Lanes"), dcc.RadioItems(id=identifier, options=options, value="pipeline", inline=True)],
        className="choices",
    )


def gutter(tables: Iterable[LaneTable]) -> int:
    """Pixels that the names of lanes take, in all of `tables`."""
    pixels = [NARROWEST]
    for table in tables:
        longest = max((len(label) for label in table.labels), default=3)
        pixels.append(canvas_gutter(table) if is_large(table) else round(18 + CHARACTER * longest))
    return max(pixels)


def is_large(table: LaneTable) -> bool:
    """Whether a figure would be slow and without text, so that the canvas draws it."""
    return len(table) > BAR_LIMIT


def lanes_figure(table: LaneTable, span: float | None, left: int) -> go.Figure:
    """The figure of a table; `left` is the width of its lanes' names in pixels."""
    return on_the_page(timeline_figure(table, span=span), left)


def on_the_page(figure: go.Figure, left: int) -> go.Figure:
    """The figure without a ground, its axes beginning `left` pixels from its edge."""
    clear = "rgba(0,0,0,0)"
    figure.update_layout(paper_bgcolor=clear, plot_bgcolor=clear, margin_l=left)
    figure.update_yaxes(automargin=False)
    return figure


def figure_view(title: str, figure: go.Figure, identifier: Any, spoken: str, hint: str = "") -> html.Div:
    """A figure with its heading, what a screen reader is told of it, and a line below."""
    attributes: dict[str, Any] = {"role": "img", "aria-label": spoken}
    return html.Div(
        [
            *([html.H3(title)] if title else []),
            html.Div(parts.graph(figure, id=identifier, className="timeline"), **attributes),
            *([html.P(hint, className="hint")] if hint else []),
        ],
        className="lanes figure-view",
    )


def lanes_view(
    title: str,
    table: LaneTable,
    prefix: str,
    place: int,
    shelf: Shelf,
    *,
    span: float | None,
    left: int,
    source: Source | None = None,
    grouping: Grouping = "pipeline",
    ghost: LaneTable | None = None,
) -> html.Div:
    """One timeline of a `linked` block: a figure, or of a large table the canvas.

    Args:
        table: lanes by pipeline, then rank.
        prefix, place: of the block, and in it.
        source: what the canvas explains a selection with.
        ghost: lanes of the same workers, outlined over a figure.
    """
    marked: dict[str, Any] = {"data-place": str(place)}
    spoken = f"{title}. {parts.summary(table)}"
    if is_large(table):
        name = f"{prefix}-{place}"
        drawn: Any = canvas_view(
            name, table, shelf, spoken=spoken, source=source, grouping=grouping, span=span, linked=prefix
        )
        hint = [] if ghost is None else [html.P("Too many operations to outline the first one.", className="hint")]
        return html.Div([html.H3(title), drawn, *hint], className="lanes", **marked)
    ordered = table.ordered(grouping)
    figure = lanes_figure(ordered, span, left)
    scale, _ = time_unit(table, span or table.span or 1.0)
    if ghost is not None:
        add_ghost(figure, ghost.ordered(grouping), scale)
    return html.Div(figure_view(title, figure, graph_id(prefix, place), spoken, note(ordered)), **marked)
