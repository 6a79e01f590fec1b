"""The page of schedule files: timelines on one time axis, and figures side by side."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any

from dash import html

from recycle.ir.simulate import Timeline
from viz.details import figures_table
from viz.lane_cache import LaneCache
from viz.pages import parts
from viz.pages.lanes_view import lanes_address, lanes_view, static_timelines
from viz.pages.page import Mode, Page, Workspace
from viz.sources import ScheduleFile

MAX_FINDINGS, MAX_WORKERS = 30, 64


class SchedulePage(Page):
    prefix = "schedules"
    has_lanes = True
    invitation = "Lanes of a classic schedule and of one without a worker, whose micro-batches its peers run."

    def __init__(self, files: Sequence[ScheduleFile], cache: LaneCache | None = None) -> None:
        super().__init__(cache)
        self.files = files

    @classmethod
    def pages_of(cls, workspace: Workspace) -> Sequence[Page]:
        return [cls(workspace.files, workspace.cache)] if workspace.files else []

    @property
    def title(self) -> str:
        return self.files[0].name if len(self.files) == 1 else "Schedules"

    def layout(self) -> Mode:
        problems = [f"{file.name}: {file.problem}; shown up to the deadlock" for file in self.files if file.problem]
        caption = " ".join(filter(None, (FIGURES_CAPTION, self.times())))
        panels: dict[str, Any] = {"Figures": parts.card("Figures", parts.table(*self.figures()), caption=caption)}
        if layouts := [self.layout_of(file) for file in self.files if file.schedule.shape.cut]:
            panels["Layout"] = layouts
        if findings := [self.findings(file) for file in self.files if file.findings]:
            panels["Findings"] = findings
        return Mode([parts.problems(problems), *self.timelines()], panels)

    def static_content(self) -> list[Any]:
        content: list[Any] = []
        for place, file in enumerate(self.files):
            content.append(html.H2(file.name, className="source"))
            content.append(parts.problems([file.problem] if file.problem else []))
            content.append(
                static_timelines(f"{self.prefix}-{place}", file.panels(), f"{file.name} has no instructions.")
            )
        content.append(parts.card("Figures", parts.table(*self.figures()), caption=FIGURES_CAPTION))
        content += [self.layout_of(file) for file in self.files]
        return [*content, *(self.findings(file) for file in self.files if file.findings)]

    def preloaded_lanes(self) -> list[str]:
        span = self.span
        return [lanes_address(self.cache.put(file.lanes, file.context, span)) for file in self.files]

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
            title = f"{file.name}: {file.schedule.shape}" + (f", {failed} failed" if failed else "")
            view = lanes_view(
                title,
                file.lanes,
                f"{self.prefix}-{place}",
                self.cache,
                context=file.context,
                span=self.span,
                left=left,
                linked=self.prefix,
                place=place,
            )
            views.append(view)
        return views

    def times(self) -> str:
        """Describe the default times of files without stated times."""
        names_of_time: dict[float, list[str]] = {}
        for file in self.files:
            if file.chunk_time is not None:
                names_of_time.setdefault(file.chunk_time, []).append(file.name)
        executed_names = [file.name for file in self.files if file.executed]
        executed = f"{', '.join(executed_names)}: as executed, in seconds." if executed_names else ""
        if not names_of_time:
            return executed
        chunks = "; ".join(
            f"{time:.3g} in {', '.join(names)}" for time, names in sorted(names_of_time.items(), reverse=True)
        )
        sentence = f"F, I and W each take 1 for a worker's whole part of the model, so for a chunk {chunks}."
        return f"{sentence} {executed}".strip()

    def figures(self) -> tuple[list[str], list[list[parts.Cell]]]:
        head, rows = figures_table([(file.name, file.context) for file in self.files])
        for name, values in _LARGEST.items():
            largest = [max(values(file.timeline), default=None) if file.timeline else None for file in self.files]
            rows.append([name, *largest])
        plans = [file.plan for file in self.files]
        limits = [str(plan.layout_limit) if plan and plan.layout_limit else None for plan in plans]
        if any(limits):
            rows.append(["no layer moves", *limits])
        if any(file.schedule.shape.chunks > 1 for file in self.files):
            rows.append(["placement", *(file.schedule.placing for file in self.files)])
        rows.append(["optimizer", *(file.schedule.optimizer for file in self.files)])
        rows.append(["checker", *(_verdict(file) for file in self.files)])
        return head, rows

    def layout_of(self, file: ScheduleFile) -> Any:
        schedule = file.schedule
        if not schedule.shape.cut:
            return []
        plan = file.plan
        moves = plan.moves if plan else ()
        rows: list[list[parts.Cell]] = []
        for worker in schedule.live:
            own_moves = [move for move in moves if move.worker == str(worker)]
            hosted = [unit for run in schedule.unit_runs(worker) for unit in range(*run)]
            kept_units = [unit for unit in hosted if not any(unit in range(*move.units) for move in own_moves)]
            copied = ", ".join(f"{_runs(range(*move.units))} from {move.source}" for move in own_moves)
            amount = sum(move.bytes for move in own_moves)
            rows.append([str(worker), _runs(hosted), _runs(kept_units), copied, amount or None])
        head = ("worker", "hosts layers", "already held", "copies layers", "bytes")
        count = len({move.worker for move in moves})
        title = (
            f"Layout of {file.name}: {parts.count_text(count, 'worker')} {'takes' if count == 1 else 'take'} on layers"
        )
        ordered = [row for row in rows if row[3]] + [row for row in rows if not row[3]]
        if len(ordered) > MAX_WORKERS:
            title += f"; {MAX_WORKERS} of {len(ordered)} workers, those that copy first"
        return html.Details(
            [html.Summary(title), parts.table(head, ordered[:MAX_WORKERS])], className="card", open=bool(moves)
        )

    def findings(self, file: ScheduleFile) -> html.Section:
        return parts.findings(f"Findings in {file.name}", file.findings, MAX_FINDINGS)


def _runs(units: Sequence[int]) -> str:
    runs = [[unit for _, unit in run] for _, run in groupby(enumerate(units), key=lambda each: each[1] - each[0])]
    return ", ".join(f"{run[0]}\N{EN DASH}{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


_LARGEST: dict[str, Callable[[Timeline], list[float]]] = {
    "largest bubble": lambda timeline: [value for value in timeline.bubble if value is not None],
    "largest inner bubble": lambda timeline: [value for value in timeline.inner_bubble if value is not None],
}
FIGURES_CAPTION = (
    "Makespan: one iteration from idle. Period: distance of two iterations in steady state, which throughput follows."
    " Every forward and each half of a backward takes 1 unless a profile says otherwise."
)


def _verdict(file: ScheduleFile) -> str:
    counts = [(file.findings.number("error"), "error"), (file.findings.number("warning"), "warning")]
    return ", ".join(parts.count_text(count, severity) for count, severity in counts if count) or "valid"
