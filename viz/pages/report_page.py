"""The page of a run's time: iterations over the wall clock, parts of the time, and costs of each change."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dash import Dash, html

from recycle.runs.report import GenerationChange, RunReport, TimePart
from viz.figures.charts import over_time_figure, parts_figure
from viz.numbers import percent, short
from viz.pages import parts
from viz.pages.page import PageOfRun

MAX_CHANGES = 60
PARTS_CAPTION = (
    "Every second of the wall clock is in one part. Useful is what a live worker computed on average in iterations that"
    " count; waiting is the rest of these, silences before their detection, and workers whose return is awaited."
)
BANDS_CAPTION = (
    "Bands are interruptions, in the colors of the bar below: redone, planning, forming, moving, checkpointing."
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
        return html.Div([html.Div(self.content(), id=self.name("shown")), self.ticks()])

    def content(self) -> list[Any]:
        report = self.run.report
        if report is None or not report.spans:
            return [
                parts.problems(self.run.problems),
                parts.empty_state(
                    "Nothing has run yet.", f"The page fills as {self.run.path / 'metrics.jsonl'} grows."
                ),
            ]
        timed = [line for line in self.run.metrics if isinstance(line.get("time"), int | float)]
        description = f"Seconds per iteration, throughput and live workers of {report.steps} steps"
        curves = parts.figure_view(
            "", over_time_figure(report, timed, self.run.workers), self.name("curves"), description
        )
        description = "Share of the wall clock that each part took"
        bar = parts.figure_view("", parts_figure(report), self.name("bar"), description)
        cards = [
            parts.problems(self.run.problems),
            parts.chips(facts(report)),
            parts.card("The run over time", curves, caption=BANDS_CAPTION),
            parts.card("Where the time went", bar, parts.table(PARTS_HEAD, part_rows(report)), caption=PARTS_CAPTION),
        ]
        if report.changes:
            head, rows = changes_table(report.changes)
            cards.append(parts.card("What changes cost, in seconds", parts.table(head, rows), caption=CHANGES_CAPTION))
        return cards

    def static_content(self) -> list[Any]:
        return [html.H2(self.title, className="source"), *self.content()]

    def register(self, app: Dash) -> None:
        @app.callback(
            self.output("shown"),
            self.output("tick", "disabled"),
            self.input("tick", "n_intervals"),
            prevent_initial_call=True,
        )
        def read_again(_: int) -> Any:
            self.refresh()
            return self.content(), not self.run.live


PARTS_HEAD = ("part", "seconds", "share")


def facts(report: RunReport) -> list[str]:
    useful = percent(report.parts[TimePart.USEFUL] / report.wall)
    words = [f"{parts.count_text(report.steps, 'step')} in {short(report.wall)} s", f"useful {useful}"]
    if report.expected is not None and report.fault_free is not None:
        words.append(f"iterations {short(report.measured)} s, by their plans {short(report.expected)} s")
        words.append(f"with all workers all the time {short(report.fault_free)} s")
    kinds = [change.kind for change in report.changes]
    return words + [parts.count_text(kinds.count(kind), kind) for kind in dict.fromkeys(kinds)]


def part_rows(report: RunReport) -> list[list[parts.Cell]]:
    return [
        [part.value, short(seconds), percent(seconds / report.wall)]
        for part, seconds in report.parts.items()
        if seconds > 0
    ]


def changes_table(changes: Sequence[GenerationChange]) -> tuple[list[str], list[list[parts.Cell]]]:
    """Return head and rows of the last MAX_CHANGES changes, with a column for each part in their costs."""
    used = [part for part in TimePart if any(part in change.costs for change in changes)]
    head = ["step", "change", "what", *(part.value for part in used), "all", "slower after"]
    rows: list[list[parts.Cell]] = [
        [
            str(change.step),
            change.kind,
            change.what,
            *(short(change.costs[part]) if part in change.costs else None for part in used),
            short(change.seconds),
            None if change.slower is None else short(change.slower),
        ]
        for change in changes[-MAX_CHANGES:]
    ]
    return head, rows
