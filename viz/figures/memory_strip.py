"""The memory strip: what a worker holds over time as steps, its limit as a line, its peak with its instruction."""

from __future__ import annotations

import plotly.graph_objects as go

from viz.analysis.memory import MemoryCurve, sampled
from viz.figures.palette import FAILURE, FORWARD, GRID, frame
from viz.figures.time_axis import TimeUnit

PIXELS, HEIGHT = 2000, 150


def memory_figure(curve: MemoryCurve, instruction: str, span: float, unit: TimeUnit) -> go.Figure:
    """The figure.

    Args:
        instruction: the one that sets the peak.
        span: length of the time axis; `unit` is that of the timelines beside it.
    """
    scale = unit.scale
    time, held = sampled(curve, 0.0, span, PIXELS)
    figure = go.Figure()
    figure.add_scatter(
        x=time * scale,
        y=held,
        mode="lines",
        line={"color": FORWARD.fill, "width": 1.6, "shape": "hv"},
        fill="tozeroy",
        fillcolor="rgba(0, 114, 178, 0.22)",
        name="held",
        hovertemplate="%{y:.6g} held from %{x:.6g}<extra></extra>",
    )
    figure.add_scatter(
        x=[curve.peak_time * scale],
        y=[curve.peak],
        mode="markers+text",
        marker={"symbol": "triangle-down", "size": 10, "color": FAILURE if curve.is_exceeded else FORWARD.fill},
        text=[f"peak {curve.peak:.4g}: {instruction}"],
        textposition="top right" if curve.peak_time < 0.8 * span else "top left",
        name="peak",
        hoverinfo="skip",
    )
    top = max(curve.peak, curve.limit or 0.0) or 1.0
    if curve.limit is not None:
        figure.add_hline(y=curve.limit, line={"color": FAILURE, "width": 1.6, "dash": "dash"})
        right = {"x": 1, "xref": "paper", "xanchor": "right", "yanchor": "bottom", "showarrow": False}
        figure.add_annotation(right, y=curve.limit, text=f"limit {curve.limit:g}", name="limit")
    figure.update_layout(
        **frame(HEIGHT, 10, 36),
        xaxis={**unit.axis(span), "gridcolor": GRID, "zeroline": False},
        yaxis={"gridcolor": GRID, "zeroline": False, "range": [0, 1.35 * top], "nticks": 5, "fixedrange": True},
    )
    return figure
