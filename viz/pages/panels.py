"""Content of the common panels about the current timeline: explanation, range in view, workers, search results.

Answers are functions of the browser's request and the lane cache's entry: a timeline's table and context.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import isfinite
from typing import Any

import numpy as np
from dash import html

from recycle.ir.gaps import Gap, GapCause
from recycle.ir.kinds import KIND_CLASSES
from recycle.ir.simulate import TOLERANCE
from viz.analysis.bubbles import CAUSE_TITLES, instruction_name, range_statistics
from viz.kinds import is_schedule_work, mark_text
from viz.lane_cache import CachedLanes, TimelineContext
from viz.numbers import PLACE_DIGITS, percent, short
from viz.pages import parts

MAX_BUBBLES_LISTED, MAX_HITS, MAX_WORKERS = 12, 40, 64
MAX_BUBBLES_READ = 400
"""Number of the longest bubbles to consider; equal ones are shown once."""


def critical_path(entry: CachedLanes, context: TimelineContext) -> html.Section:
    timeline, unit = context.timeline, entry.unit
    rows = np.array(timeline.critical_path, dtype=np.int64)
    kinds = timeline.schedule.columns.kind[rows]
    seconds = np.bincount(kinds, weights=(timeline.end - timeline.start)[rows], minlength=len(KIND_CLASSES))
    waited = timeline.makespan - float(seconds.sum())
    cells: list[list[parts.Cell]] = [
        [
            kind_name(int(kind)),
            int((kinds == kind).sum()),
            float(seconds[kind]) * unit.scale,
            _share(seconds[kind], context),
        ]
        for kind in np.argsort(-seconds, kind="stable").tolist()
        if seconds[kind] > 0
    ]
    if waited > timeline.makespan * TOLERANCE:
        cells.append(["between instructions", None, waited * unit.scale, _share(waited, context)])
    free = ""
    if context.slack is not None:
        work = is_schedule_work(timeline.schedule.columns.kind)
        critical = int((context.slack[work] <= timeline.makespan * TOLERANCE).sum())
        free = f" {critical:,} of {int(work.sum()):,} instructions are critical: delaying one delays the iteration."
    return parts.card(
        "Critical path",
        parts.table(("", "instructions", f"time{unit.suffix}", "share"), cells),
        caption=f"One chain of waits over the makespan of {unit.amount(timeline.makespan)}; key p draws it.{free}",
    )


def longest_bubbles(entry: CachedLanes, context: TimelineContext) -> html.Section:
    groups: dict[Any, list[Gap]] = {}
    for gap in context.bubbles.gaps.longest(None, MAX_BUBBLES_READ):
        groups.setdefault((gap.worker.rank, gap.cause, f"{gap.start:.9g} {gap.end:.9g}"), []).append(gap)
    if not groups:
        return parts.card("Bubbles", html.P("No worker is idle before its program ends."))
    totals = context.bubbles.gaps.seconds.sum(axis=0)
    order = [GapCause(int(cause)) for cause in np.argsort(-totals, kind="stable") if totals[cause] > 0]
    unit = entry.unit
    spent = "; ".join(f"{CAUSE_TITLES[cause]} {unit.amount(float(totals[cause]))}" for cause in order)
    rows: list[list[parts.Cell]] = []
    for gap, *others in list(groups.values())[:MAX_BUBBLES_LISTED]:
        lane = context.lane(entry.table, gap.worker)
        show = parts.show_button([(lane, gap.start, gap.end)]) if lane >= 0 else None
        worker_text = f"{gap.worker}, and {len(others)} similar on its rank" if others else str(gap.worker)
        reason = html.Div(context.bubbles.reason(gap, unit))
        rows.append([worker_text, html.Div([html.Strong(CAUSE_TITLES[gap.cause]), reason]), show])
    return parts.card(
        "Longest bubbles",
        parts.table(("worker", "cause", ""), rows, "findings"),
        caption=f"Total over all workers: {spent}.",
    )


def explained(entry: CachedLanes, context: TimelineContext, _: Any = None) -> list[Any]:
    return [critical_path(entry, context), longest_bubbles(entry, context)]


def in_view(entry: CachedLanes, context: TimelineContext, request: Mapping[str, Any]) -> list[Any]:
    """Build work by kind and bubbles by cause in the requested time range; without a range, of the whole timeline."""
    unit, begin, end = entry.unit, 0.0, context.timeline.makespan
    match request.get("window"):
        case [int() | float() as first, int() | float() as last] if isfinite(first) and isfinite(last):
            begin, end = first, last
    statistics = range_statistics(context.timeline, context.bubbles.gaps, begin, end)
    rows: list[list[parts.Cell]] = []
    for kind, seconds in sorted(statistics.work.items(), key=lambda item: -item[1]):
        rows.append([kind_name(kind), seconds * unit.scale, percent(statistics.share(seconds))])
    if statistics.rerouted:
        rows.append(
            ["of which re-routed", statistics.rerouted * unit.scale, percent(statistics.share(statistics.rerouted))]
        )
    for cause, seconds in sorted(statistics.bubbles.items(), key=lambda item: -item[1]):
        rows.append([f"idle: {CAUSE_TITLES[cause]}", seconds * unit.scale, percent(statistics.share(seconds))])
    range_text = f"{short(statistics.begin * unit.scale, PLACE_DIGITS)} to {unit.text(statistics.end)}"
    words = f"From {range_text}: {statistics.operations:,} instructions on {statistics.workers:,} live workers."
    head = ("", f"worker time{unit.suffix}", "share")
    return [parts.hint(words), parts.table(head, rows)]


def workers(entry: CachedLanes, context: TimelineContext, _: Any = None) -> list[Any]:
    unit = entry.unit
    timeline, shape = context.timeline, context.timeline.schedule.shape
    columns = zip(timeline.busy, timeline.bubble, timeline.inner_bubble, timeline.peak_activations, strict=True)
    rows: list[list[parts.Cell]] = []
    for w, (worker, (busy, bubble, inner, peak)) in enumerate(zip(shape.workers(), columns, strict=True)):
        times = [None if value is None else float(value) * unit.scale for value in (busy, bubble, inner)]
        rows.append([str(worker), *times, peak, context.limits[w % shape.ranks] if context.limits else None])
    caption = ""
    if len(rows) > MAX_WORKERS:
        # Browsers take seconds for a thousand rows.
        rows = sorted(rows, key=lambda row: -(row[3] if isinstance(row[3], float) else 0.0))[:MAX_WORKERS]
        caption = f"{MAX_WORKERS} of {shape.worker_count}, largest inner bubble first. "
    if not context.limits:
        rows = [row[:-1] for row in rows]
    head = (
        "worker",
        f"busy{unit.suffix}",
        f"bubble{unit.suffix}",
        f"inner bubble{unit.suffix}",
        "peak activations",
        *(["limit"] * bool(context.limits)),
    )
    return [parts.table(head, rows), parts.hint(f"{caption}Activations are counted in chunks.")]


def hits(entry: CachedLanes, context: TimelineContext, result: Mapping[str, Any]) -> list[Any]:
    table = entry.table
    operations = [i for i in result["operations"][:MAX_HITS] if isinstance(i, int) and 0 <= i < len(table)]
    if not operations:
        return [parts.empty_state(f"No match for {result['query']}.", "docs/guides/viewer.md lists the fields.")]
    unit, rows = entry.unit, []
    for operation in operations:
        row = context.row(table, operation)
        lane = int(np.searchsorted(table.offsets, operation, side="right")) - 1
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


def _share(seconds: Any, context: TimelineContext) -> str:
    makespan = context.timeline.makespan
    return percent(float(seconds) / makespan) if makespan else "–"
