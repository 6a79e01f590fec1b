"""Choices and results of comparisons, in tables and sentences.

If an executed step is compared, all timelines use its clock: plans are scaled to seconds, by the job's profile if it is
in seconds, else by the executed work. All times are in the unit of that axis.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt
from dash import html

from recycle.errors import RecycleError
from viz.analysis.differences import (
    Divergence,
    Matches,
    align,
    first_late,
    first_order_divergence,
    is_weight_half,
    match,
    require_one_clock,
    scaled,
    shares,
    split,
)
from viz.details import figures_beside
from viz.figures.palette import SHADES
from viz.lane_cache import Explainer, Operand
from viz.lanes import LaneTable
from viz.numbers import TimeUnit, signed, signed_percent, time_unit
from viz.pages import parts
from viz.run import Run
from viz.sources import Place, ScheduleFile

LATE = 0.01
"""Share of the first makespan beyond which starts count as different."""
DIFFERENCES_SHOWN = 12
LaneArrangement = Literal["stacked", "interleaved"]
Source = Run | ScheduleFile


def choices(sources: Sequence[Source]) -> dict[str, tuple[str, Callable[[str], Operand]]]:
    """Return the choices of some sources: key -> (title, function from title to operand)."""
    return dict(choice for place, source in enumerate(sources) for choice in source.choices(place).items())


def first_choice(sources: Sequence[Source]) -> list[str]:
    """Return the keys compared at first: the first two files, or a run's most notable step and its plan."""
    suggested = [source.suggested(place) for place, source in enumerate(sources)]
    files = [keys[0] for keys in suggested if len(keys) == 1]
    pairs = [keys for keys in suggested if len(keys) > 1]
    if len(files) >= 2 or not pairs:
        return files[:2] if len(files) >= 2 else list(choices(sources))[:2]
    return pairs[0]


class ComparedPair(NamedTuple):
    """The first operand, and one that is compared with it."""

    first: Operand
    second: Operand
    matches: Matches

    @property
    def edges(self) -> tuple[float, float]:
        """Bounds of the shades either way, in the timelines' unit: smallest difference, half of the largest."""
        some = LATE * self.first.timeline.makespan
        return some, max(some, float(np.abs(self.matches.delta).max(initial=0.0)) / 2)

    @property
    def deltas(self) -> npt.NDArray[np.float32]:
        """Delay of each operation of the second timeline against the first; NaN without a match."""
        table, matches = self.second.lanes, self.matches
        rows = int(max(table.instruction_id.max(initial=0), matches.second.max(initial=0))) + 1
        of_row = np.full(rows, np.nan, dtype=np.float32)
        of_row[matches.second] = matches.delta
        return of_row[table.instruction_id]

    def divergences(self, unit: TimeUnit) -> list[tuple[str, Divergence]]:
        """Return the first point where a worker runs other instructions, and the first differing start."""
        a, b = self.first.timeline, self.second.timeline
        found = [
            ("First difference", first_order_divergence(a, b)),
            ("First difference of starts", first_late(a, b, self.matches, LATE * a.makespan, unit)),
        ]
        return [(title, one) for title, one in found if one is not None]


class ComparedTimelines(NamedTuple):
    """The operands of a comparison, each compared with the first, on one axis."""

    operands: list[Operand]
    pairs: list[ComparedPair]
    notes: list[str]

    @classmethod
    def of(cls, sources: Sequence[Source], keys: Sequence[str]) -> ComparedTimelines:
        """Put the operands of `keys` on one clock, and compare each with the first.

        Raises:
            RecycleError: a key is unknown, or its operand has no timeline; or as in `on_one_axis`.
        """
        known = choices(sources)
        for key in keys:
            if key not in known:
                raise RecycleError(f"compare: {key!r} is not there to be compared")
        operands, notes = on_one_axis([make(title) for title, make in map(known.__getitem__, keys)])
        first, *others = operands
        pairs = [ComparedPair(first, other, match(first.timeline, other.timeline)) for other in others]
        return cls(operands, pairs, notes)

    @property
    def tables(self) -> list[LaneTable]:
        return [operand.lanes for operand in self.operands]

    @property
    def span(self) -> float:
        """Length of the time axis."""
        return max(table.span for table in self.tables)

    @property
    def unit(self) -> TimeUnit:
        """Unit of the time axis."""
        return time_unit(self.tables[0], self.span)

    @property
    def is_same_workers(self) -> bool:
        """Whether lane i is the same worker in all timelines, so that lanes can be stacked."""
        return all(table.workers == self.tables[0].workers for table in self.tables)


def on_one_axis(operands: Sequence[Operand]) -> tuple[list[Operand], list[str]]:
    """Return (the operands on one clock, a line for each operand that was scaled or checked).

    Raises RecycleError if the clocks of an executed step contradict each other, or it ran another plan.
    """
    ran = next((operand for operand in operands if operand.explainer.executed), None)
    if ran is None:
        return list(operands), []
    aligned, notes = [], []
    for operand in operands:
        if operand.explainer.executed:
            checked, uncertainty = require_one_clock(operand.timeline)
            notes.append(f"{operand.title}: from its first start. {_checked(checked, uncertainty)}")
            aligned.append(operand)
            continue
        scale, method = align(operand.timeline, ran.timeline, operand.seconds_per_unit)
        notes.append(f"{operand.title}: 1 unit = {scale:.4g} s; {method}.")
        timeline = scaled(operand.timeline, scale)
        lanes = replace(LaneTable.from_timeline(timeline), unit="s")
        aligned.append(Operand(operand.title, Explainer(timeline, limits=operand.explainer.limits), lanes))
    return aligned, notes


