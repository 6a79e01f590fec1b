"""A run over its wall clock: iterations, throughput and live workers, with changes marked; and the parts of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import plotly.graph_objects as go

from recycle.report import GenerationChange, RunReport, TimePart
from viz.figures.palette import (
    BACKWARD_WEIGHT,
    COMMUNICATION,
    FAILURE,
    FORWARD,
    GRID,
    INK,
    MUTED,
    NO_PARTNER,
    OPTIMIZER,
    PAPER,
    RECOVERY,
    REDUNDANT,
    UNCHANGED,
    frame,
)

MARKS = {
    "failure": (FAILURE, "solid"),
    "restart": (FAILURE, "dashdot"),
    "repetition": (FAILURE, "dot"),
    "drain": (FORWARD.fill, "dash"),
    "re-join": (RECOVERY, "dash"),
    "plan": (MUTED, "dot"),
    "layout": (RECOVERY, "dot"),
    "formation": (MUTED, "dot"),
}
"""Colour and dash of the line at a change; the text beside it says which it is."""
FILLS = {
    TimePart.USEFUL: (FORWARD.fill, ""),
    TimePart.REPLAYING: (REDUNDANT.fill, ""),
    TimePart.WAITING: (UNCHANGED.fill, ""),
    TimePart.REDONE: (FAILURE, ""),
    TimePart.PLANNING: (BACKWARD_WEIGHT.fill, ""),
    TimePart.FORMING: (COMMUNICATION.fill, ""),
    TimePart.MOVING: (RECOVERY, ""),
    TimePart.CHECKPOINTING: (NO_PARTNER.fill, ""),
    TimePart.EVALUATING: (REDUNDANT.fill, "/"),
    TimePart.STARTING: (OPTIMIZER.fill, "/"),
    TimePart.ENDING: (OPTIMIZER.fill, "x"),
}
"""Colour and hatch of each part of the time."""
MOST_TEXTS = 24
"""Changes that are marked with a text; of more, only lines are drawn."""
LONGEST_TEXT = 26
_LINE = {"type": "line", "y0": 0, "y1": 1, "yref": "paper"}
_NOTE = {"yref": "paper", "showarrow": False, "bgcolor": PAPER, "font": {"size": 11, "color": INK}, "xanchor": "left"}


def over_time_figure(report: RunReport, metrics: Sequence[Mapping[str, Any]], workers: int) -> go.Figure:
    """Three plots above each other over the seconds since the run's start.

    Args:
        metrics: lines of `metrics.jsonl`, each with its time.
        workers: of the whole job.
    """
    times = [line["time"] for line in metrics]
    steps = [line["step"] for line in metrics]
    taken = dict.fromkeys(steps, 0.0)
    for span in report.spans:
        if span.step in taken and span.part is not TimePart.EVALUATING:
            taken[span.step] += span.seconds
    figure = go.Figure()
    rows: tuple[tuple[str, str, list[Any], str, str], ...] = (
        ("y", "seconds", [taken[step] for step in steps], FORWARD.fill, "%{y:.4g} s"),
        ("y2", "tokens/s", [line.get("tokens_per_second") for line in metrics], RECOVERY, "%{y:,.0f} tokens/s"),
        ("y3", "live workers", [line.get("live_workers") for line in metrics], OPTIMIZER.fill, "%{y} live workers"),
    )
    for place, name, values, colour, hover in rows:
        figure.add_scatter(
            x=times,
            y=values,
            customdata=steps,
            mode="lines+markers" if len(steps) <= 120 and place != "y3" else "lines",
            line={"color": colour, "width": 2, "shape": "vh" if place == "y3" else "linear"},
            marker={"size": 4},
            name=name,
            yaxis=place,
            hovertemplate=f"step %{{customdata}}, %{{x:.2f}} s: {hover}<extra></extra>",
        )
    axis = {"gridcolor": GRID, "zeroline": False, "automargin": True, "rangemode": "tozero"}
    figure.update_layout(
        **frame(520, 20 + 16 * min(3, _texts(report.changes)), 44),
        uirevision="over-time",  # a live run is drawn again every few seconds: keep the zoom
        xaxis={**axis, "title": {"text": "seconds since the start", "standoff": 6}, "anchor": "y3"},
        yaxis={**axis, "title": {"text": "iteration, s"}, "domain": [0.66, 1.0]},
        yaxis2={**axis, "title": {"text": "tokens/s"}, "domain": [0.3, 0.6]},
        yaxis3={
            **axis,
            "title": {"text": "workers"},
            "domain": [0.0, 0.24],
            "range": [0, workers + 0.6],
            "dtick": max(1, -(-workers // 3)),
        },
        **_change_marks(report.changes),
    )
    return figure


def _texts(changes: Sequence[GenerationChange]) -> int:
    return len(changes) if len(changes) <= MOST_TEXTS else 0


def _change_marks(changes: Sequence[GenerationChange]) -> dict[str, Any]:
    """A line at each change, and a text above it, on three rows in turn."""
    shapes, annotations = [], []
    for place, change in enumerate(changes):
        colour, dash = MARKS[change.kind]
        line = {"color": colour, "width": 1.5, "dash": dash}
        shapes.append({**_LINE, "x0": change.time, "x1": change.time, "line": line})
        if _texts(changes):
            text = change.what if len(change.what) <= LONGEST_TEXT else f"{change.what[: LONGEST_TEXT - 1]}…"
            shift = {"y": 1, "yanchor": "bottom", "yshift": 16 * (place % 3)}
            annotations.append({**_NOTE, **shift, "x": change.time, "text": text})
    return {"shapes": shapes, "annotations": annotations}


def parts_figure(report: RunReport) -> go.Figure:
    """One bar of the wall clock, divided into its parts, in per cent."""
    figure = go.Figure()
    wall = report.wall or 1.0
    for part, seconds in report.parts.items():
        if seconds < 1e-4 * wall:
            continue
        share = 100 * seconds / wall
        figure.add_bar(
            orientation="h",
            x=[share],
            y=[""],
            name=part.value,
            marker={"color": FILLS[part][0], "pattern": {"shape": FILLS[part][1], "fgcolor": PAPER, "size": 6}},
            hovertemplate=f"{part.value}: {seconds:.3f} s, %{{x:.3g}} %<extra></extra>",
        )
    figure.update_layout(
        **frame(150, 40, 44) | {"showlegend": True},
        barmode="stack",
        legend={"orientation": "h", "y": 1.05, "yanchor": "bottom", "traceorder": "normal"},
        xaxis={"gridcolor": GRID, "range": [0, 100], "title": {"text": "per cent of the time", "standoff": 6}},
        yaxis={"showticklabels": False},
    )
    return figure
