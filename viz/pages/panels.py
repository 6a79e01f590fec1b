"""Content of the common panels about the current timeline: explanation, range in view, workers, search results.

Answers are functions of the browser's request and the lane cache's entry: a timeline's table and context.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import isfinite
from typing import Any

import numpy as np
from dash import html

from recycle.ir.gaps import Gap, GapCause, Gaps
from recycle.ir.instruction import AsyncInstruction, is_kind
from recycle.ir.kinds import KIND_CLASSES
from recycle.ir.simulate import TOLERANCE
from viz.analysis.bubbles import IDLE_TITLES, instruction_name, range_statistics, reroutings
from viz.details import PEAK, figures as figures_of, memory_of_workers
from viz.figures.charts import workers_figure
from viz.figures.palette import FAILURE, paint_named
from viz.kinds import is_schedule_work, look_of, mark_text
from viz.lane_cache import TimedLanes, TimelineContext
from viz.numbers import PLACE_DIGITS, percent, short
from viz.pages import parts
from viz.sources import Place

MAX_BUBBLES_LISTED, MAX_HITS, MAX_WORKERS, MAX_PLACES = 12, 40, 64, 12


def critical_path(entry: TimedLanes, context: TimelineContext) -> html.Section:
    timeline, unit = context.timeline, entry.unit
    rows = np.array(timeline.critical_path, dtype=np.int64)
    kinds, seconds = timeline.schedule.columns.kind[rows], (timeline.end - timeline.start)[rows]
    spent = {kind_name(kind): float(seconds[kinds == kind].sum()) for kind in np.unique(kinds).tolist()}
    spent["between instructions"] = timeline.makespan - sum(spent.values())
    words = [
        f"{name} {unit.amount(time)}"
        for name, time in sorted(spent.items(), key=lambda item: -item[1])
        if time > timeline.makespan * TOLERANCE
    ]
    free = ""
    if context.slack is not None:
        work = is_schedule_work(timeline.schedule.columns.kind)
        critical = int((context.slack[work] <= timeline.makespan * TOLERANCE).sum())
        free = f" {critical:,} of {int(work.sum()):,} instructions are critical: delaying one delays the iteration."
    caption = f"One chain of waits over the makespan of {unit.text(timeline.makespan)}; key p draws it.{free}"
    return parts.card("Critical path", parts.chips(words), caption=caption)


def longest_bubbles(entry: TimedLanes, context: TimelineContext) -> html.Section:
    groups = alike(context.bubbles.gaps)
    if not groups:
        return parts.card("Bubbles", html.P("No worker is idle before its program ends."))
    unit = entry.unit
    rows = []
    for gap, count in groups:
        show = parts.show_button([place_of(entry, gap)])
        worker_text = f"{gap.worker}, and {count - 1} similar on its rank" if count > 1 else str(gap.worker)
        reason = html.Div(context.bubbles.reason(gap, unit))
        rows.append([worker_text, html.Div([html.Strong(IDLE_TITLES[gap.cause]), reason]), show])
    return parts.card("Longest bubbles", parts.table(("worker", "cause", ""), rows, "findings"))


def place_of(entry: TimedLanes, gap: Gap) -> Place:
    return entry.table.shape.worker_index(gap.worker), gap.start, gap.end


def time_card(
    entry: TimedLanes, context: TimelineContext, begin: float = 0.0, end: float | None = None
) -> html.Section:
    """Build the time of a range as a waterfall: work by kind, then idle time by part, each with its longest gap."""
    unit = entry.unit
    end = context.timeline.makespan if end is None else end
    statistics = range_statistics(context.timeline, context.bubbles.gaps, begin, end)
    bars: list[tuple[str, str, float, Gap | None]] = []
    for kind, seconds in sorted(statistics.work.items(), key=lambda item: -item[1]):
        paint = paint_named(look_of(KIND_CLASSES[kind]).paints[0])
        bars.append((kind_name(kind), paint.fill, seconds, None))
    bars += [(title, FAILURE, *statistics.idle[part]) for part, title in IDLE_TITLES.items() if part in statistics.idle]
    rows, left, per_worker = [], 0.0, unit.scale / max(1, statistics.workers)
    for title, colour, seconds, gap in bars:
        share = statistics.share(seconds)
        show = parts.show_button([place_of(entry, gap)], f"The longest: {title}") if gap else None
        rows.append([title, parts.ledger(left, share, colour), seconds * per_worker, percent(share), show])
        left += share
    if seconds := statistics.rerouted:
        rows.append(["re-routed", None, seconds * per_worker, percent(statistics.share(seconds)), None])
    range_text = f"{short(statistics.begin * unit.scale, PLACE_DIGITS)} to {unit.text(statistics.end)}"
    caption = f"From {range_text}: {statistics.operations:,} instructions on {statistics.workers:,} live workers."
    head = ("", "", f"mean time{unit.suffix}", "share", "")
    return parts.card("Where the time goes", parts.table(head, rows), caption=caption)


def rerouted_card(entry: TimedLanes, context: TimelineContext) -> list[Any]:
    """Build the map from dead workers to the workers that run their micro-batches; [] without re-routed work."""
    unit = entry.unit
    rows = []
    for each in reroutings(context.timeline)[:MAX_WORKERS]:
        home, lane = map(entry.table.shape.worker_index, (each.home, each.host))
        times = (column[each.rows[:MAX_PLACES]].tolist() for column in (context.timeline.start, context.timeline.end))
        places = [(lane, *span) for span in zip(*times, strict=True)]
        show = parts.show_button(places, f"Show the work of {each.home} on {each.host}", data_home=home)
        names = html.Span(", ".join(map(str, each.micro_batches)), className="hint")
        arrow = f"{each.home}\N{NO-BREAK SPACE}\N{RIGHTWARDS ARROW}\N{NO-BREAK SPACE}{each.host}"
        shares = percent(each.share), percent(each.seconds / context.timeline.period)
        rows.append([arrow, names, each.seconds * unit.scale, *shares, show])
    if not rows:
        return []
    only = parts.tag(html.Button, "Only re-routed", className="quiet", type="button", data_only="REROUTED")
    head = ("from, to", "micro-batches", f"work{unit.suffix}", "of its work", "of the period", "")
    return [parts.card("Re-routed", only, parts.table(head, rows))]


def alike(gaps: Gaps) -> list[tuple[Gap, int]]:
    """Return the longest gaps before programs end, each with the number of equal ones on its rank, itself included."""
    places = np.flatnonzero(gaps.cause != GapCause.NOTHING_LEFT)
    rank = gaps.worker[places] % gaps.schedule.shape.ranks
    scale = 1e9 / max(float(gaps.end.max(initial=0.0)), 1e-300)
    times = [np.rint(column[places] * scale) for column in (gaps.start, gaps.end)]
    keys = np.stack([rank, gaps.cause[places], *times], axis=1)
    _, first, counts = np.unique(keys, axis=0, return_index=True, return_counts=True)
    length = (gaps.start - gaps.end)[places[first]]
    longest = np.lexsort((first, length))[:MAX_BUBBLES_LISTED]
    return list(zip(gaps.at(places[first[longest]]), counts[longest].tolist(), strict=True))


def figures(entry: TimedLanes, context: TimelineContext, _: Any = None) -> list[Any]:
    rows = [
        [each.name, html.Strong(each.value), html.Span(each.meaning, className="hint")]
        for each in figures_of(context, entry.unit)
    ]
    return [*rerouted_card(entry, context), parts.card("Figures", parts.table(("", "", ""), rows))]


def explained(entry: TimedLanes, context: TimelineContext, _: Any = None) -> list[Any]:
    return [time_card(entry, context), longest_bubbles(entry, context), critical_path(entry, context)]


def in_view(entry: TimedLanes, context: TimelineContext, request: Mapping[str, Any]) -> list[Any]:
    """Build the time of the requested range; without a range, of the whole timeline."""
    match request.get("window"):
        case [int() | float() as first, int() | float() as last] if isfinite(first) and isfinite(last):
            return [time_card(entry, context, first, last)]
    return [time_card(entry, context)]


def workers(entry: TimedLanes, context: TimelineContext, _: Any = None) -> list[Any]:
    """Build a row for each worker, equal ones in one row, and a heat map of several pipelines."""
    unit, timeline = entry.unit, context.timeline
    c, workers_of_grid = timeline.schedule.columns, list(timeline.schedule.shape.workers())
    sent = np.where(is_kind(c.kind, AsyncInstruction), timeline.end - timeline.start, 0.0)
    sending = np.bincount(c.worker, weights=sent, minlength=len(workers_of_grid)).tolist()
    columns = timeline.busy, timeline.bubble, timeline.inner_bubble, sending, memory_of_workers(context)
    groups: dict[tuple[str | None, ...], list[str]] = {}
    for worker, *spent, held in zip(workers_of_grid, *columns, strict=True):
        texts = [None if time is None else short(time * unit.scale) for time in spent]
        groups.setdefault((*texts, None if held is None else str(held)), []).append(str(worker))
    rows = [
        [names[0] + (f", and {len(names) - 1} alike" if len(names) > 1 else ""), *texts]
        for texts, names in list(groups.items())[:MAX_WORKERS]
    ]
    times = tuple(f"{name}{unit.suffix}" for name in ("busy", "bubble", "inner bubble", "sending"))
    omitted = f"The first {MAX_WORKERS} of {len(groups)}. " if len(groups) > MAX_WORKERS else ""
    content = [parts.table(("worker", *times, "peak memory"), rows, "sortable"), parts.hint(f"{omitted}{PEAK}")]
    shape = timeline.schedule.shape
    if shape.pipelines > 1:
        busy, bubble = ([time and time * unit.scale for time in each] for each in columns[:2])
        held = [each and each.amount for each in columns[-1]]
        figure = workers_figure(shape, dict(zip((*times[:2], "peak memory"), (busy, bubble, held), strict=True)))
        content.append(parts.figure_view(figure, "workers-figure", "Heat map of pipelines and ranks"))
    return content


def hits(entry: TimedLanes, context: TimelineContext, result: Mapping[str, Any]) -> list[Any]:
    table = entry.table
    operations = [i for i in result["operations"][:MAX_HITS] if isinstance(i, int) and 0 <= i < len(table)]
    if not operations:
        return [parts.empty_state(f"No match for {result['query']}.", "docs/guides/viewer.md lists the fields.")]
    unit, rows = entry.unit, []
    for operation in operations:
        row, lane = int(table.instruction_id[operation]), table.lane_of(operation)
        start, end = float(table.start[operation]), float(table.end[operation])
        slack = None if context.slack is None else float(context.slack[row]) * unit.scale
        reasons = [context.dependency_index.reason(row, unit), mark_text(table, operation)]
        rows.append(
            [
                instruction_name(context.timeline, row),
                short(start * unit.scale, PLACE_DIGITS),
                slack,
                html.Div([html.Div(line) for line in reasons if line]),
                parts.show_button([(lane, start, end)]),
            ]
        )
    total = int(result["total"])
    count_text = f"{total:,} found" + (f", the first {len(rows)} by time" if total > len(rows) else "")
    head = ("instruction", f"starts{unit.suffix}", f"slack{unit.suffix}", "reason", "")
    return [parts.card("Found", parts.table(head, rows, "findings"), caption=f"{count_text}.")]


def kind_name(kind: int) -> str:
    """Return the token of a kind, or its title if the token is not a word."""
    cls = KIND_CLASSES[kind]
    return cls.token if cls.token[0].isalpha() else cls.row.title
