"""Choices and results of comparisons, in tables and sentences.

If an executed step is compared, plans are scaled to seconds: by a profile in seconds, else by the executed work.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt
from dash import html

from recycle.errors import RecycleError
from viz.analysis.differences import (
    PART_TITLES,
    Divergence,
    Matches,
    align,
    durations,
    first_order_divergence,
    first_start_difference,
    match,
    scale_timeline,
    split,
)
from viz.details import figures_table
from viz.figures.palette import SHADES
from viz.lane_cache import TimedLanes
from viz.lanes import LaneTable
from viz.numbers import TimeUnit, signed, signed_percent, time_unit
from viz.pages import parts
from viz.pages.panels import kind_name
from viz.run import Choices, Run
from viz.scenario import AS_GIVEN, PageModel, Scenario
from viz.sources import Place, Source

LATE = 0.01
"""Share of the first makespan beyond which starts count as different."""
MAX_KINDS = 96
PARTS_CAPTION = (
    "Mean over the live workers: each is at work or waits for something at every moment, so the parts add up to the"
    " makespan and their differences to the difference. Memory limits count where they are known."
)
LaneArrangement = Literal["stacked", "interleaved"]


def choices(sources: Sequence[Source]) -> Choices:
    return dict(choice for place, source in enumerate(sources) for choice in source.choices(place).items())


def first_choice(sources: Sequence[Source]) -> list[str]:
    """Return the keys compared at first: the first two files, or a run's most notable step and its plan."""
    keys = list(choices(sources))
    files = [key for key in keys if key.startswith("file/")]
    if len(files) >= 2:
        return files[:2]
    pairs = (source.suggested_choices(place) for place, source in enumerate(sources) if isinstance(source, Run))
    return next(filter(None, pairs), keys[:2])


class ComparedPair(NamedTuple):
    """The first timeline, and one that is compared with it."""

    first: TimedLanes
    second: TimedLanes
    matches: Matches

    @property
    def is_matched(self) -> bool:
        return len(self.matches.first) > 0

    @property
    def edges(self) -> tuple[float, float]:
        """Bounds of the shades either way, in the timelines' unit: smallest difference, half of the largest."""
        smallest = LATE * self.first.timeline.makespan
        return smallest, max(smallest, float(np.abs(self.matches.delta).max(initial=0.0)) / 2)

    @property
    def deltas(self) -> npt.NDArray[np.float32]:
        """Delay of each operation of the second timeline against the first; NaN without a match."""
        table, matches = self.second.table, self.matches
        delta_of_row = np.full(len(self.second.timeline.start), np.nan, dtype=np.float32)
        delta_of_row[matches.second] = matches.delta
        return delta_of_row[table.instruction_id]


_UNMATCHED = "{} cuts the model into other stages than the first, so their instructions are not matched."


class Comparison(NamedTuple):
    """The timelines of a comparison, each compared with the first, on one axis."""

    timelines: list[TimedLanes]
    pairs: list[ComparedPair]
    notes: list[str]

    @classmethod
    def of_keys(
        cls,
        sources: Sequence[Source],
        keys: Sequence[str],
        model: PageModel,
        scenario: Scenario = AS_GIVEN,
    ) -> Comparison:
        """Put the timelines of `keys` under a scenario on one clock, and compare each with the first.

        Raises RecycleError if a key is unknown or its plan has no timeline, and as `align_clocks` does.
        """
        available = choices(sources)
        for key in keys:
            if key not in available:
                raise RecycleError(f"compare: {key!r} is not one of the timelines that can be compared")
        timelines = []
        for title, make in map(available.__getitem__, keys):
            given = make()
            if given is None or given.context is None:
                raise RecycleError(f"{title}: cannot be timed")
            entry = model.entry(given, scenario)
            timelines.append(replace(entry, title=title, seconds_per_unit=given.seconds_per_unit))
        timelines, notes = align_clocks(timelines)
        first, *others = timelines
        pairs = [ComparedPair(first, other, match(first.timeline, other.timeline)) for other in others]
        notes += [
            _UNMATCHED.format(other.title) for other, pair in zip(others, pairs, strict=True) if not pair.is_matched
        ]
        return cls(timelines, pairs, notes)

    @property
    def tables(self) -> list[LaneTable]:
        return [item.table for item in self.timelines]

    @property
    def span(self) -> float:
        return max(table.span for table in self.tables)

    @property
    def unit(self) -> TimeUnit:
        return time_unit(self.tables[0], self.span)

    @property
    def is_same_workers(self) -> bool:
        """Whether lane i is the same worker in all timelines, so that lanes can be stacked."""
        return all(table.workers == self.tables[0].workers for table in self.tables)


def align_clocks(timelines: Sequence[TimedLanes]) -> tuple[list[TimedLanes], list[str]]:
    """Return (the timelines on one clock, a line for each that was scaled or checked).

    Raises RecycleError if the clocks of an executed step contradict each other, or it ran another plan.
    """
    executed = next((item for item in timelines if item.known_context.executed), None)
    if executed is None:
        return list(timelines), []
    aligned, notes = [], []
    for item in timelines:
        if item.known_context.executed:
            clocks = item.timeline.clocks
            if clocks is not None and clocks.conflict:
                raise RecycleError(f"{item.title}: {clocks}")
            notes.append(f"{item.title}: from its first start; {clocks}.")
            aligned.append(item)
            continue
        scale, method = align(item.timeline, executed.timeline, item.seconds_per_unit)
        notes.append(f"{item.title}: 1 unit = {scale:.4g} s; {method}.")
        timeline = scale_timeline(item.timeline, scale)
        lanes = LaneTable.from_timeline(timeline, "s")
        aligned.append(TimedLanes(lanes, replace(item.known_context, timeline=timeline, plan=None), title=item.title))
    return aligned, notes


