"""How much later each instruction starts in the second of two iterations: as a chart over the time of the first one,
the delta lane, and as what the browser colours lanes by.

Up to `POINTS` instructions of the chart are points that differ by shape as well as by colour; of more, the least and
the most of each of `BINS` stretches of time are drawn. The browser gets one float32 per operation, NaN where the other
timeline has no such instruction, once per content; which of the five shades an operation takes follows from two lengths
of time that go with the address.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import numpy as np
import numpy.typing as npt
import plotly.graph_objects as go

from recycle.ir.kinds import per_kind
from recycle.ir.simulate import TOLERANCE, Timeline
from viz.analysis.differences import Matches, is_weight_half
from viz.figures.palette import BACKWARD_WEIGHT, FORWARD, GRID, INK, PAINTS, RULE, SHADES, frame, paint_named
from viz.kinds import look_of
from viz.lane_cache import BoundedCache, content_hash
from viz.lanes import LaneTable
from viz.numbers import TimeUnit, signed

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
    title = "time in the first" + unit.suffix
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


LATE = 0.01
"""Share of the first one's makespan from which a start counts as another."""
MOST_BYTES = 100_000_000


def edges_of(first: Timeline, matches: Matches) -> tuple[float, float]:
    """Two shades either way: up to half of the largest difference, and beyond; in the unit of the timelines."""
    some = LATE * first.makespan
    return some, max(some, float(np.abs(matches.delta).max(initial=0.0)) / 2)


def later(table: LaneTable, matches: Matches) -> npt.NDArray[np.float32]:
    """How much later each operation of `table`, the second one's lanes, starts than in the first; NaN: not there."""
    rows = int(max(table.instruction_id.max(initial=0), matches.second.max(initial=0))) + 1
    of_row = np.full(rows, np.nan, dtype=np.float32)
    of_row[matches.second] = matches.delta
    return of_row[table.instruction_id]


class Shades:
    """Differences by the hash of their bytes; the last ones stay. Safe to use from several threads."""

    def __init__(self) -> None:
        self._kept: BoundedCache[str, bytes] = BoundedCache(MOST_BYTES, len)

    def put(self, differences: npt.NDArray[np.float32]) -> str:
        """Keep them and return where the browser finds them."""
        content = differences.astype("<f4").tobytes()
        digest = content_hash(content)
        self._kept.put(digest, content)
        return f"shades/{digest}.bin"

    def get(self, digest: str) -> bytes | None:
        """The bytes of that hash, None where they are no longer kept."""
        return self._kept.get(digest)


def for_canvas(address: str, edges: tuple[float, float], title: str) -> dict[str, Any]:
    """What the canvas needs to colour by: where the differences are, against what, and the shades."""
    return {"address": address, "edges": edges, "title": title, "paints": [asdict(paint) for paint in SHADES]}
