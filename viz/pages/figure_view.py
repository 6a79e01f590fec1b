"""What stands in one block on the same axis: lanes on the canvas, and figures of what goes with them.

Figures have no ground of their own and leave as much room for names as the lanes, so that axes lie under each other and
the page's colours, light or dark, show through (`assets/pages.css`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import plotly.graph_objects as go
from dash import html

from viz.figures.axes import RIGHT
from viz.figures.axes import gutter as gutter_of
from viz.lane_cache import Explainer, LaneCache
from viz.lanes import LaneTable
from viz.pages import parts
from viz.pages.lanes_view import lanes_address
from viz.pages.lanes_view import lanes_view as canvas_view


def gutter(tables: Iterable[LaneTable]) -> int:
    """Pixels that the names of lanes take, in all of `tables`."""
    return max(gutter_of(table) for table in tables)


def without_ground(figure: go.Figure) -> go.Figure:
    """The figure, through which the page shows."""
    clear = "rgba(0,0,0,0)"
    figure.update_layout(paper_bgcolor=clear, plot_bgcolor=clear)
    return figure


def on_the_page(figure: go.Figure, left: int) -> go.Figure:
    """The same with axes as wide as those of lanes that begin `left` pixels from the edge."""
    without_ground(figure).update_layout(margin_l=left, margin_r=RIGHT)
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


def lanes_view(
    title: str,
    table: LaneTable,
    name: str,
    cache: LaneCache,
    *,
    linked: str = "",
    place: int = 0,
    span: float | None = None,
    left: int | None = None,
    rows: int | None = None,
    explainer: Explainer | None = None,
    ghost: LaneTable | None = None,
    more: Mapping[str, str] | None = None,
) -> html.Div:
    """One timeline of a `linked` block.

    Args:
        name, linked, span, left, rows, more: as of `pages.lanes_view`.
        place: in the block.
        explainer: what explains a selection.
        ghost: lanes of the same workers, whose work is outlined.
    """
    attributes = dict(more or {})
    if ghost is not None:
        attributes["data-ghost"] = lanes_address(cache.put(ghost))
    spoken = f"{title}. {parts.summary(table)}"
    drawn = canvas_view(
        name, table, cache, spoken=spoken, explainer=explainer, span=span, linked=linked, left=left, rows=rows,
        more=attributes,
    )  # fmt: skip
    marked: dict[str, Any] = {"data-place": str(place)}
    return html.Div([*([html.H3(title)] if title else []), drawn], className="lanes", **marked)
