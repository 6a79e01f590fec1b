"""What figures and timelines keep alike: Plotly's configuration, and the room around the axes of lanes."""

from __future__ import annotations

from typing import Any

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


def margins(table: LaneTable, left: int | None = None) -> tuple[int, int, int, int]:
    """Pixels left of, above, right of and below the axes.

    Args:
        left: pixels of the lanes' names when other timelines on the page have longer ones.
    """
    return left or gutter(table), TOP, RIGHT, BOTTOM


def gutter(table: LaneTable) -> int:
    """Pixels left of the axes: the longest lane name with the share of time that its worker is busy, and where there
    are several pipelines the names of groups."""
    longest = max((len(label) for label in table.labels), default=3) + len(" 100 %")
    groups = len("▾ pipeline 999 (99)") if table.shape.pipelines > 1 and table.shape.ranks > 1 else 0
    return round(20 + CHARACTER * (longest + groups))
