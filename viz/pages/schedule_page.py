"""The page of schedule files: timelines on one time axis, and figures side by side."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any

from dash import html

from recycle.ir.check import explain
from recycle.ir.schedule import Schedule
from recycle.plans import Plan
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

    @classmethod
    def count(cls, workspace: Workspace) -> int:
        return bool(workspace.files)

    @property
    def files(self) -> Sequence[ScheduleFile]:
        return self.workspace.files

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
            "Layout": [
                layout_of(f"Layout of {file.name}", file.schedule, plan_of(file.schedule))
                for file in self.files
                if file.schedule.shape.cut
            ],
            "Findings": findings,
        }
        filled = {title: content for title, content in panels.items() if content}
        return Mode(timelines(self.files, self.prefix, self.cache), filled)

    def static_content(self) -> list[Any]:
        mode, table = self.layout(), parts.table(*figures_table([(file.name, file.context) for file in self.files]))
        figures = parts.card("Figures", table, caption=times_text(self.files))
        return [parts.card("Timelines", *mode.lanes), figures, *mode.panels.values()]

    def preloaded_lanes(self) -> list[str]:
        return [lanes_address(self.cache.put(file.timed, _span(self.files))) for file in self.files]


def layout_of(title: str, schedule: Schedule, plan: Plan | None) -> html.Details:
    """Build the layers that each worker hosts and copies; those that copy first."""
    moves, rows = plan.moves if plan else (), []
    for worker in schedule.live:
        own_moves = [move for move in moves if move.worker == str(worker)]
        hosted = [unit for run in schedule.unit_runs(worker) for unit in range(*run)]
        copies = [(_runs(range(*move.units)) if move.units else move.role, move.source) for move in own_moves]
        copied = ", ".join(f"{what} from {source}" for what, source in copies)
        rows.append([str(worker), _runs(hosted), copied, sum(move.bytes for move in own_moves) or None])
    limit = f"; no layer moves: {plan.layout_limit}" if plan and plan.layout_limit else ""
    count = len({move.worker for move in moves})
    title += f"{limit}: {parts.count_text(count, 'worker')} {'takes' if count == 1 else 'take'} on layers"
    rows.sort(key=lambda row: not row[2])
    if len(rows) > MAX_WORKERS:
        title += f"; {MAX_WORKERS} of {len(rows)} workers, those that copy first"
    table = parts.table(("worker", "hosts layers", "copies layers", "bytes"), rows[:MAX_WORKERS])
    return html.Details([html.Summary(title), table], className="card", open=bool(moves))


def _span(files: Sequence[ScheduleFile]) -> float:
    return max(file.lanes.span for file in files)


def timelines(files: Sequence[ScheduleFile], prefix: str, cache: PageModel) -> list[Any]:
    """Build the lanes of files on one time axis, named by a prefix and their place."""
    left, views = parts.gutter(*(file.lanes for file in files)), []
    for place, file in enumerate(files):
        if not len(file.lanes):
            views.append(parts.empty_state(f"{file.name} has no instructions.", "Its programs are empty."))
            continue
        failed = ", ".join(map(str, sorted(file.schedule.failed)))
        title = f"{file.name}: {file.schedule.shape}" + (f", {failed} failed" if failed else "")
        if file.lanes.halt is not None:
            title += f"; deadlocks at {file.lanes.halt:.6g}; pale instructions never run"
        name, span = f"{prefix}-{place}", _span(files)
        views.append(lanes_view(title, file.timed, name, cache, place=place, span=span, left=left, linked=prefix))
    return views


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
                parts.show_button(places, data_graph=graph) if places else "",
            ]
        )
    head = ("", "rule", "worker, position", "instruction", "problem and remedy", "")
    omitted = len(file.findings[most:]) + sum(file.findings.more.values())
    caption = f"The first {len(rows)}; {omitted:,} more from `recycle check`." if omitted else ""
    return parts.card(title, parts.table(head, rows, "findings rules"), caption=caption) if rows else []


def _runs(units: Sequence[int]) -> str:
    runs = [[unit for _, unit in run] for _, run in groupby(enumerate(units), key=lambda each: each[1] - each[0])]
    return ", ".join(f"{run[0]}\N{EN DASH}{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)
