"""A LaneTable as a Plotly figure with a bar per operation, to zoom and hover in a notebook.

Meant for a few thousand operations: browsers take a second for ten thousand bars. Pages draw lanes on a canvas instead.
"""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import plotly.graph_objects as go

from viz.figures.boxes import Box, boxes, group_edges
from viz.figures.palette import BAND, FAILURE, FAILURE_BAND, FAILURE_HATCH, GRID, INK, PAPER, RULE, Paint, frame
from viz.figures.time_axis import time_unit
from viz.labels import describe
from viz.lanes import LaneTable

TEXT_LIMIT = 1000
"""Operations beyond which bars have no text, which takes a browser three times as long as the bars."""
LANE_PIXELS, LEAST_LANE_PIXELS, LANES_PIXELS = 34, 16, 1100
"""Height of a lane; lanes shrink, to the least, while all together are higher than LANES_PIXELS."""


def timeline_figure(table: LaneTable) -> go.Figure:
    """The figure of a timeline."""
    span = table.span or 1.0
    unit = time_unit(table)
    lanes = max(table.lanes, 1)
    height = max(LEAST_LANE_PIXELS, min(LANE_PIXELS, LANES_PIXELS // lanes)) * lanes
    figure = go.Figure()
    figure.update_layout(frame(74 + height, 30, 44) | {"plot_bgcolor": BAND, "barmode": "overlay"})
    figure.update_layout(uniformtext={"minsize": 8, "mode": "hide"}, hoverlabel={"align": "left"})
    figure.update_xaxes(gridcolor=GRID, zeroline=False, **unit.axis(span))
    names = {"tickvals": list(range(table.lanes)), "ticktext": list(table.labels)}
    figure.update_yaxes(range=[table.lanes - 0.5, -0.5], automargin=True, showgrid=False, zeroline=False, **names)
    for lane in group_edges(table):
        figure.add_hline(y=lane - 0.5, layer="below", line={"color": RULE, "width": 1})
    _mark_failed(figure, table, span * unit.scale)
    drawn: dict[tuple[Paint, bool], list[Box]] = defaultdict(list)
    for box in boxes(table):
        if box.end > box.start:
            drawn[box.paint, box.rerouted].append(box)
    for (paint, rerouted), members in drawn.items():
        _add_bars(figure, table, paint, rerouted, members, unit.scale)
    return figure


def _mark_failed(figure: go.Figure, table: LaneTable, length: float) -> None:
    lanes = np.flatnonzero(table.failed).tolist()
    stripes = {"shape": "x", "fgcolor": FAILURE_HATCH, "bgcolor": FAILURE_BAND, "size": 9, "solidity": 0.12}
    figure.add_bar(
        orientation="h",
        name="failed",
        x=[length] * len(lanes),
        y=lanes,
        width=[0.9] * len(lanes),  # without it bars take their height from the spacing of their own trace
        marker={"color": FAILURE_BAND, "line": {"color": FAILURE, "width": 1}, "pattern": stripes},
        hoverinfo="text",
        hovertext=[f"worker {table.labels[lane]} has failed" for lane in lanes],
    )
    for lane in lanes:
        # At the right end when the lane holds work: from before it died, or against the rules.
        has_work = table.offsets[lane + 1] > table.offsets[lane]
        place = {"x": 0.995, "xanchor": "right"} if has_work else {"x": 0.5, "xanchor": "center"}
        figure.add_annotation(**place, xref="paper", y=lane, text="failed", showarrow=False, bgcolor=FAILURE)


def _add_bars(
    figure: go.Figure, table: LaneTable, paint: Paint, rerouted: bool, members: list[Box], scale: float
) -> None:
    stripes = {"shape": "/", "fgcolor": paint.hatch, "bgcolor": paint.fill, "size": 7, "solidity": 0.35}
    border = {"color": INK, "width": 1.6} if rerouted else {"color": PAPER, "width": 0.6}
    has_text = len(table) <= TEXT_LIMIT
    texts = [describe(table, box.operation, box.lane) for box in members]
    figure.add_bar(
        orientation="h",
        name=f"{paint.name}, re-routed" if rerouted else paint.name,
        base=[box.start * scale for box in members],
        x=[(box.end - box.start) * scale for box in members],
        y=[box.lane + (box.top + box.bottom) / 2 for box in members],
        width=[box.bottom - box.top for box in members],
        marker={"color": paint.fill, "line": border, "pattern": stripes if rerouted else {"shape": ""}},
        text=[box.label for box in members] if has_text else None,
        textposition="inside" if has_text else "none",
        insidetextanchor="middle",
        textangle=0,
        insidetextfont={"color": paint.ink, "size": 12, "weight": 600 if rerouted else 400},
        hoverinfo="text",
        hovertext=[f"<b>{title}</b><br>" + "<br>".join(lines) for title, *lines in texts],
    )
