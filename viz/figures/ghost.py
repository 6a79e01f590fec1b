"""The ghost: outlines of where a timeline's operations were before, over the lanes of the one that took its place."""

from __future__ import annotations

from typing import Any

import numpy as np
import plotly.graph_objects as go

from viz.figures.boxes import WORK_BOTTOM, WORK_TOP
from viz.figures.palette import MUTED
from viz.lanes import LaneTable

LIMIT = 4000
"""Operations beyond which outlines would hide more than they show."""


def add_ghost(figure: go.Figure, old: LaneTable, scale: float = 1.0) -> bool:
    """Add the outlines of `old`, whose lanes are those of the figure; whether that was done."""
    shown = np.flatnonzero(old.end > old.start)
    if not len(shown) or len(shown) > LIMIT:
        return False
    left, right, lane = old.start[shown] * scale, old.end[shown] * scale, old.lane[shown]
    top, bottom = lane + WORK_TOP - 0.06, lane + WORK_BOTTOM + 0.06
    gap = np.full(len(shown), np.nan)
    x: Any = np.stack([left, right, right, left, left, gap], axis=1).ravel()
    y: Any = np.stack([top, top, bottom, bottom, top, gap], axis=1).ravel()
    figure.add_scatter(
        x=x,
        y=y,
        mode="lines",
        name="before",
        line={"color": MUTED, "width": 1.2, "dash": "dot"},
        hoverinfo="skip",
        showlegend=False,
    )
    return True
