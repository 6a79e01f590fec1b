"""Loss and live workers over the steps of a run, with what happened to workers marked."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import plotly.graph_objects as go

from viz.figures.palette import BACKWARD_WEIGHT, FAILURE, FORWARD, GRID, INK, OPTIMIZER, PAPER, RECOVERY, frame

_MARKS = {"fault": (FAILURE, "dash"), "rejoined": (RECOVERY, "dash")}
"""Colour and dash of the events that get a line; the others are in the table of events."""

_LINE = {"type": "line", "y0": 0, "y1": 1, "yref": "paper"}
_FONT = {"size": 11, "color": INK}
ROWS, ROW = 3, 16
"""Rows of texts above the plots, in turn, and their height in pixels; texts of near steps would overlap in one."""
_NOTE = {"y": 1, "yref": "paper", "yanchor": "bottom", "showarrow": False, "bgcolor": PAPER, "font": _FONT}


def curves_figure(
    metrics: Sequence[Mapping[str, Any]], events: Sequence[Mapping[str, Any]], worker_count: int
) -> go.Figure:
    """Two stacked plots over the steps: the loss, with that of evaluations, and how many workers are alive."""
    steps = [line["step"] for line in metrics]
    figure = go.Figure()
    figure.add_scatter(
        x=steps,
        y=[line.get("loss") for line in metrics],
        mode="lines+markers" if len(steps) <= 60 else "lines",
        line={"color": FORWARD.fill, "width": 2},
        marker={"size": 5},
        name="loss",
        hovertemplate="step %{x}: loss %{y:.6g}<extra></extra>",
    )
    evaluated = [line for line in metrics if line.get("eval_loss") is not None]
    if evaluated:
        figure.add_scatter(
            x=[line["step"] for line in evaluated],
            y=[line["eval_loss"] for line in evaluated],
            mode="lines+markers",
            line={"color": BACKWARD_WEIGHT.fill, "width": 2, "dash": "dot"},
            marker={"size": 8, "symbol": "diamond"},
            name="evaluation loss",
            hovertemplate="after step %{x}: evaluation loss %{y:.6g}<extra></extra>",
        )
    figure.add_scatter(
        x=steps,
        y=[line.get("live_workers") for line in metrics],
        mode="lines",
        line={"color": OPTIMIZER.fill, "width": 2, "shape": "hvh"},
        name="live workers",
        yaxis="y2",
        hovertemplate="step %{x}: %{y} live workers<extra></extra>",
    )
    axis = {"gridcolor": GRID, "zeroline": False}
    marks = _event_marks(events)
    figure.update_layout(
        **frame(314 + ROW * min(ROWS, len(marks["annotations"])), 14 + ROW * min(ROWS, len(marks["annotations"])), 44),
        uirevision="curves",  # a live run is drawn again every few seconds: keep the zoom
        xaxis={**axis, "title": {"text": "step", "standoff": 6}, "anchor": "y2", "tickformat": "d"},
        yaxis={**axis, "title": {"text": "loss"}, "domain": [0.36, 1.0], "automargin": True},
        yaxis2={
            **axis,
            "title": {"text": "live workers"},
            "domain": [0.0, 0.26],
            "range": [0, worker_count + 0.6],
            "dtick": max(1, -(-worker_count // 3)),
            "automargin": True,
        },
        **marks,
    )
    return figure


def _event_marks(events: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """A line and a text at the step of each failure and each return, as layout entries."""
    shapes: list[Any] = []
    annotations: list[Any] = []
    for event in events:
        style, step = _MARKS.get(str(event.get("kind"))), event.get("step")
        if style is None or not isinstance(step, int | float):
            continue
        colour, dash = style
        shapes.append({**_LINE, "x0": step, "x1": step, "line": {"color": colour, "width": 1.5, "dash": dash}})
        annotations.append({**_NOTE, "x": step, "yshift": ROW * (len(annotations) % ROWS), "text": event_text(event)})
    return {"shapes": shapes, "annotations": annotations}


def event_text(event: Mapping[str, Any]) -> str:
    """`1.1 failed`, `1.1 back`; for other kinds, and faults that the worker lives through, the worker and the kind."""
    words = {"fault": "failed", "rejoined": "back"}
    kind = str(event.get("kind"))
    struck = re.match("(nan|slow)[=:]", str(event.get("fault")))
    if kind == "fault" and struck:
        kind = struck[1]
    if kind == "fault" and str(event.get("fault")).startswith("drain"):
        kind = "told to leave"
    return " ".join(str(part) for part in (event.get("worker"), words.get(kind, kind)) if part)
