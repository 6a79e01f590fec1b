"""The page of schedule files: timelines on one time axis, and figures side by side."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any

from dash import html

from recycle.ir.check import explain
from viz.details import figures_table
from viz.lane_cache import lanes_address, plan_of
from viz.pages import parts
from viz.pages.lanes_view import lanes_view
from viz.pages.page import Mode, Page, Workspace
from viz.pages.scoreboard_page import times_text
from viz.scenario import PageModel
from viz.sources import ScheduleFile

MAX_FINDINGS, MAX_WORKERS, MAX_PLACES = 30, 64, 12
"""Maximum findings, workers, and places shown of a cycle of waits."""


class SchedulePage(Page):
    prefix = "schedules"
    has_lanes = True
    invitation = "Lanes of a classic schedule and of one without a worker, whose micro-batches its peers run."

    def __init__(self, files: Sequence[ScheduleFile], cache: PageModel | None = None, prefix: str = prefix) -> None:
        super().__init__(cache)
        self.files, self.prefix = files, prefix

    @classmethod
    def pages_of(cls, workspace: Workspace) -> Sequence[Page]:
        return [cls(workspace.files, workspace.cache)] if workspace.files else []

    @property
    def first_panel(self) -> str:
        return "findings" if any(file.findings for file in self.files) else "selection"

    @property
    def title(self) -> str:
        return self.files[0].name if len(self.files) == 1 else "Schedules"

    def layout(self) -> Mode:
        findings = [
            findings_of(file, f"Findings in {file.name}", MAX_FINDINGS, place)
            for place, file in enumerate(self.files)
            if file.findings
        ]
        panels = {
            "Layout": [self.layout_of(file) for file in self.files if file.schedule.shape.cut],
            "Findings": findings,
        }
        filled = {title: content for title, content in panels.items() if content}
        return Mode(self.timelines(), filled)

    def static_content(self) -> list[Any]:
        mode, table = self.layout(), parts.table(*figures_table([(file.name, file.context) for file in self.files]))
        figures = parts.card("Figures", table, caption=times_text(self.files))
        return [parts.card("Timelines", *mode.lanes), figures, *mode.panels.values()]

    def preloaded_lanes(self) -> list[str]:
        span = self.span
        return [lanes_address(self.cache.put(file.timed, span)) for file in self.files]

    @property
    def span(self) -> float | None:
        """Length of the common time axis; None if no instruction takes time."""
        return max((file.lanes.span for file in self.files), default=0.0) or None

    def timelines(self) -> list[Any]:
        left = parts.gutter(*(file.lanes for file in self.files))
        views: list[Any] = []
        for place, file in enumerate(self.files):
            if not len(file.lanes):
                views.append(parts.empty_state(f"{file.name} has no instructions.", "Its programs are empty."))
                continue
            failed = ", ".join(map(str, sorted(file.schedule.failed)))
            title, name = f"{file.name}: {file.schedule.shape}", f"{self.prefix}-{place}"
            title += f", {failed} failed" if failed else ""
            if file.lanes.halt is not None:
                title += f"; deadlocks at {file.lanes.halt:.6g}; pale instructions never run"
            common: dict[str, Any] = {"span": self.span, "left": left, "linked": self.prefix}
            views.append(lanes_view(title, file.timed, name, self.cache, place=place, **common))
        return views

    def layout_of(self, file: ScheduleFile) -> Any:
        schedule, plan = file.schedule, plan_of(file.schedule)
        moves = plan.moves if plan else ()
        rows: list[list[Any]] = []
        for worker in schedule.live:
            own_moves = [move for move in moves if move.worker == str(worker)]
            hosted = [unit for run in schedule.unit_runs(worker) for unit in range(*run)]
            copied = ", ".join(f"{_runs(range(*move.units))} from {move.source}" for move in own_moves)
            amount = sum(move.bytes for move in own_moves)
            rows.append([str(worker), _runs(hosted), copied, amount or None])
        head = ("worker", "hosts layers", "copies layers", "bytes")
        count = len({move.worker for move in moves})
        limit = f"; no layer moves: {plan.layout_limit}" if plan and plan.layout_limit else ""
        title = f"Layout of {file.name}{limit}: {parts.count_text(count, 'worker')}"
        title += f" {'takes' if count == 1 else 'take'} on layers"
        ordered = sorted(rows, key=lambda row: not row[2])
        if len(ordered) > MAX_WORKERS:
            title += f"; {MAX_WORKERS} of {len(ordered)} workers, those that copy first"
        content = [html.Summary(title), parts.table(head, ordered[:MAX_WORKERS])]
        return html.Details(content, className="card", open=bool(moves))


def findings_of(file: ScheduleFile, title: str, most: int, graph: int | None = None) -> Any:
    """Build the first findings in a file, each with a button that frames its places in timeline `graph` of the page."""
    rows: list[list[object]] = []
    for finding in file.findings[:most]:
        rule, places = explain(finding.rule), file.places(finding)[:MAX_PLACES]
        position = f"#{finding.position}" if finding.position is not None else ""
        rows.append(
            [
                html.Span(finding.severity, className=f"severity {finding.severity}"),
                html.Abbr(finding.rule, title=rule.documentation if rule else ""),
                f"{finding.worker or ''} {position}".strip() or None,
                html.Code(finding.instruction) if finding.instruction else None,
                html.Div([finding.message, html.Div(finding.hint, className="hint")]),
                parts.show_button(places, graph=graph) if places else "",
            ]
        )
    head = ("", "rule", "worker, position", "instruction", "problem and remedy", "")
    omitted = len(file.findings[most:]) + sum(file.findings.more.values())
    caption = f"The first {len(rows)}; {omitted:,} more from `recycle check`." if omitted else ""
    return parts.card(title, parts.table(head, rows, "findings rules"), caption=caption) if rows else []


def _runs(units: Sequence[int]) -> str:
    runs = [[unit for _, unit in run] for _, run in groupby(enumerate(units), key=lambda each: each[1] - each[0])]
    return ", ".join(f"{run[0]}\N{EN DASH}{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)
