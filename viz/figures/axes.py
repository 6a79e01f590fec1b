"""The transparent Plotly figure above a canvas of lanes: axes, zoom box, pan and mode bar, and nothing drawn."""

from __future__ import annotations

from typing import Any

import plotly.graph_objects as go

from viz.figures.boxes import time_unit
from viz.figures.palette import FONT, MUTED
from viz.figures.timeline import CONFIG
from viz.lanes import LaneTable

TOP, BOTTOM, RIGHT = 8, 40, 14
CHARACTER = 6.8
"""Pixels that a character of a lane's name takes."""
AXES_CONFIG: dict[str, Any] = {
    **CONFIG,
    "doubleClick": False,  # the canvas knows how far everything reaches, plotly sees one point
    # a picture of the axes without the lanes would mislead; `--export` makes whole ones
    "modeBarButtonsToRemove": [*CONFIG["modeBarButtonsToRemove"], "toImage", "resetScale2d"],
}


def axes_figure(
    table: LaneTable, *, span: float | None = None, left: int | None = None, rows: int | None = None
) -> go.Figure:
    """Axes for `table`: time along, in the unit of `time_unit`; rows down, row i from y = i to i + 1.

    Args:
        span: length of the time axis when it is to be longer than the table's own.
        left: pixels of the lanes' names when other timelines on the page have longer ones.
        rows: when it is not one per lane.
    """
    length = span or table.span or 1.0
    scale, unit = time_unit(table, length)
    length *= scale
    figure = go.Figure()
    figure.add_scatter(x=[None], y=[None], hoverinfo="skip", showlegend=False)  # axes are drawn only for a trace
    figure.update_layout(
        autosize=True,
        margin={"l": left or gutter(table), "r": RIGHT, "t": TOP, "b": BOTTOM, "pad": 0, "autoexpand": False},
        showlegend=False,
        hovermode=False,
        dragmode="zoom",
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
        font={"family": FONT, "size": 12, "color": MUTED},
        modebar={"orientation": "v", "bgcolor": "rgba(0,0,0,0)"},
        xaxis={
            "title": {"text": f"time ({unit})" if unit else "time (units of the profile)", "standoff": 6},
            "range": [-0.004 * length, 1.004 * length],
            "showgrid": False,
            "zeroline": False,
            "ticks": "outside",
            "automargin": False,
        },
        yaxis={
            "range": [rows or table.lanes, 0],
            "showgrid": False,
            "zeroline": False,
            "showticklabels": False,
            "automargin": False,
        },
    )
    return figure


def gutter(table: LaneTable) -> int:
    """Pixels left of the axes: the longest lane name, and where there are several pipelines the names of groups."""
    longest = max((len(label) for label in table.labels), default=3)
    groups = len("▾ pipeline 999 (99)") if table.shape.pipelines > 1 and table.shape.ranks > 1 else 0
    return round(20 + CHARACTER * (longest + groups))
