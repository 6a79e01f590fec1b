"""A timeline as a Plotly figure on a page, beside others on the same axis, for compare, what-if and validate.

The one place to change for another renderer. Figures have no ground of their own and one width of the lanes' names, so
that axes lie under each other and the page's colours, light or dark, show through (`assets/pages.css`).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import plotly.graph_objects as go
from dash import dcc, html

from viz.figures.boxes import time_unit
from viz.figures.ghost import add_ghost
from viz.figures.timeline import note, timeline_figure
from viz.lanes import LaneTable
from viz.pages import parts

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
    longest = max((len(label) for table in tables for label in table.labels), default=3)
    return max(NARROWEST, round(18 + CHARACTER * longest))


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
    identifier: Any,
    span: float | None,
    left: int,
    ghost: LaneTable | None = None,
) -> html.Div:
    """One timeline; its lanes in the order that they have, over them the outlines of `ghost` with the same lanes."""
    figure, hint = lanes_figure(table, span, left), note(table)
    scale, _ = time_unit(table, span or table.span or 1.0)
    if ghost is not None and not add_ghost(figure, ghost, scale):
        hint = f"{hint} Too many operations to outline the first one."
    return figure_view(title, figure, identifier, f"{title}. {parts.summary(table)}", hint)
