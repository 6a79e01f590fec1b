"""The page of a run's time: iterations over the wall clock, parts of the time, and costs of each change."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import plotly.graph_objects as go
from dash import Dash, Output, dcc, html, no_update

from recycle.runs.report import GenerationChange, RunReport, TimePart
from viz.figures.charts import FILLS, over_time_figure
from viz.numbers import PLACE_DIGITS, is_number, percent, short, unit_for
from viz.pages import parts
from viz.pages.page import PageOfRun
from viz.pages.run_page import RunPage

MAX_CHANGES = 60
PARTS_CAPTION = (
    "Every second of the wall clock is in one part. Useful is what a live worker computed on average in iterations that"
    " count; waiting is the rest of these, silences before their detection, and workers whose return is awaited."
)
BANDS_CAPTION = (
    "Bands are interruptions, in the colors of the table above: redone, planning, forming, moving, checkpointing. Drag"
    " over a range of time to see its parts above, double-click for all; press a point to open its step."
)
CHANGES_CAPTION = (
    "From the last commit of a generation to the start of the next. Slower after: how much longer the iterations until"
    " the next change take by their plans than with all workers."
)


class ReportPage(PageOfRun):
    kind = "time"

    @property
    def title(self) -> str:
        return f"Time of {self.run.name}"

    def layout(self) -> html.Div:
        stores = {"steps": self.prefix.replace(self.kind, RunPage.kind), "range": None}
        hidden = [self.ticks(), *(dcc.Store(id=self.name(store), data=data) for store, data in stores.items())]
        head, parts_, tables = (
            html.Div(content, id=self.name(place))
            for place, content in (("head", self.head()), ("parts", self.parts_of()), ("tables", self.tables()))
        )
        return html.Div([head, parts_, self.plot(), tables, *hidden])

    def head(self) -> list[Any]:
        report, problems = self.run.report, parts.problems(self.run.problems)
        if report is None or not report.spans:
            hint = f"The page fills as {self.run.path / 'metrics.jsonl'} grows."
            return [problems, parts.empty_state("Nothing has run yet.", hint)]
        return [problems, parts.chips(facts(report))]

    def plot(self) -> html.Section:
        description = "Seconds per iteration, throughput and live workers"
        view = parts.figure_view(self.figure(), self.name("curves"), description)
        return parts.card("The run over time", view, caption=BANDS_CAPTION)

    def figure(self) -> go.Figure:
        return over_time_figure(self.run.report, [line for line in self.run.metrics if is_number(line.get("time"))])

    def tables(self) -> list[Any]:
        report = self.run.report
        if report is None or not report.spans:
            return []
        cards = [self.plans_in_use()]
        if report.changes:
            used = [part for part in TimePart if any(part in change.costs for change in report.changes)]
            head = ["step", "change", "what", *(part.value for part in used), "all", "slower after"]
            table = parts.table(head, [_costs(change, used) for change in report.changes[-MAX_CHANGES:]])
            cards.append(parts.card("What changes cost, in seconds", table, caption=CHANGES_CAPTION))
        return cards

    def plans_in_use(self) -> html.Section:
        rows = []
        for segment in self.run.segments:
            schedule, context = self.run.plan(segment.plan), self.run.plan_context(segment.plan)
            bound = context.bound if context else None
            measured = self.run.trace and self.run.trace.period(segment.first, segment.last)
            rows.append(
                [
                    segment.steps,
                    segment.workers,
                    segment.plan[:12] if segment.plan else None,
                    schedule and schedule.optimizer,
                    short(context.timeline.period, PLACE_DIGITS) if context else None,
                    bound and short(bound[0], PLACE_DIGITS),
                    bound and percent(bound[1]),
                    measured and unit_for(measured).amount(measured),
                ]
            )
        return parts.card("Plans in use", parts.table(PLANS_HEAD, rows), caption=PLANS_CAPTION)

    def parts_of(self, window: Sequence[float] | None = None) -> html.Section | None:
        """Build the table of the parts of the time between two moments, or of the whole time."""
        report = self.run.report
        if report is None or not report.spans:
            return None
        begin, end = window or (0.0, math.inf)
        within = clipped(report, begin, end)
        title = "Where the time went"
        if len(within.spans) and within.wall < report.wall:
            title += f", from {short(max(begin, 0.0))} to {short(min(end, report.wall))} s"
        return parts.card(title, parts.table(PARTS_HEAD, part_rows(within)), caption=PARTS_CAPTION)

    def static_content(self) -> list[Any]:
        heading = html.H2(self.title, className="source")
        return [heading, *self.head(), self.parts_of(), self.plot(), *self.tables()]

    def register(self, app: Dash) -> None:
        @app.callback(
            self.output("head"),
            self.output("curves", "figure"),
            self.output("tables"),
            self.output("tick", "disabled"),
            self.input("tick", "n_intervals"),
            prevent_initial_call=True,
            running=self.running,
        )
        def read_again(_: int) -> Any:
            self.refresh()
            return self.head(), self.redrawn(), self.tables(), not self.run.live

        # Drawn after each answer to a tick, which may be older than the range.
        @app.callback(
            self.output("parts"),
            self.input("tick", "disabled"),
            self.input("range", "data"),
            prevent_initial_call=True,
        )
        def show_parts(_: Any, window: Any) -> Any:
            return self.parts_of(window)

        @app.callback(self.output("range", "data"), self.input("curves", "relayoutData"), prevent_initial_call=True)
        def keep_range(changed: Any) -> Any:
            changed = changed or {}
            edges = [changed.get(f"xaxis.range[{end}]") for end in (0, 1)]
            if not (changed.get("xaxis.autorange") or all(map(is_number, edges))):
                return no_update
            return None if None in edges else edges

        opened = Output(self.name("steps"), "data")
        parts.in_browser(app, "openStep", opened, self.input("curves", "clickData"), self.state("steps", "data"))


PLANS_HEAD = ("steps", "workers", "plan", "optimizer", "period", "lower bound", "gap", "measured")
PLANS_CAPTION = (
    "Period: distance of two iterations in steady state, in units of the profile; the bound is proven for that failure."
    " Measured: median seconds from first start to last end of an iteration."
)


PARTS_HEAD = ("part", "", "seconds", "share")


def clipped(report: RunReport, begin: float, end: float) -> RunReport:
    """Return the report with the spans between two moments, counted from the first."""
    inside = [span for span in report.spans if span.end > begin and span.start < end]
    spans = [replace(span, start=max(span.start, begin) - begin, end=min(span.end, end) - begin) for span in inside]
    return replace(report, spans=spans)


def facts(report: RunReport) -> list[str]:
    useful = percent(report.parts[TimePart.USEFUL] / report.wall)
    words = [f"{parts.count_text(report.steps, 'step')} in {short(report.wall)} s", f"useful {useful}"]
    if report.expected is not None and report.fault_free is not None:
        words.append(f"iterations {short(report.measured)} s, by their plans {short(report.expected)} s")
        words.append(f"with all workers all the time {short(report.fault_free)} s")
    kinds = [change.kind for change in report.changes]
    return words + [parts.count_text(kinds.count(kind), kind) for kind in dict.fromkeys(kinds)]


def part_rows(report: RunReport) -> list[list[Any]]:
    rows, begin = [], 0.0
    for part, seconds in report.parts.items():
        if seconds > 0:
            share = seconds / report.wall
            rows.append([part.value, parts.ledger(begin, share, FILLS[part]), short(seconds), percent(share)])
            begin += share
    return rows


def _costs(change: GenerationChange, used: Sequence[TimePart]) -> list[Any]:
    seconds = [*(change.costs.get(part) for part in used), change.seconds, change.slower]
    return [change.step, change.kind, change.what, *seconds]
