"""Charts of a run (loss, live workers, iterations, parts of its time) and of a comparison of systems."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import plotly.graph_objects as go

from recycle.runs.report import GenerationChange, RunReport, TimePart
from viz.figures.palette import (
    BACKWARD_WEIGHT,
    CLEAR,
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
from viz.sources import SystemResult, TraceSummary

Mark = tuple[float, str, tuple[str, str]]
"""(position, text or "", (color, dash of the line))."""
EVENTS = {"fault": (FAILURE, "dash"), "rejoined": (RECOVERY, "dash")}
"""Events with a line; the table of events has the others."""
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
"""Color and hatch of each part of the time."""
INTERRUPTIONS = TimePart.REDONE, TimePart.PLANNING, TimePart.FORMING, TimePart.MOVING, TimePart.CHECKPOINTING
"""Parts with a band over the time, in the colors of the bar of parts."""
MAX_TEXTS, LONGEST_TEXT = 24, 26
"""Maximum number of changes with a text, and characters of a text; beyond, only lines are drawn."""
ROWS, ROW = 3, 16
"""Rows of texts above the plots, used in turn against overlaps, and their height in pixels."""
BOTTOM = 44
AXIS: dict[str, Any] = {"gridcolor": GRID, "zeroline": False, "automargin": True}
_NOTE = {"y": 1, "yref": "paper", "yanchor": "bottom", "showarrow": False, "bgcolor": PAPER}


def add_line(
    figure: go.Figure,
    x: Any,
    y: Any,
    name: str,
    hover: str,
    line: Mapping[str, Any],
    mode: str = "lines",
    **options: Any,
) -> None:
    """Add a line of two pixels; `hover` is the template of the hover text."""
    hover += "<extra></extra>"
    figure.add_scatter(x=x, y=y, mode=mode, name=name, line={"width": 2, **line}, hovertemplate=hover, **options)


def add_shares(
    figure: go.Figure, names: Sequence[str], shares: Sequence[float], part: str, fill: tuple[str, str], hover: str
) -> None:
    marker = {"color": fill[0], "pattern": {"shape": fill[1], "fgcolor": PAPER, "size": 6}}
    hover += "<extra></extra>"
    figure.add_bar(orientation="h", x=shares, y=names, name=part, marker=marker, hovertemplate=hover)


def legend_above(y: float, **options: Any) -> dict[str, Any]:
    return {"showlegend": True, "legend": {"orientation": "h", "y": y, "yanchor": "bottom", **options}}


def x_axis(title: str, **options: Any) -> dict[str, Any]:
    return {**AXIS, "title": {"text": title, "standoff": 6}, **options}


def y_axis(title: str, low: float = 0.0, high: float = 1.0, **options: Any) -> dict[str, Any]:
    """Return the vertical axis of a plot that fills a part of the figure's height."""
    return {**AXIS, "title": {"text": title}, "domain": [low, high], **options}