def figures(comparison: Comparison) -> html.Div:
    is_executed = any(item.known_context.executed for item in comparison.timelines)
    lengths = [item.timeline.makespan if is_executed else item.timeline.period for item in comparison.timelines]
    differences = [length / lengths[0] - 1 if lengths[0] else 0.0 for length in lengths]
    against = [None, *("the same" if abs(share) < 5e-4 else signed_percent(share) for share in differences[1:])]
    live_workers = [len(item.timeline.schedule.live) for item in comparison.timelines]
    head, rows = figures_table([(item.title, item.context) for item in comparison.timelines], comparison.unit)
    rows.append([f"{'makespan' if is_executed else 'period'} against the first", *against])
    return parts.table(head, [*rows, ["live workers", *live_workers]])


def difference(comparison: Comparison, pair: ComparedPair, arrangement: LaneArrangement) -> html.Section:
    """Build the parts of the difference of the makespans, and the points of divergence."""
    a, b, unit, matches = pair.first.timeline, pair.second.timeline, comparison.unit, pair.matches
    first, second = (split(each.timeline, each.known_context.limits) for each in (pair.first, pair.second))
    times = [(title, first[part], second[part]) for part, title in PART_TITLES.items() if first[part] or second[part]]
    rows = [
        [title, before * unit.scale, after * unit.scale, signed((after - before) * unit.scale)]
        for title, before, after in [*times, ("makespan", a.makespan, b.makespan)]
    ]
    moved_count, missing = int(matches.moved.sum()), (len(matches.only_first), len(matches.only_second))
    words, divergences = _UNMATCHED.format(pair.second.title), []
    if pair.is_matched:
        words = f"{len(matches.first):,} instructions are in both"
        words += f", {moved_count:,} of them on another worker" if moved_count else ""
        words += f"; {missing[0]:,} only in the first, {missing[1]:,} only in the second." if any(missing) else "."
        for title, divergence in (
            ("First difference", first_order_divergence(a, b)),
            ("First difference of starts", first_start_difference(a, b, matches, LATE * a.makespan, unit)),
        ):
            if divergence is not None:
                lane, graph = place_of(comparison, pair, divergence, arrangement)
                show = parts.show_button([lane], f"{title}: show it in the lanes", data_graph=graph)
                text = f"{divergence.text}, at {unit.text(divergence.time)} "
                divergences.append(html.Li([html.Strong(f"{title}: "), text, show]))
        divergences = divergences or [html.Li("Both run the same instructions at the same times.")]
    return parts.card(
        f"{pair.second.title} against {pair.first.title}",
        html.P(words, className="says"),
        html.Ul(divergences, className="says"),
        parts.table((f"per live worker{unit.suffix}", "first", "second", "difference"), rows),
        caption=PARTS_CAPTION,
    )


def instruction_times(comparison: Comparison, pair: ComparedPair) -> html.Section:
    """Build a table of how long the matched instructions of each kind and stage take."""
    rows, *seconds = durations(pair.first.timeline, pair.second.timeline, pair.matches)
    first, second = (each * comparison.unit.scale for each in seconds)
    columns, unit = pair.second.timeline.schedule.columns, comparison.unit.suffix
    cells = []
    for kind, stage in sorted(set(zip(columns.kind[rows].tolist(), columns.stage[rows].tolist(), strict=True))):
        own = (columns.kind[rows] == kind) & (columns.stage[rows] == stage)
        quantiles = [np.quantile(first[own], 0.5), *np.quantile(second[own], [0.5, 0.99])]
        name = f"{kind_name(kind)} of stage {stage}"
        cells.append([name, int(own.sum()), *map(float, quantiles), float(second[own].sum() - first[own].sum())])
    head = ("", "count", f"first, p50{unit}", f"second, p50{unit}", f"p99{unit}", f"longer in all{unit}")
    title = f"Times of instructions in {pair.second.title}"
    return parts.card(title, parts.table(head, cells[:MAX_KINDS], "sortable"))


def place_of(
    comparison: Comparison, pair: ComparedPair, divergence: Divergence, arrangement: LaneArrangement
) -> tuple[Place, int]:
    """Return the place of a divergence, and the index of its timeline in the block."""
    is_in_first = divergence.first >= 0
    graph = 0 if is_in_first else 1 + comparison.pairs.index(pair)
    timeline, row = comparison.timelines[graph].timeline, divergence.first if is_in_first else divergence.second
    lane = timeline.schedule.shape.worker_index(timeline.schedule.position(row)[0])
    if arrangement == "interleaved" and comparison.is_same_workers:
        lane, graph = lane * len(comparison.tables) + graph, 0
    return (lane, float(timeline.start[row]), float(timeline.end[row])), graph


def shade_legend(pair: ComparedPair, comparison: Comparison) -> html.Ul:
    """Build the legend of a timeline's shades, with their durations."""
    small, large = (f"over {comparison.unit.amount(length)}" for length in pair.edges)
    earlier, later = (f"{large} earlier «", f"{small} earlier ‹"), (f"{small} later ›", f"{large} later »")
    named = zip(SHADES, (*earlier, "the same", *later, "only here *"), strict=True)
    title = html.Li(html.Strong(f"{pair.second.title}, against {pair.first.title}"))
    return html.Ul([title, *(parts.swatch(text, "", paint.fill) for paint, text in named)], className="legend")
