"""The delta lane: how much later each instruction starts in the second of two iterations, over the first one's time.

Up to `POINTS` instructions are points that differ by shape as well as by colour; of more, the least and the most of
each of `BINS` stretches of time are drawn.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import plotly.graph_objects as go

from recycle.ir.kinds import per_kind
from recycle.ir.simulate import TOLERANCE, Timeline
from viz.analysis.differences import Matches, is_weight_half
from viz.figures.palette import BACKWARD_WEIGHT, FORWARD, GRID, INK, PAINTS, RULE, frame, paint_named
from viz.figures.time_axis import TimeUnit
from viz.kinds import look_of
from viz.numbers import signed

POINTS, BINS = 2000, 800
HEIGHT = 170
SYMBOLS = ("circle", "square", "diamond", "x", "triangle-up", "star")
"""Of the points of each of PAINTS."""


def delta_figure(first: Timeline, second: Timeline, matches: Matches, span: float, unit: TimeUnit) -> go.Figure:
    """The figure; `span` is the length of the time axis, `unit` that of the timelines beside it."""
    scale = unit.scale
    figure = go.Figure()
    time, delta = matches.time * scale, matches.delta * scale
    delta = np.where(np.abs(delta) <= span * scale * TOLERANCE, 0.0, delta)
    if len(time) <= POINTS:
        _add_points(figure, first, second, matches, time, delta)
    elif len(time):
        _add_envelope(figure, time, delta, span * scale)
    title = "time in the first" + (f" ({unit.word})" if unit.word else "")
    figure.update_layout(frame(HEIGHT, 14, 40))
    figure.update_xaxes(unit.axis(span, title), gridcolor=GRID, zeroline=False)
    figure.update_yaxes(gridcolor=GRID, zerolinecolor=RULE, zerolinewidth=2, zeroline=True, automargin=True)
    if not delta.any():
        figure.update_yaxes(range=[-1, 1])
    return figure


def _add_points(figure: go.Figure, first: Timeline, second: Timeline, matches: Matches, time: Any, delta: Any) -> None:
    paint_of = per_kind(lambda cls: PAINTS.index(paint_named(look_of(cls).paints[0])), np.int64)
    painted = paint_of[first.schedule.columns.kind[matches.first]]
    painted[is_weight_half(first, matches)] = PAINTS.index(BACKWARD_WEIGHT)
    for place, (paint, symbol) in enumerate(zip(PAINTS, SYMBOLS, strict=True)):
        chosen = np.flatnonzero(painted == place)
        if not len(chosen):
            continue
        figure.add_scatter(
            x=time[chosen],
            y=delta[chosen],
            mode="markers",
            name=paint.name,
            marker={"color": paint.fill, "symbol": symbol, "size": 7, "line": {"color": INK, "width": 0.5}},
            hoverinfo="text",
            hovertext=[_hover(first, second, matches, point, float(delta[point])) for point in chosen.tolist()],
        )


def _hover(first: Timeline, second: Timeline, matches: Matches, place: int, delta: float) -> str:
    row, other = int(matches.first[place]), int(matches.second[place])
    worker = first.schedule.position(row)[0]
    half = ", weight half" if is_weight_half(first, matches)[place] else ""
    where = f"{worker}" if not matches.moved[place] else f"{worker}, then on {second.schedule.position(other)[0]}"
    return f"<b>{first.schedule.instruction(row)}</b>{half}<br>on {where}<br>starts {signed(delta)}"


def _add_envelope(figure: go.Figure, time: Any, delta: Any, span: float) -> None:
    place = np.minimum((time / (span or 1.0) * BINS).astype(np.int64), BINS - 1)
    most, least = np.full(BINS, -np.inf), np.full(BINS, np.inf)
    np.maximum.at(most, place, delta)
    np.minimum.at(least, place, delta)
    used = np.flatnonzero(np.isfinite(most))
    centre = (used + 0.5) / BINS * span
    for name, values, fill in (("least", least, None), ("most", most, "tonexty")):
        figure.add_scatter(
            x=centre,
            y=values[used],
            mode="lines",
            name=name,
            line={"color": FORWARD.fill, "width": 1, "shape": "hvh"},
            fill=fill,
            fillcolor="rgba(0, 114, 178, 0.25)",
            hovertemplate=f"{name} %{{y:.6g}} at %{{x:.6g}}<extra></extra>",
        )
