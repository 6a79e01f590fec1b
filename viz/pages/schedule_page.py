"""The page of schedule files: timelines on one time axis, and figures side by side."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any

from dash import html

from recycle.errors import PlanError
from recycle.ir.simulate import Timeline
from recycle.plans import Plan
from viz.details import figures_beside
from viz.lane_cache import LaneCache
from viz.pages import parts
from viz.pages.lanes_view import lanes_address, lanes_view, pictures
from viz.pages.page import Mode, Page, Workspace
from viz.sources import ScheduleFile

FINDINGS_SHOWN, WORKERS_SHOWN = 30, 64


class SchedulePage(Page):
    """The page of schedule files."""

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
        problems = [f"{file.name}: {file.problem}; shown until it hangs" for file in self.files if file.problem]
        caption = " ".join(filter(None, (FIGURES_CAPTION, self.times())))
        own: dict[str, Any] = {"Figures": parts.card("Figures", parts.table(*self.figures()), caption=caption)}
        if layouts := [self.layout_of(file) for file in self.files if file.schedule.shape.cut]:
            own["Layout"] = layouts
        if found := [self.findings(file) for file in self.files if file.findings]:
            own["Findings"] = found
        return Mode([parts.problems(problems), *self.timelines()], own)

    def exported(self) -> list[Any]:
        shown: list[Any] = []
        for place, file in enumerate(self.files):
            shown.append(html.H2(file.name, className="source"))
            shown.append(parts.problems([file.problem] if file.problem else []))
            shown.append(pictures(f"{self.prefix}-{place}", file.panels(), f"{file.name} holds no instruction."))
        shown.append(parts.card("Figures", parts.table(*self.figures()), caption=FIGURES_CAPTION))
        shown += [self.layout_of(file) for file in self.files]
        return [*shown, *(self.findings(file) for file in self.files if file.findings)]

    def preloaded_lanes(self) -> list[str]:
        span = self.span
        return [lanes_address(self.cache.put(file.lanes, file.explainer, span)) for file in self.files]

    @property
    def span(self) -> float | None:
        """Length of the common time axis; None if no instruction takes time."""
        return max((file.lanes.span for file in self.files), default=0.0) or None

    def timelines(self) -> list[Any]:
        """Build the lanes of each file on the time axis of the longest."""
        left = parts.gutter(*(file.lanes for file in self.files))
        shown: list[Any] = []
        for place, file in enumerate(self.files):
            if not len(file.lanes):
                shown.append(parts.empty(f"{file.name} holds no instruction.", "Its programs are empty."))
                continue
            dead = ", ".join(map(str, sorted(file.schedule.failed)))
            title = f"{file.name}: {file.schedule.shape}" + (f", {dead} failed" if dead else "")
            drawn = lanes_view(
                title,
                file.lanes,
                f"{self.prefix}-{place}",
                self.cache,
                explainer=file.explainer,
                span=self.span,
                left=left,
                linked=self.prefix,
                place=place,
            )
            shown.append(drawn)
        return shown

    def times(self) -> str:
        """Describe the default times of files without stated times."""
        named: dict[float, list[str]] = {}
        for file in self.files:
            if file.chunk_time is not None:
                named.setdefault(file.chunk_time, []).append(file.name)
        ran = [file.name for file in self.files if file.executed]
        executed = f"{', '.join(ran)}: as executed, in seconds." if ran else ""
        if not named:
            return executed
        chunks = "; ".join(f"{time:.3g} in {', '.join(names)}" for time, names in sorted(named.items(), reverse=True))
        said = f"Each of F, I and W takes 1 for all that a worker hosts of the model, so for a chunk {chunks}."
        return f"{said} {executed}".strip()

    def figures(self) -> tuple[list[str], list[list[parts.Cell]]]:
        """Return head and rows of the table of figures, a column per file."""
        head, rows = figures_beside([(file.name, file.explainer) for file in self.files])
        for name, values in _LARGEST.items():
            largest = [max(values(file.timeline), default=None) if file.timeline else None for file in self.files]
            rows.append([name, *largest])
        limits = [str(plan.layout_limit) if plan and plan.layout_limit else None for plan in map(_plan, self.files)]
        if any(limits):
            rows.append(["no layer moves", *limits])
        rows.append(["optimizer", *(file.schedule.optimizer for file in self.files)])
        rows.append(["checker", *(_verdict(file) for file in self.files)])
        return head, rows

    def layout_of(self, file: ScheduleFile) -> Any:
        """Build the layers that each worker of a cut hosts, keeps and copies, with the sources."""
        schedule = file.schedule
        if not schedule.shape.cut:
            return []
        plan = _plan(file)
        moves = plan.moves if plan else ()
        rows: list[list[parts.Cell]] = []
        for worker in schedule.live:
            mine = [move for move in moves if move.worker == str(worker)]
            hosted = [unit for run in schedule.unit_runs(worker) for unit in range(*run)]
            had = [unit for unit in hosted if not any(unit in range(*move.units) for move in mine)]
            copied = ", ".join(f"{_runs(range(*move.units))} from {move.source}" for move in mine)
            amount = sum(move.bytes for move in mine)
            rows.append([str(worker), _runs(hosted), _runs(had), copied, amount or None])
        head = ("worker", "hosts layers", "of these it had", "copies layers", "bytes")
        count = len({move.worker for move in moves})
        title = f"Layout of {file.name}: {parts.counted(count, 'worker')} {'takes' if count == 1 else 'take'} on layers"
        shown = [row for row in rows if row[3]] + [row for row in rows if not row[3]]
        if len(shown) > WORKERS_SHOWN:
            title += f"; {WORKERS_SHOWN} of {len(shown)} workers, those that copy first"
        return html.Details(
            [html.Summary(title), parts.table(head, shown[:WORKERS_SHOWN])], className="card", open=bool(moves)
        )

    def findings(self, file: ScheduleFile) -> html.Section:
        return parts.findings(f"Findings in {file.name}", file.findings, FINDINGS_SHOWN)


def _plan(file: ScheduleFile) -> Plan | None:
    try:
        return Plan.from_schedule(file.schedule)
    except PlanError:
        return None


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
    return ", ".join(parts.counted(count, what) for count, what in counts if count) or "valid"