def workers_axis(title: str, high: float, workers: int) -> dict[str, Any]:
    return y_axis(title, 0.0, high, range=[0, workers + 0.6], dtick=max(1, -(-workers // 3)))


def marked_layout(marks: Sequence[Mark], height: int, top: int, xanchor: str = "auto") -> dict[str, Any]:
    """Return layout entries with a line at each mark and its text above, in `ROWS` rows.

    Args:
        height, top: pixels of the figure, and above its plots; `top` and `height` grow by the room for the texts.
    """
    shapes = [_line_at(x, *style) for x, _, style in marks]
    note = {**_NOTE, "xanchor": xanchor, "font": _font(INK)}
    notes = [
        {**note, "x": x, "yshift": ROW * (place % ROWS), "text": text}
        for place, (x, text, _) in enumerate(marks)
        if text
    ]
    return {**frame(height, top + ROW * min(ROWS, len(notes)), BOTTOM), "shapes": shapes, "annotations": notes}


def _line_at(x: float, colour: str, dash: str) -> dict[str, Any]:
    line = {"color": colour, "width": 1.5, "dash": dash}
    return {"type": "line", "x0": x, "x1": x, "y0": 0, "y1": 1, "yref": "paper", "line": line}


def _font(colour: str) -> dict[str, Any]:
    return {"size": 11, "color": colour}


def curves_figure(
    metrics: Sequence[Mapping[str, Any]], events: Sequence[Mapping[str, Any]], worker_count: int
) -> go.Figure:
    """Return two stacked plots over the steps: training and evaluation loss, and live workers."""
    steps = [line["step"] for line in metrics]
    figure = go.Figure()
    add_line(
        figure,
        steps,
        [line.get("loss") for line in metrics],
        "loss",
        "step %{x}: loss %{y:.6g}",
        {"color": FORWARD.fill},
        "lines+markers" if len(steps) <= 60 else "lines",
        marker={"size": 5},
    )
    evaluated = [line for line in metrics if line.get("eval_loss") is not None]
    if evaluated:
        add_line(
            figure,
            [line["step"] for line in evaluated],
            [line["eval_loss"] for line in evaluated],
            "evaluation loss",
            "after step %{x}: evaluation loss %{y:.6g}",
            {"color": BACKWARD_WEIGHT.fill, "dash": "dot"},
            "lines+markers",
            marker={"size": 8, "symbol": "diamond"},
        )
    alive = [line.get("live_workers") for line in metrics]
    style = {"color": OPTIMIZER.fill, "shape": "hvh"}
    add_line(figure, steps, alive, "live workers", "step %{x}: %{y} live workers", style, yaxis="y2")
    marks = [
        (event["step"], event_text(event), EVENTS[event["kind"]])
        for event in events
        if event.get("kind") in EVENTS and isinstance(event.get("step"), int | float)
    ]
    figure.update_layout(
        **marked_layout(marks, 314 + ROW * min(ROWS, len(marks)), 14),
        uirevision="curves",  # keeps the zoom when a live run is redrawn
        xaxis=x_axis("step", anchor="y2", tickformat="d"),
        yaxis=y_axis("loss", 0.36),
        yaxis2=workers_axis("live workers", 0.26, worker_count),
    )
    return figure


def event_text(event: Mapping[str, Any]) -> str:
    """Return `1.1 failed`, `1.1 back`, or the worker and the kind for other events."""
    words = {"fault": "failed", "rejoined": "back"}
    kind = str(event.get("kind"))
    struck = re.match("(nan|slow)[=:]", str(event.get("fault")))
    if kind == "fault" and struck:
        kind = struck[1]
    if kind == "fault" and str(event.get("fault")).startswith("drain"):
        kind = "asked to leave"
    return " ".join(str(part) for part in (event.get("worker"), words.get(kind, kind)) if part)


def over_time_figure(report: RunReport, metrics: Sequence[Mapping[str, Any]], workers: int) -> go.Figure:
    """Return four stacked plots over the seconds since the run's start, with a band for each interruption."""
    times = [line["time"] for line in metrics]
    steps = [line["step"] for line in metrics]
    step_seconds = dict.fromkeys(steps, 0.0)
    for span in report.spans:
        if span.step in step_seconds and span.part is not TimePart.EVALUATING:
            step_seconds[span.step] += span.seconds
    figure = go.Figure()
    rows: tuple[tuple[str, str, list[Any], str, str], ...] = (
        ("y", "seconds", [step_seconds[step] for step in steps], FORWARD.fill, "%{y:.4g} s"),
        ("y2", "tokens/s", [line.get("tokens_per_second") for line in metrics], RECOVERY, "%{y:,.0f} tokens/s"),
        ("y3", "loss", [line.get("loss") for line in metrics], BACKWARD_WEIGHT.fill, "loss %{y:.6g}"),
        ("y4", "live workers", [line.get("live_workers") for line in metrics], OPTIMIZER.fill, "%{y} live workers"),
    )
    for place, name, values, colour, hover in rows:
        style = {"color": colour, "shape": "vh" if place == "y4" else "linear"}
        mode = "lines+markers" if len(steps) <= 120 and place != "y4" else "lines"
        hover = f"step %{{customdata}}, %{{x:.2f}} s: {hover}"
        add_line(figure, times, values, name, hover, style, mode, customdata=steps, marker={"size": 4}, yaxis=place)
    layout = marked_layout([_mark(change, len(report.changes)) for change in report.changes], 620, 20, "left")
    edges = {"y0": 0, "y1": 1, "yref": "paper", "line": {"width": 0}, "layer": "below", "opacity": 0.3, "type": "rect"}
    layout["shapes"] += [
        {**edges, "x0": span.start, "x1": span.end, "fillcolor": FILLS[span.part][0]}
        for span in report.spans
        if span.part in INTERRUPTIONS and span.seconds > SHORTEST * report.wall
    ]
    figure.update_layout(
        **layout,
        uirevision="over-time",  # keeps the zoom when a live run is redrawn
        xaxis=x_axis("seconds since the start", anchor="y4", rangemode="tozero"),
        yaxis=y_axis("iteration, s", 0.76, rangemode="tozero"),
        yaxis2=y_axis("tokens/s", 0.5, 0.71, rangemode="tozero"),
        yaxis3=y_axis("loss", 0.24, 0.45),
        yaxis4=workers_axis("workers", 0.19, workers),
    )
    return figure


def _mark(change: GenerationChange, count: int) -> Mark:
    text = change.what if len(change.what) <= LONGEST_TEXT else f"{change.what[: LONGEST_TEXT - 1]}…"
    return change.time, text if count <= MAX_TEXTS else "", MARKS[change.kind]


def parts_figure(report: RunReport) -> go.Figure:
    figure = go.Figure()
    wall = report.wall or 1.0
    for part, seconds in report.parts.items():
        if seconds >= 1e-4 * wall:
            hover = f"{part.value}: {seconds:.3f} s, %{{x:.3g}} %"
            add_shares(figure, [""], [100 * seconds / wall], part.value, FILLS[part], hover)
    figure.update_layout(
        frame(150, 40, BOTTOM) | legend_above(1.05, traceorder="normal"),
        barmode="stack",
        xaxis=x_axis("per cent of the time", range=[0, 100]),
        yaxis={"showticklabels": False},
    )
    return figure


COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#8C8C8C")
DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot")
"""Dashes distinguish lines besides color; texts distinguish bars."""
SHAPES = ("", "/", "x", "-", "\\", "|", "+", ".")


def period_curves_figure(
    title: str, values: Sequence[float], periods: Mapping[str, Sequence[float]], mark: float | None
) -> go.Figure:
    """Return the period of each timeline over the values of one time, with a line at `mark`."""
    figure = go.Figure()
    for place, (name, seconds) in enumerate(periods.items()):
        line = {"color": COLOURS[place % len(COLOURS)], "dash": DASHES[place % len(DASHES)]}
        add_line(figure, values, seconds, name, f"{name}: period %{{y:.6g}} at %{{x:.4g}}", line)
    shapes = [] if mark is None else [_line_at(mark, FAILURE, "dot")]
    figure.update_layout(
        frame(240 + 12 * len(periods), 8, BOTTOM) | {"showlegend": True},
        legend={"orientation": "h", "y": -0.3, "yanchor": "top", "font": {"size": 10.5}},
        shapes=shapes,
        uirevision=title,
        xaxis=x_axis(title),
        yaxis=y_axis("period"),
    )
    return figure


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
    figure.update_layout(
        frame(340, 30, BOTTOM),
        xaxis=x_axis("period, in the unit of the times"),
        yaxis=y_axis(memory_title, rangemode="tozero"),
    )
    return figure


HOUR = 3600.0
SHORTEST = 1 / 1000
"""Shortest drawn pause as a share of the trace; a shorter one would be thinner than a pixel and hide other lines."""
_BAR = 34


def rates_figure(trace: TraceSummary, systems: Sequence[SystemResult]) -> go.Figure:
    """Return samples per second of each system over the hours of a trace, above the number of live nodes."""
    figure = go.Figure()
    for place, system in enumerate(system for system in systems if system.fits):
        line = {"color": COLOURS[place % len(COLOURS)], "dash": DASHES[place % len(DASHES)], "shape": "hv"}
        add_line(
            figure, *rate_steps(system), system.name, f"{system.name}: %{{y:.4g}} samples/s from %{{x:.4g}} h", line
        )
    hours = [time / HOUR for time, _ in trace.alive] + [trace.seconds / HOUR]
    alive = [count for _, count in trace.alive] + [trace.alive[-1][1] if trace.alive else trace.nodes]
    line, hover = {"color": OPTIMIZER.fill, "shape": "hv"}, "%{y} nodes alive from %{x:.4g} h"
    add_line(figure, hours, alive, "", hover, line, yaxis="y2", showlegend=False)
    figure.update_layout(
        frame(440, 30, BOTTOM) | legend_above(1.02),
        xaxis=x_axis("hours", anchor="y2"),
        yaxis=y_axis("samples per second", 0.34, rangemode="tozero"),
        yaxis2=y_axis("nodes alive", 0.0, 0.24),
    )
    return figure


def rate_steps(system: SystemResult) -> tuple[list[float], list[float]]:
    """Return hours and the rate from each hour on, 0 in pauses from `SHORTEST`; the last entry ends the trace."""
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
    """Return a bar of committed samples per second per system, with lines for no failures and for the ideal."""
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
        shapes.append(_line_at(scaled, FAILURE, "dash" if row else "solid"))
        text = f"{name}, fault-scaled: {scaled:.4g}"
        notes.append(
            {**_NOTE, "bgcolor": CLEAR, "x": scaled, "y": 1, "yshift": 18 * row, "text": text, "font": _font(MUTED)}
        )
    figure.update_layout(
        **frame(90 + _BAR * len(systems), 30 + 20 * len(notes), BOTTOM),
        xaxis=x_axis("samples per second", rangemode="tozero"),
        yaxis={"autorange": "reversed", "automargin": True},
        shapes=shapes,
        annotations=notes,
    )
    return figure


def lost_figure(systems: Sequence[SystemResult]) -> go.Figure:
    """Return a bar per system with the share of time that each cause took; the rest was progress."""
    figure = go.Figure()
    fitting = [system for system in systems if system.fits and system.seconds]
    causes = {cause: None for system in fitting for cause, lost in system.lost.items() if lost > 1e-6 * system.seconds}
    names = [system.name for system in fitting]
    for place, cause in enumerate(causes):
        shares = [100 * max(0.0, system.lost.get(cause, 0.0)) / system.seconds for system in fitting]
        fill = COLOURS[place % len(COLOURS)], SHAPES[place % len(SHAPES)]
        add_shares(figure, names, shares, cause, fill, f"%{{y}}: {cause} %{{x:.3g}} %")
    figure.update_layout(
        frame(110 + _BAR * len(fitting), 30, BOTTOM) | legend_above(1.02, traceorder="normal"),
        barmode="stack",
        xaxis=x_axis("share of the time, in per cent"),
        yaxis={"autorange": "reversed", "automargin": True},
    )
    return figure
