"""The transparent Plotly figure above a canvas of lanes: axes, zoom box, pan and mode bar, and nothing drawn."""

from __future__ import annotations

from typing import Any

from viz.figures.palette import CLEAR, FONT, MUTED
from viz.figures.time_axis import time_unit
from viz.lanes import LaneTable

TOP, BOTTOM, RIGHT = 26, 4, 14
CHARACTER = 6.8
"""Pixels that a character of a lane's name takes."""
CONFIG: dict[str, Any] = {
    "showSendToCloud": False,  # plotly's mode bar offers to upload the figure unless told not to
    "displaylogo": False,
    "responsive": True,
    "scrollZoom": False,
    "modeBarButtonsToRemove": ["select2d", "lasso2d", "autoScale2d"],
}
"""Of all figures on pages."""
AXES_CONFIG: dict[str, Any] = {
    **CONFIG,
    "doubleClick": False,  # the canvas knows how far everything reaches, plotly sees one point
    "displayModeBar": False,  # it would cover the last operations; the timeline has buttons of its own
    "showTips": False,
}


def axes_figure(
    table: LaneTable, *, span: float | None = None, left: int | None = None, rows: int | None = None
) -> dict[str, Any]:
    """Axes for `table`: time along, in the unit of `time_unit`; rows down, row i from y = i to i + 1.

    Args:
        span: length of the time axis when it is to be longer than the table's own.
        left: pixels of the lanes' names when other timelines on the page have longer ones.
        rows: when it is not one per lane.
    """
    length = span or table.span or 1.0
    unit = time_unit(table, length)
    hidden = {"showgrid": False, "zeroline": False, "automargin": False}
    layout = {
        "autosize": True,
        "margin": dict(zip("ltrb", margins(table, left), strict=True)) | {"pad": 0, "autoexpand": False},
        "showlegend": False,
        "hovermode": False,
        "dragmode": "zoom",
        "paper_bgcolor": CLEAR,
        "plot_bgcolor": CLEAR,
        "font": {"family": FONT, "size": 12, "color": MUTED},
        "xaxis": {
            "range": unit.axis(length)["range"],
            "side": "top",
            "ticks": "outside",
            "ticksuffix": unit.word and f" {unit.word}",
            "showticksuffix": "last",
            **hidden,
        },
        "yaxis": {"range": [rows or table.lanes, 0], "showticklabels": False, **hidden},
    }
    # Axes are drawn only for a trace. A dict, as go.Figure would look at every key, and send a template of 7 kB along.
    return {"data": [{"type": "scatter", "x": [None], "y": [None]}], "layout": layout}


def margins(table: LaneTable, left: int | None = None) -> tuple[int, int, int, int]:
    """Pixels left of, above, right of and below the axes; `left` as of `axes_figure`."""
    return left or gutter(table), TOP, RIGHT, BOTTOM


def gutter(table: LaneTable) -> int:
    """Pixels left of the axes: the longest lane name with the share of time that its worker is busy, and where there
    are several pipelines the names of groups."""
    longest = max((len(label) for label in table.labels), default=3) + len(" 100 %")
    groups = len("▾ pipeline 999 (99)") if table.shape.pipelines > 1 and table.shape.ranks > 1 else 0
    return round(20 + CHARACTER * (longest + groups))
