"""Figures of a comparison of systems: throughput over time above the nodes alive, goodput, and where time went."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import plotly.graph_objects as go

from viz.comparison import SystemResult, TraceSummary
from viz.figures.charts import BOTTOM, add_line, add_shares, beside, legend_above, over
from viz.figures.palette import FAILURE, GRID, MUTED, OPTIMIZER, frame

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#8C8C8C")
DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot")
"""Lines differ in dashes too, bars in the texts beside them: never by colour alone."""
SHAPES = ("", "/", "x", "-", "\\", "|", "+", ".")
HOUR = 3600.0
SHORTEST = 1 / 1000
"""Share of the trace from which a pause is drawn: thinner than a pixel it would still hide what is behind."""
_BAR = 34


def rates_figure(trace: TraceSummary, systems: Sequence[SystemResult]) -> go.Figure:
    """Samples per second of each system over the hours of a trace, and below how many nodes are alive."""
    figure = go.Figure()
    for place, system in enumerate(system for system in systems if system.fits):
        line = {"color": COLOURS[place % len(COLOURS)], "dash": DASHES[place % len(DASHES)], "shape": "hv"}
        add_line(figure, *steps(system), system.name, f"{system.name}: %{{y:.4g}} samples/s from %{{x:.4g}} h", line)
    hours = [time / HOUR for time, _ in trace.alive] + [trace.seconds / HOUR]
    alive = [count for _, count in trace.alive] + [trace.alive[-1][1] if trace.alive else trace.nodes]
    line, hover = {"color": OPTIMIZER.fill, "shape": "hv"}, "%{y} nodes alive from %{x:.4g} h"
    add_line(figure, hours, alive, "", hover, line, yaxis="y2", showlegend=False)
    figure.update_layout(
        frame(440, 30, BOTTOM) | legend_above(1.02),
        xaxis=over("hours", anchor="y2"),
        yaxis=beside("samples per second", 0.34, rangemode="tozero"),
        yaxis2=beside("nodes alive", 0.0, 0.24),
    )
    return figure


def steps(system: SystemResult) -> tuple[list[float], list[float]]:
    """Hours and the rate from each on, 0 in pauses of SHORTEST and longer; the last is the end of the trace."""
    hours: list[float] = []
    rates: list[float] = []
    for place, change in enumerate(system.timeline):
        until = system.timeline[place + 1].time if place + 1 < len(system.timeline) else system.seconds
        pause = min(change.pause, until - change.time)
        if pause < SHORTEST * system.seconds:
            pause = 0.0
        else:
            hours.append(change.time / HOUR)
            rates.append(0.0)
        if change.time + pause < until:
            hours.append((change.time + pause) / HOUR)
            rates.append(change.rate)
    if rates:
        hours.append(system.seconds / HOUR)
        rates.append(rates[-1])
    return hours, rates


def goodput_figure(trace: TraceSummary, systems: Sequence[SystemResult]) -> go.Figure:
    """A bar of committed samples per second for each system; lines are what no failure, and an ideal, would give."""
    figure = go.Figure()
    names = [system.name for system in systems]
    figure.add_bar(
        orientation="h",
        x=[system.goodput for system in systems],
        y=names,
        marker={"color": COLOURS[0]},
        text=[f"{system.goodput:.4g}" if system.fits else "does not fit" for system in systems],
        textposition=["auto" if system.fits else "outside" for system in systems],
        hovertemplate="%{y}: %{x:.5g} samples/s<extra></extra>",
        showlegend=False,
    )
    shapes: list[dict[str, Any]] = []
    notes: list[dict[str, Any]] = []
    for row, (name, reference) in enumerate(trace.references.items()):
        scaled = reference.goodput * trace.live
        line = {"color": FAILURE, "width": 1.5, "dash": "dash" if row else "solid"}
        shapes.append({"type": "line", "x0": scaled, "x1": scaled, "y0": 0, "y1": 1, "yref": "paper", "line": line})
        text = f"{name}, fault-scaled: {scaled:.4g}"
        notes.append({"x": scaled, "y": 1 + 0.1 * row, "yref": "paper", "text": text, "showarrow": False})
    figure.update_layout(
        **frame(90 + _BAR * len(systems), 30 + 20 * len(notes), BOTTOM),
        xaxis={"gridcolor": GRID, "title": {"text": "samples per second", "standoff": 6}, "rangemode": "tozero"},
        yaxis={"autorange": "reversed", "automargin": True},
        shapes=shapes,
        annotations=[{**note, "yanchor": "bottom", "font": {"size": 11, "color": MUTED}} for note in notes],
    )
    return figure


def lost_figure(systems: Sequence[SystemResult]) -> go.Figure:
    """Where the time went: per system a bar of the shares of time that each cause took; the rest was progress."""
    figure = go.Figure()
    shown = [system for system in systems if system.fits and system.seconds]
    causes = {cause: None for system in shown for cause, lost in system.lost.items() if lost > 1e-6 * system.seconds}
    names = [system.name for system in shown]
    for place, cause in enumerate(causes):
        shares = [100 * max(0.0, system.lost.get(cause, 0.0)) / system.seconds for system in shown]
        fill = COLOURS[place % len(COLOURS)], SHAPES[place % len(SHAPES)]
        add_shares(figure, names, shares, cause, fill, f"%{{y}}: {cause} %{{x:.3g}} %")
    figure.update_layout(
        frame(110 + _BAR * len(shown), 30, BOTTOM) | legend_above(1.02, traceorder="normal"),
        barmode="stack",
        xaxis={"gridcolor": GRID, "title": {"text": "share of the time, in per cent", "standoff": 6}},
        yaxis={"autorange": "reversed", "automargin": True},
    )
    return figure
