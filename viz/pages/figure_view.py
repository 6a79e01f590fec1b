"""Figures that stand in one block with lanes, on the same axis.

Figures have no ground of their own and leave as much room for names as the lanes, so that axes lie under each other and
the page's colours, light or dark, show through (`assets/pages.css`).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import plotly.graph_objects as go
from dash import html

from viz.figures.axes import RIGHT
from viz.figures.axes import gutter as gutter_of
from viz.lanes import LaneTable
from viz.pages import parts


def gutter(tables: Iterable[LaneTable]) -> int:
    """Pixels that the names of lanes take, in all of `tables`."""
    return max(gutter_of(table) for table in tables)


def on_the_page(figure: go.Figure, left: int) -> go.Figure:
    """The figure with axes as wide as those of lanes that begin `left` pixels from the edge."""
    figure.update_layout(margin_l=left, margin_r=RIGHT)
    figure.update_yaxes(automargin=False)
    return figure


def figure_view(title: str, figure: go.Figure, identifier: Any, spoken: str, hint: str = "") -> html.Div:
    """A figure with its heading, what a screen reader says of it, and a line below."""
    attributes: dict[str, Any] = {"role": "img", "aria-label": spoken}
    return html.Div(
        [
            *([html.H3(title)] if title else []),
            html.Div(parts.graph(figure, id=identifier, className="timeline"), **attributes),
            *([html.P(hint, className="hint")] if hint else []),
        ],
        className="lanes figure-view",
    )
