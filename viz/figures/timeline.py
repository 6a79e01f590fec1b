"""A LaneTable as a Plotly figure: bars with hover up to `BAR_LIMIT` operations, one path per colour above.

Measured in the browser: bars with text stay quick up to about a thousand operations, without text up to two thousand;
a path per colour draws a hundred thousand in under a second but has neither hover nor labels.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import numpy as np
import plotly.graph_objects as go

from viz.figures.boxes import Box, boxes, group_edges
from viz.figures.palette import BAND, FAILURE, FAILURE_BAND, FAILURE_HATCH, FONT, GRID, INK, MUTED, PAPER, RULE, Paint
from viz.figures.time_axis import OVERHANG, TimeUnit, time_unit
from viz.labels import describe
from viz.lanes import LaneTable

TEXT_LIMIT, BAR_LIMIT, PATH_LIMIT = 1000, 2000, 100_000
LANE_PIXELS, LEAST_LANE_PIXELS, LANES_PIXELS = 34, 16, 1100
"""Height of a lane; lanes shrink, to the least, while all together are higher than LANES_PIXELS."""
MARGIN_TOP, MARGIN_BOTTOM = 30, 44
CONFIG: dict[str, Any] = {
    "showSendToCloud": False,  # plotly's mode bar offers to upload the figure unless told not to
    "displaylogo": False,
    "responsive": True,
    "scrollZoom": False,
    "modeBarButtonsToRemove": ["select2d", "lasso2d", "autoScale2d"],
}
FAILED_LABEL = "failed"
_EDGE = {"type": "line", "x0": 0, "x1": 1, "xref": "paper", "layer": "below", "line": {"color": RULE, "width": 1}}


def timeline_figure(table: LaneTable, *, span: float | None = None) -> go.Figure:
    """The figure of a timeline.

    Args:
        span: length of the time axis when it is to be longer than the table's own, to compare two figures.
    """
    length = span or table.span or 1.0
    unit = time_unit(table, length)
    scale = unit.scale
    figure = go.Figure()
    figure.update_layout(_layout(table, length, unit))
    _mark_failed(figure, table, length * scale)
    drawn = [box for box in boxes(table) if box.end > box.start]
    if len(table) <= BAR_LIMIT:
        _add_bars(figure, table, drawn, scale)
    else:
        _add_paths(figure, drawn, scale)
    return figure


def note(table: LaneTable) -> str:
    """What the figure leaves out, "" when nothing."""
    if len(table) > PATH_LIMIT:
        return f"The first {PATH_LIMIT:,} of {len(table):,} operations by time, without labels or hover."
    if len(table) > BAR_LIMIT:
        return f"{len(table):,} operations: drawn without labels and hover."
    return ""


def _layout(table: LaneTable, span: float, unit: TimeUnit) -> dict[str, Any]:
    lanes = max(table.lanes, 1)
    lane = max(LEAST_LANE_PIXELS, min(LANE_PIXELS, LANES_PIXELS // lanes))
    return {
        "height": MARGIN_TOP + MARGIN_BOTTOM + lane * lanes,
        "margin": {"l": 8, "r": 16, "t": MARGIN_TOP, "b": MARGIN_BOTTOM},
        "barmode": "overlay",
        "shapes": [{**_EDGE, "y0": lane - 0.5, "y1": lane - 0.5} for lane in group_edges(table)],
        "showlegend": False,
        "paper_bgcolor": PAPER,
        "plot_bgcolor": BAND,
        "font": {"family": FONT, "size": 12, "color": INK},
        "uniformtext": {"minsize": 8, "mode": "hide"},
        "hoverlabel": {"bgcolor": PAPER, "bordercolor": MUTED, "font": {"color": INK, "size": 12}, "align": "left"},
        "dragmode": "zoom",
        "xaxis": {
            **unit.axis(span),
            "gridcolor": GRID,
            "zeroline": False,
            "ticks": "outside",
            "tickcolor": GRID,
        },
        "yaxis": {
            "range": [table.lanes - 0.5, -0.5],
            "tickvals": list(range(table.lanes)),
            "ticktext": list(table.labels),
            "fixedrange": table.lanes <= 24,
            "showgrid": False,
            "zeroline": False,
            "ticklabelstandoff": 6,
            "automargin": True,
        },
    }


def _mark_failed(figure: go.Figure, table: LaneTable, length: float) -> None:
    lanes = np.flatnonzero(table.failed).tolist()
    if not lanes:
        return
    figure.add_bar(
        orientation="h",
        name=FAILED_LABEL,
        base=[-OVERHANG * length] * len(lanes),
        x=[(1 + 2 * OVERHANG) * length] * len(lanes),
        y=lanes,
        width=[0.9] * len(lanes),  # without it bars take their height from the spacing of their own trace
        marker={
            "color": FAILURE_BAND,
            "line": {"color": FAILURE, "width": 1},
            "pattern": {"shape": "x", "fgcolor": FAILURE_HATCH, "bgcolor": FAILURE_BAND, "size": 9, "solidity": 0.12},
        },
        text=[""] * len(lanes),
        textposition="none",
        hoverinfo="text",
        hovertext=[f"worker {table.labels[lane]} has failed" for lane in lanes],
    )
    busy = np.diff(table.offsets)[lanes] > 0
    figure.update_layout(
        annotations=[
            {
                # At the right end when the lane holds work: from before it died, or against the rules.
                "x": 0.995 if has_work else 0.5,
                "xref": "paper",
                "xanchor": "right" if has_work else "center",
                "y": lane,
                "text": FAILED_LABEL,
                "showarrow": False,
                "bgcolor": FAILURE,
                "borderpad": 3,
                "font": {"color": INK, "size": 12, "weight": 600},
            }
            for lane, has_work in zip(lanes, busy, strict=True)
        ]
    )


def _add_bars(figure: go.Figure, table: LaneTable, drawn: list[Box], scale: float) -> None:
    with_text = len(table) <= TEXT_LIMIT
    groups: dict[tuple[str, bool], list[Box]] = defaultdict(list)
    paints: dict[str, Paint] = {}
    for box in drawn:
        groups[box.paint.key, box.rerouted].append(box)
        paints[box.paint.key] = box.paint
    for (key, rerouted), members in sorted(groups.items()):
        paint = paints[key]
        pattern = {"shape": "/", "fgcolor": paint.hatch, "bgcolor": paint.fill, "size": 7, "solidity": 0.35}
        figure.add_bar(
            orientation="h",
            name=f"{paint.name}, re-routed" if rerouted else paint.name,
            meta={"paint": key, "rerouted": rerouted},
            base=[box.start * scale for box in members],
            x=[(box.end - box.start) * scale for box in members],
            y=[box.lane + (box.top + box.bottom) / 2 for box in members],
            width=[box.bottom - box.top for box in members],
            marker={
                "color": paint.fill,
                "line": {"color": INK if rerouted else PAPER, "width": 1.6 if rerouted else 0.6},
                "pattern": pattern if rerouted else {"shape": ""},
            },
            text=[box.label for box in members] if with_text else None,
            textposition="inside" if with_text else "none",
            insidetextanchor="middle",
            textangle=0,
            insidetextfont={"color": paint.ink, "size": 12, "weight": 600 if rerouted else 400},
            cliponaxis=True,
            hoverinfo="text",
            hovertext=[_hover(describe(table, box.operation, box.lane)) for box in members],
        )


def _hover(lines: list[str]) -> str:
    return f"<b>{lines[0]}</b><br>" + "<br>".join(lines[1:])


def _add_paths(figure: go.Figure, drawn: list[Box], scale: float) -> None:
    drawn = sorted(drawn, key=lambda box: box.start)[:PATH_LIMIT]
    paths: dict[tuple[str, bool], list[str]] = defaultdict(list)
    for box in drawn:
        left, right = box.start * scale, box.end * scale
        top, bottom = box.lane + box.top, box.lane + box.bottom
        paths[box.paint.fill, box.rerouted].append(f"M{left:.9g},{top:.4g}H{right:.9g}V{bottom:.4g}H{left:.9g}Z")
    figure.update_layout(
        shapes=[
            *figure.layout.shapes,
            *(
                {
                    "type": "path",
                    "path": "".join(pieces),
                    "fillcolor": fill,
                    "line": {"color": INK, "width": 0.8 if rerouted else 0},
                    "layer": "above",
                }
                for (fill, rerouted), pieces in sorted(paths.items())
            ),
        ]
    )
    figure.add_scatter(x=[None], y=[None], showlegend=False, hoverinfo="skip")  # axes are drawn only for a trace
