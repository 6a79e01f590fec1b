"""Content of the common panels about the current timeline: explanation, range in view, workers, search results.

The lane cache keeps a timeline's table and explainer by address. Answers are functions of that entry and the browser's
request, so that tests need no browser.
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
from viz.analysis.bubbles import TITLES, name, range_statistics
from viz.kinds import listed, marks
from viz.lane_cache import CachedLanes, Explainer
from viz.numbers import PLACE_DIGITS, percent, short
from viz.pages import parts

BUBBLES_SHOWN, HITS_SHOWN, WORKERS_SHOWN = 12, 40, 64
BUBBLES_LOOKED_AT = 400
"""Number of the longest bubbles to consider; equal ones are shown once."""


def critical_path(shown: CachedLanes, explainer: Explainer) -> html.Section:
    timeline, unit = explainer.timeline, shown.unit
    rows = np.array(timeline.critical_path, dtype=np.int64)
    kinds = timeline.schedule.columns.kind[rows]
    seconds = np.bincount(kinds, weights=(timeline.end - timeline.start)[rows], minlength=len(KIND_CLASSES))
    waited = timeline.makespan - float(seconds.sum())
    cells: list[list[parts.Cell]] = [
        [
            kind_name(int(kind)),
            int((kinds == kind).sum()),
            float(seconds[kind]) * unit.scale,
            _share(seconds[kind], explainer),
        ]
        for kind in np.argsort(-seconds, kind="stable").tolist()
        if seconds[kind] > 0
    ]
    if waited > timeline.makespan * TOLERANCE:
        cells.append(["between them", None, waited * unit.scale, _share(waited, explainer)])
    free = ""
    if explainer.slack is not None:
        work = listed(timeline.schedule.columns.kind)
        critical = int((explainer.slack[work] <= timeline.makespan * TOLERANCE).sum())
        free = f" {critical:,} of {int(work.sum()):,} instructions are critical: delaying one delays the iteration."
    return parts.card(
        "Critical path",
        parts.table(("", "instructions", f"time{unit.suffix}", "share"), cells),
        caption=f"One chain of waits over the makespan of {unit.amount(timeline.makespan)}; key p draws it.{free}",
    )


def longest_bubbles(shown: CachedLanes, explainer: Explainer) -> html.Section:
    """Build the list of the longest bubbles with cause and link; equal ones of several pipelines appear once."""
    alike: dict[Any, list[Gap]] = {}
    for gap in explainer.bubbles.gaps.longest(None, BUBBLES_LOOKED_AT):
        alike.setdefault((gap.worker.rank, gap.cause, f"{gap.start:.9g} {gap.end:.9g}"), []).append(gap)
    if not alike:
        return parts.card("Bubbles", html.P("No worker waits for anything before its program ends."))
    totals = explainer.bubbles.gaps.seconds.sum(axis=0)
    order = [GapCause(int(cause)) for cause in np.argsort(-totals, kind="stable") if totals[cause] > 0]
    unit = shown.unit
    spent = "; ".join(f"{TITLES[cause]} {unit.amount(float(totals[cause]))}" for cause in order)
    rows: list[list[parts.Cell]] = []
    for gap, *others in list(alike.values())[:BUBBLES_SHOWN]:
        lane = explainer.lane(shown.table, gap.worker)
        show = parts.show_button([(lane, gap.start, gap.end)]) if lane >= 0 else None
        named = f"{gap.worker}, and {len(others)} on its rank alike" if others else str(gap.worker)
        why = html.Div(explainer.bubbles.reason(gap, unit))
        rows.append([named, html.Div([html.Strong(TITLES[gap.cause]), why]), show])
    return parts.card(
        "Longest bubbles",
        parts.table(("worker", "cause", ""), rows, "findings"),
        caption=f"In all, over all workers: {spent}.",
    )


def explained(shown: CachedLanes, explainer: Explainer, _: Any = None) -> list[Any]:
    return [critical_path(shown, explainer), longest_bubbles(shown, explainer)]


def in_view(shown: CachedLanes, explainer: Explainer, asked: Mapping[str, Any]) -> list[Any]:
    """Build work by kind and bubbles by cause in the requested time range; without a range, of the whole timeline."""
    unit, begin, end = shown.unit, 0.0, explainer.timeline.makespan
    match asked.get("window"):
        case [int() | float() as first, int() | float() as last] if isfinite(first) and isfinite(last):
            begin, end = first, last
    found = range_statistics(explainer.timeline, explainer.bubbles.gaps, begin, end)
    rows: list[list[parts.Cell]] = []
    for kind, seconds in sorted(found.work.items(), key=lambda item: -item[1]):
        rows.append([kind_name(kind), seconds * unit.scale, percent(found.share(seconds))])
    if found.rerouted:
        rows.append(["of that re-routed", found.rerouted * unit.scale, percent(found.share(found.rerouted))])
    for cause, seconds in sorted(found.bubbles.items(), key=lambda item: -item[1]):
        rows.append([f"idle: {TITLES[cause]}", seconds * unit.scale, percent(found.share(seconds))])
    where = f"{short(found.begin * unit.scale, PLACE_DIGITS)} to {unit.text(found.end)}"
    words = f"From {where}: {found.operations:,} instructions on {found.workers:,} live workers."
    head = ("", f"worker time{unit.suffix}", "share")
    return [parts.hint(words), parts.table(head, rows)]


def workers(shown: CachedLanes, explainer: Explainer, _: Any = None) -> list[Any]:
    """Build busy time, bubbles and peaks of every worker, or of the workers with the longest inner waits."""
    unit = shown.unit
    timeline, shape = explainer.timeline, explainer.timeline.schedule.shape
    columns = zip(timeline.busy, timeline.bubble, timeline.inner_bubble, timeline.peak_activations, strict=True)
    rows: list[list[parts.Cell]] = []
    for w, (worker, (busy, bubble, inner, peak)) in enumerate(zip(shape.workers(), columns, strict=True)):
        times = [None if value is None else float(value) * unit.scale for value in (busy, bubble, inner)]
        rows.append([str(worker), *times, peak, explainer.limits[w % shape.ranks] if explainer.limits else None])
    caption = ""
    if len(rows) > WORKERS_SHOWN:
        # Browsers take seconds for a thousand rows.
        rows = sorted(rows, key=lambda row: -(row[3] if isinstance(row[3], float) else 0.0))[:WORKERS_SHOWN]
        caption = f"{WORKERS_SHOWN} of {shape.worker_count}, largest inner bubble first. "
    if not explainer.limits:
        rows = [row[:-1] for row in rows]
    head = (
        "worker",
        f"busy{unit.suffix}",
        f"bubble{unit.suffix}",
        f"inner bubble{unit.suffix}",
        "peak activations",
        *(["limit"] * bool(explainer.limits)),
    )
    return [parts.table(head, rows), parts.hint(f"{caption}Activations are counted in chunks.")]


def hits(shown: CachedLanes, explainer: Explainer, found: Mapping[str, Any]) -> list[Any]:
    """Build the browser's search results by time, each with the cause of its start."""
    table = shown.table
    chosen = [i for i in found["operations"][:HITS_SHOWN] if isinstance(i, int) and 0 <= i < len(table)]
    if not chosen:
        return [parts.empty(f"No match for {found['query']}.", "docs/guides/viewer.md lists the fields.")]
    unit, rows = shown.unit, []
    for operation in chosen:
        row = explainer.row(table, operation)
        lane = int(np.searchsorted(table.offsets, operation, side="right")) - 1
        start, end = float(table.start[operation]), float(table.end[operation])
        slack = None if explainer.slack is None else float(explainer.slack[row]) * unit.scale
        said = [explainer.waits.reason(row, unit), marks(table, operation)]
        rows.append(
            [
                name(explainer.timeline, row),
                short(start * unit.scale, PLACE_DIGITS),
                slack,
                html.Div([html.Div(line) for line in said if line]),
                parts.show_button([(lane, start, end)]),
            ]
        )
    total = int(found["total"])
    more = f"{total:,} found" + (f", the first {len(rows)} by time" if total > len(rows) else "")
    head = ("instruction", f"starts{unit.suffix}", f"slack{unit.suffix}", "why then", "")
    return [parts.card("Found", parts.table(head, rows, "findings"), caption=f"{more}.")]


def kind_name(kind: int) -> str:
    """Return the token of a kind, or its title if the token is not a word."""
    cls = KIND_CLASSES[kind]
    return cls.token if cls.token[0].isalpha() else cls.row.title


def _share(seconds: Any, explainer: Explainer) -> str:
    makespan = explainer.timeline.makespan
    return percent(float(seconds) / makespan) if makespan else "–"
