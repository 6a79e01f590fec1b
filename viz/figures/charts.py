"""Charts of a run (loss, live workers, iterations, parts of its time), of workers, and of a comparison of systems."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from math import ceil
from typing import Any, Literal, NamedTuple

import numpy as np
import plotly.graph_objects as go

from recycle.job.shape import Shape
from recycle.runs.report import GenerationChange, RunReport, TimePart
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
from viz.numbers import is_number
from viz.sources import SystemResult, TraceSummary

Mark = tuple[float, str, tuple[str, str]]
"""(position, text or "", (color, dash of the line))."""
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
"""Color and dash of the line at a change; the text next to it names the change."""
FILLS = {
    TimePart.USEFUL: FORWARD.fill,
    TimePart.REPLAYING: REDUNDANT.fill,
    TimePart.WAITING: UNCHANGED.fill,
    TimePart.REDONE: FAILURE,
    TimePart.PLANNING: BACKWARD_WEIGHT.fill,
    TimePart.FORMING: COMMUNICATION.fill,
    TimePart.MOVING: RECOVERY,
    TimePart.CHECKPOINTING: NO_PARTNER.fill,
    TimePart.EVALUATING: REDUNDANT.fill,
    TimePart.STARTING: OPTIMIZER.fill,
    TimePart.ENDING: OPTIMIZER.fill,
}
"""Color of each part of the time."""
INTERRUPTIONS = TimePart.REDONE, TimePart.PLANNING, TimePart.FORMING, TimePart.MOVING, TimePart.CHECKPOINTING
"""Parts with a band over the time, in the colors of the table of parts."""
MAX_TEXTS, LONGEST_TEXT = 24, 26
"""Maximum number of changes with a text, and characters of a text; beyond, only lines are drawn."""
ROWS, ROW = 3, 16
"""Rows of texts above the plots, used in turn against overlaps, and their height in pixels."""
BOTTOM, BETWEEN = 44, 14
"""Pixels below all plots, and between two."""
FROM_ZERO = {"rangemode": "tozero"}
LEGEND_ABOVE = {
    "showlegend": True,
    "legend": {"orientation": "h", "y": 1.02, "yanchor": "bottom", "traceorder": "normal"},
}
BARS = {"yaxis": {"autorange": "reversed", "automargin": True}}
UPRIGHT = {"type": "line", "y0": 0, "y1": 1, "yref": "paper"}
_NOTE = {"y": 1, "yref": "paper", "yanchor": "bottom", "showarrow": False}


def titled_axis(title: str, **options: Any) -> dict[str, Any]:
    text = {"text": title, "standoff": 6}
    return {"gridcolor": GRID, "zeroline": False, "automargin": True, "title": text, **options}


class Plot(NamedTuple):
    """One of several plots below each other.

    Attributes:
        pixels: its height.
        lines: entries of its lines, of two pixels; "hover" is the template of the text under the pointer.
        options: entries of its vertical axis.
    """

    title: str
    pixels: int
    lines: Sequence[Mapping[str, Any]]
    options: Mapping[str, Any] = {}


def stacked_figure(plots: Sequence[Plot], title: str, marks: Sequence[Mark] = (), **options: Any) -> go.Figure:
    """Return plots below each other on one horizontal axis, with a line at each mark and its text above.

    Args:
        title, options: title and entries of the horizontal axis.
    """
    figure, left = go.Figure(), sum(plot.pixels for plot in plots)
    texts, whole = [(x, text) for x, text, _ in marks if text], left
    top = 16 + ROW * min(ROWS, len(texts))
    layout: dict[str, Any] = frame(whole + top + BOTTOM, top, BOTTOM)
    for number, plot in enumerate(plots, 1):
        domain = [(left - plot.pixels + (BETWEEN if number < len(plots) else 0)) / whole, left / whole]
        layout[f"yaxis{number}"] = titled_axis(plot.title, domain=domain, fixedrange=True, **plot.options)
        left -= plot.pixels
        for line in plot.lines:
            own = {"mode": "lines", **line, "line": {"width": 2, **line["line"]}}
            figure.add_scatter(hovertemplate=f"{own.pop('hover')}<extra></extra>", yaxis=f"y{number}", **own)
    note = {**_NOTE, "xanchor": "left", "bgcolor": PAPER, "font": {"size": 11, "color": INK}}
    figure.update_layout(
        **layout,
        shapes=[
            {**UPRIGHT, "x0": x, "x1": x, "line": {"color": colour, "width": 1.5, "dash": dash}}
            for x, _, (colour, dash) in marks
        ],
        annotations=[{**note, "x": x, "yshift": ROW * (i % ROWS), "text": text} for i, (x, text) in enumerate(texts)],
        xaxis=titled_axis(title, anchor=f"y{len(plots)}", **options),
    )
    return figure


class Column(NamedTuple):
    """A plot of an entry of the metrics: title, pixels, color, format of a value, and entries of its axis."""

    title: str
    pixels: int
    colour: str
    text: str
    options: Mapping[str, Any] = FROM_ZERO


COLUMNS = {
    "seconds": Column("iteration, s", 110, FORWARD.fill, "%{y:.4g} s"),
    "tokens_per_second": Column("tokens/s", 110, RECOVERY, "%{y:,.0f} tokens/s"),
    "loss": Column("loss", 110, BACKWARD_WEIGHT.fill, "loss %{y:.6g}", {}),
    "step": Column("steps", 110, MUTED, "%{y} steps"),
    "live_workers": Column("workers", 80, OPTIMIZER.fill, "%{y} live workers"),
}
"""Entry of the metrics -> its plot."""
ROLLING, MARKED = 9, 120
"""Steps of a rolling mean of tokens/s, and maximum steps with a marker each."""


def run_figure(
    runs: Mapping[str, Sequence[Mapping[str, Any]]],
    columns: Sequence[str],
    axis: Literal["step", "time"],
    marks: Sequence[Mark] = (),
) -> go.Figure:
    """Return plots of the metrics of runs, by name, over steps or seconds; of several runs, each has a color."""
    plots = []
    for name in columns:
        column, lines = COLUMNS[name], []
        for place, (run, metrics) in enumerate(runs.items()):
            style = _style(place) if len(runs) > 1 else {"color": column.colour}
            line = {**style, "shape": "hv" if name == "live_workers" else "linear"}
            for entry in (name, "eval_loss") if name == "loss" else (name,):
                known = [each for each in metrics if is_number(each.get(entry)) and is_number(each.get(axis))]
                values = np.array([each[entry] for each in known])
                if name == "tokens_per_second" and len(values) > MARKED:
                    values = np.convolve(np.pad(values, ROLLING // 2, "edge"), np.full(ROLLING, 1 / ROLLING), "valid")
                text = ("evaluation " if entry == "eval_loss" else "") + column.text
                lines.append(
                    {
                        "x": [each[axis] for each in known],
                        "y": values.tolist(),
                        "name": run,
                        "hover": f"{run} step %{{customdata}}, {text}",
                        "line": line if entry == name else {**line, "dash": "dot"},
                        "mode": "lines+markers" if len(known) <= MARKED and name != "live_workers" else "lines",
                        "marker": {"size": 4},
                        "customdata": [each["step"] for each in known],
                        "showlegend": len(runs) > 1 and name == columns[0] and entry == name,
                        "legendgroup": run,
                    }
                )
        plots.append(Plot(column.title, column.pixels, [line for line in lines if line["x"]], column.options))
    figure = stacked_figure(plots, {"step": "step", "time": "seconds since the start"}[axis], marks, **FROM_ZERO)
    return figure.update_layout(LEGEND_ABOVE) if len(runs) > 1 else figure


def over_time_figure(report: RunReport | None, metrics: Sequence[Mapping[str, Any]]) -> go.Figure:
    """Return plots of a run over the seconds since its start, with a band for each interruption.

    Args:
        report: None without any span; the plots are then empty.
    """
    columns = ("seconds", "tokens_per_second", "loss", "live_workers")
    if report is None or not report.spans:
        return run_figure({"": ()}, columns, "time")
    seconds: dict[int | None, float] = defaultdict(float)
    for span in report.spans:
        seconds[span.step] += span.seconds * (span.part is not TimePart.EVALUATING)
    timed = [{**line, "seconds": seconds[line["step"]]} for line in metrics]
    marks = [_mark(change, len(report.changes)) for change in report.changes]
    figure = run_figure({"": timed}, columns, "time", marks)
    for span in report.spans:
        if span.part in INTERRUPTIONS and span.seconds > SHORTEST * report.wall:
            band = {"type": "rect", "fillcolor": FILLS[span.part], "line": {"width": 0}, "opacity": 0.3}
            figure.add_shape(UPRIGHT | band, x0=span.start, x1=span.end, layer="below")
    return figure


def event_text(event: Mapping[str, Any]) -> str:
    """Return `1.1 failed`, `1.1 back`, or the worker and the kind for other events."""
    words = {"fault": "failed", "rejoined": "back", "drain": "asked to leave"}
    kind = str(event.get("kind"))
    if kind == "fault" and (struck := re.match("(nan|slow|drain)[=:]", str(event.get("fault")))):
        kind = struck[1]
    return " ".join(str(part) for part in (event.get("worker"), words.get(kind, kind)) if part)


def _mark(change: GenerationChange, count: int) -> Mark:
    text = change.what if len(change.what) <= LONGEST_TEXT else f"{change.what[: LONGEST_TEXT - 1]}…"
    return change.time, text if count <= MAX_TEXTS else "", MARKS[change.kind]


COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#8C8C8C")
DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot")
"""Dashes distinguish lines besides color; texts distinguish bars."""
SHAPES = ("", "/", "x", "-", "\\", "|", "+", ".")


def _style(place: int) -> dict[str, Any]:
    return {"color": COLOURS[place % len(COLOURS)], "dash": DASHES[place % len(DASHES)]}


def period_curves_figure(
    title: str, values: Sequence[float], periods: Mapping[str, Sequence[float]], mark: float | None
) -> go.Figure:
    """Return the period of each timeline over the values of one time, with a line at `mark`."""
    lines = []
    for place, (name, seconds) in enumerate(periods.items()):
        line, hover = _style(place), f"{name}: period %{{y:.6g}} at %{{x:.4g}}"
        lines.append({"x": values, "y": seconds, "name": name, "hover": hover, "line": line})
    marks: list[Mark] = [] if mark is None else [(mark, "", (FAILURE, "dot"))]
    figure = stacked_figure([Plot("period", 190, lines)], title, marks)
    legend = {"orientation": "h", "y": -0.3, "yanchor": "top", "font": {"size": 10.5}}
    return figure.update_layout(height=figure.layout.height + 12 * len(periods), showlegend=True, legend=legend)


def memory_period_figure(points: Sequence[Sequence[Any]], memory_title: str) -> go.Figure:
    """Return a plot of timelines, as (name, period, memory): the lower left is best."""
    names, periods, memory = zip(*points, strict=True)
    figure = go.Figure()
    figure.add_scatter(
        x=periods,
        y=memory,
        mode="markers+text",
        text=names,
        textposition=[f"{side} center" for side in ("top", "bottom") * len(points)][: len(points)],
        marker={"size": 11, "color": [COLOURS[place % len(COLOURS)] for place in range(len(points))]},
        hovertemplate="%{text}: period %{x:.6g}, memory %{y:.4g}<extra></extra>",
        cliponaxis=False,
    )
    axes = {"xaxis": titled_axis("period, in the unit of the times"), "yaxis": titled_axis(memory_title, **FROM_ZERO)}
    return figure.update_layout(frame(340, 30, BOTTOM), **axes)


def workers_figure(shape: Shape, columns: Mapping[str, Sequence[float | None]]) -> go.Figure:
    """Return a heat map of ranks and pipelines, with a button for each column of numbers by worker; None is a gap."""
    size: Any = shape.pipelines, shape.ranks
    buttons: list[dict[str, Any]] = []
    for name, values in columns.items():
        known = {value for value in values if value is not None}
        lowest = min(known) if len(known) > 1 else 0.0  # the scale of equal values begins at 0
        scale = {"zmin": lowest, "zmax": max(known, default=0.0) or 1.0, "colorbar.title.text": name}
        scale["z"] = [np.array(values, dtype=object).reshape(size).tolist()]
        buttons.append({"label": name, "method": "restyle", "args": [scale]})
    hover, bar = "worker %{y}.%{x}: %{z:.4g}<extra></extra>", {"title": {"side": "right"}}
    (first,) = buttons[0]["args"]
    heat = go.Heatmap({**first, "z": first["z"][0]}, colorscale="Cividis", hovertemplate=hover, colorbar=bar)
    place = {"x": 0, "xanchor": "left", "y": 1, "yanchor": "bottom"}
    menu = {"type": "buttons", "direction": "right", "buttons": buttons, "showactive": False, **place}
    titles = "pipeline", "rank (failed workers are empty)"
    y, x = (
        titled_axis(title, dtick=ceil(count / 16), showgrid=False) for title, count in zip(titles, size, strict=True)
    )
    layout = frame(150 + min(480, 28 * shape.pipelines), 72, BOTTOM)
    return go.Figure(heat, layout | {"xaxis": x, "yaxis": y | {"autorange": "reversed"}, "updatemenus": [menu]})


HOUR = 3600.0
SHORTEST = 1 / 1000
"""Shortest drawn pause as a share of the trace; a shorter one would be thinner than a pixel and hide other lines."""
_BAR = 34


def rates_figure(trace: TraceSummary, systems: Sequence[SystemResult]) -> go.Figure:
    """Return samples per second of each system over the hours of a trace, above the number of live nodes."""
    rates = []
    for place, system in enumerate(system for system in systems if system.fits):
        line = {**_style(place), "shape": "hv"}
        hours, rate = rate_steps(system)
        hover = f"{system.name}: %{{y:.4g}} samples/s from %{{x:.4g}} h"
        rates.append({"x": hours, "y": rate, "name": system.name, "hover": hover, "line": line})
    counts = [count for _, count in trace.alive]
    alive = {
        "x": [time / HOUR for time, _ in trace.alive] + [trace.seconds / HOUR],
        "y": [*counts, counts[-1] if counts else trace.nodes],
        "hover": "%{y} nodes alive from %{x:.4g} h",
        "line": {"color": OPTIMIZER.fill, "shape": "hv"},
        "showlegend": False,
    }
    plots = [
        Plot("samples per second", 260, rates, FROM_ZERO),
        Plot("nodes alive", 100, [alive]),
    ]
    return stacked_figure(plots, "hours").update_layout(LEGEND_ABOVE)


def rate_steps(system: SystemResult) -> tuple[list[float], list[float]]:
    """Return hours and the rate from each hour on, 0 in pauses from `SHORTEST`; the last entry ends the trace."""
    ends = [*(change.time for change in system.timeline[1:]), system.seconds]
    points: list[tuple[float, float]] = []
    for change, end in zip(system.timeline, ends, strict=True):
        pause = min(change.pause, end - change.time)
        if pause < SHORTEST * system.seconds:
            pause = 0.0
        else:
            points.append((change.time, 0.0))
        if change.time + pause < end:
            points.append((change.time + pause, change.rate))
    points += [(system.seconds, rate) for _, rate in points[-1:]]
    return [time / HOUR for time, _ in points], [rate for _, rate in points]


def goodput_figure(trace: TraceSummary, systems: Sequence[SystemResult]) -> go.Figure:
    """Return a bar of committed samples per second per system, with lines for no failures and for the ideal."""
    figure = go.Figure()
    fitting = [system for system in systems if system.fits]
    figure.add_bar(
        orientation="h",
        x=[system.goodput for system in fitting],
        y=[system.name for system in fitting],
        marker={"color": COLOURS[0]},
        texttemplate="%{x:.4g}",
        hovertemplate="%{y}: %{x:.5g} samples/s<extra></extra>",
    )
    scaled = {name: reference.goodput * trace.live for name, reference in trace.references.items()}
    for row, (name, rate) in enumerate(scaled.items()):
        note = {"text": f"{name}, fault-scaled: {rate:.4g}", "yshift": 18 * row, "font": {"size": 11, "color": MUTED}}
        line = {"color": FAILURE, "width": 1.5, "dash": "dash" if row else "solid"}
        figure.add_vline(rate, line=line, annotation={**_NOTE, **note})
    layout = frame(90 + _BAR * len(fitting), 30 + 20 * len(scaled), BOTTOM) | BARS
    return figure.update_layout(layout, xaxis=titled_axis("samples per second", **FROM_ZERO))


def lost_figure(systems: Sequence[SystemResult]) -> go.Figure:
    """Return a bar per system with the share of time that each cause took; the rest was progress."""
    fitting = [system for system in systems if system.fits and system.seconds]
    causes = dict.fromkeys(
        cause for system in fitting for cause, lost in system.lost.items() if lost > 1e-6 * system.seconds
    )
    figure, names = go.Figure(), [system.name for system in fitting]
    for place, cause in enumerate(causes):
        shares = [100 * max(0.0, system.lost.get(cause, 0.0)) / system.seconds for system in fitting]
        hatch = {"shape": SHAPES[place % len(SHAPES)], "fgcolor": PAPER, "size": 6}
        marker, hover = {"color": COLOURS[place % len(COLOURS)], "pattern": hatch}, f"%{{y}} {cause} %{{x:.3g}} %"
        figure.add_bar(
            orientation="h", x=shares, y=names, name=cause, marker=marker, hovertemplate=f"{hover}<extra></extra>"
        )
    layout = frame(116 + _BAR * len(names), 40, BOTTOM) | LEGEND_ABOVE | BARS
    return figure.update_layout(layout, barmode="stack", xaxis=titled_axis("per cent of the time", **FROM_ZERO))