def _checked(transfers: int, uncertainty: float) -> str:
    if not transfers:
        return "No transfer is in it, so nothing can be said of its workers' clocks."
    return (
        f"Of {transfers:,} transfers none was used before it was sent; clocks may disagree by up to"
        f" {1000 * uncertainty:.3g} ms undetected."
    )


def figures(compared: ComparedTimelines) -> html.Div:
    """Build a table of figures side by side, with the relative differences from the first."""
    first = compared.operands[0].timeline.makespan
    more = [operand.timeline.makespan / first - 1 if first else 0.0 for operand in compared.operands]
    against = [None, *("the same" if abs(share) < 5e-4 else signed_percent(share) for share in more[1:])]
    live = [len(operand.timeline.schedule.live) for operand in compared.operands]
    head, rows = figures_beside([(each.title, each.explainer) for each in compared.operands], compared.unit)
    return parts.table(head, [*rows, ["against the first", *against], ["live workers", *live]])


def difference(compared: ComparedTimelines, pair: ComparedPair, arrangement: LaneArrangement) -> html.Section:
    """Build the parts of the difference of the makespans, and the points of divergence."""
    a, b, unit = pair.first.timeline, pair.second.timeline, compared.unit
    rows: list[list[parts.Cell]] = [
        [share.title, share.first * unit.scale, share.second * unit.scale, signed(share.difference * unit.scale)]
        for share in shares(split(a, pair.first.explainer.limits), split(b, pair.second.explainer.limits))
        if share.first or share.second
    ]
    total = (b.makespan - a.makespan) * unit.scale
    rows.append(["makespan", a.makespan * unit.scale, b.makespan * unit.scale, signed(total)])
    moved, missing = int(pair.matches.moved.sum()), (len(pair.matches.only_first), len(pair.matches.only_second))
    words = f"{len(pair.matches.first):,} instructions are in both"
    words += f", {moved:,} of them on another worker" if moved else ""
    words += f"; {missing[0]:,} only in the first, {missing[1]:,} only in the second." if any(missing) else "."
    divergences = []
    for title, one in pair.divergences(unit):
        lane, graph = place_of(compared, pair, one, arrangement)
        show = parts.show_button([lane], f"{title}: show it in the lanes", graph)
        divergences.append(html.Li([html.Strong(f"{title}: "), f"{one.text}, at {unit.text(one.time)} ", show]))
    return parts.card(
        f"{pair.second.title} against {pair.first.title}",
        html.P(words, className="says"),
        html.Ul(divergences, className="says") if divergences else html.P("They do the same at the same times."),
        parts.table((f"per live worker{unit.suffix}", "first", "second", "difference"), rows),
        caption=(
            "Mean over the live workers: each is at work or waits for something at every moment, so the parts add"
            " up to the makespan and their differences to the difference. Memory limits count where they are"
            " known."
        ),
    )


def largest(compared: ComparedTimelines, pair: ComparedPair) -> html.Details:
    """Build the table of the instructions with the largest differences of starts."""
    a, b, matches, unit = pair.first.timeline, pair.second.timeline, pair.matches, compared.unit
    order = np.argsort(-np.abs(matches.delta), kind="stable")[:DIFFERENCES_SHOWN]
    rows: list[list[parts.Cell]] = []
    is_half = is_weight_half(a, matches)
    for place in order.tolist():
        row, other = int(matches.first[place]), int(matches.second[place])
        rows.append(
            [
                f"{a.schedule.instruction(row)}{' (weight half)' if is_half[place] else ''}",
                str(a.schedule.position(row)[0]),
                str(b.schedule.position(other)[0]),
                unit.text(float(matches.time[place])),
                unit.text(float(matches.time[place] + matches.delta[place])),
                signed(float(matches.delta[place]) * unit.scale),
            ]
        )
    head = (
        "instruction",
        "worker",
        "worker in the second",
        "starts",
        "starts in the second",
        f"difference{unit.suffix}",
    )
    title = f"Largest differences of {pair.second.title}"
    return html.Details([html.Summary(title), parts.table(head, rows)], className="card")


def place_of(
    compared: ComparedTimelines, pair: ComparedPair, one: Divergence, arrangement: LaneArrangement
) -> tuple[Place, int]:
    """Return the place of a divergence, and the index of its timeline in the block."""
    graph = 0 if one.first >= 0 else 1 + compared.pairs.index(pair)
    timeline, row = compared.operands[graph].timeline, one.first if one.first >= 0 else one.second
    lane = timeline.schedule.shape.worker_index(timeline.schedule.position(row)[0])
    if arrangement == "interleaved" and compared.is_same_workers:
        lane, graph = lane * len(compared.tables) + graph, 0
    return (lane, float(timeline.start[row]), float(timeline.end[row])), graph


def shade_legend(pair: ComparedPair, compared: ComparedTimelines) -> html.Ul:
    """Build the legend of a timeline's shades, with their durations."""
    some, much = (compared.unit.amount(length) for length in pair.edges)
    words = (
        f"over {much} earlier «",
        f"over {some} earlier ‹",
        "the same",
        f"over {some} later ›",
        f"over {much} later »",
    )
    entries = [html.Li(html.Strong(f"{pair.second.title}, against {pair.first.title}"))]
    for paint, text in zip(SHADES, (*words, "only here *"), strict=True):
        entries.append(html.Li([html.Span(className="swatch", style={"background": paint.fill}), text]))
    return html.Ul(entries, className="legend")
