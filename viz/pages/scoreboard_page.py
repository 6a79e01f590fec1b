"""The page that ranks several schedules: their figures and lanes in a table, and memory against period."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from dash import Dash, Input, html, no_update

from recycle.errors import RecycleError
from viz.details import Figure, exceeds_limit, figures
from viz.figures.charts import memory_period_figure
from viz.lane_cache import TimedLanes, lanes_address, release_memory
from viz.pages import parts
from viz.pages.page import TABS, Mode, Page, Workspace
from viz.pages.scenario import INPUTS
from viz.scenario import AS_GIVEN, PageModel, Scenario
from viz.sources import ScheduleFile

FIRST = 3
"""Number of schedules from which the page is the first."""
MAX_PICTURED = 300_000
"""Maximum instructions of all schedules for pictures of their lanes."""
OVER = "over the limit"
SHARED_TIMES = "F, I and W each take 1 for a worker's whole part of the model, 1/V for each of its V chunks."
_PICK = "Press two rows to compare them, a head to sort."


class ScoreboardPage(Page):
    prefix, title = "scoreboard", "Scoreboard"
    has_lanes, first_panel = True, "scenario"

    @classmethod
    def count(cls, workspace: Workspace) -> int:
        return len(workspace.files) >= FIRST

    def layout(self) -> Mode:
        return Mode([], {})

    def content(self, scenario: Scenario) -> list[Any]:
        """Build table and plot. Raises RecycleError for a scenario that does not fit the schedules."""
        files = self.workspace.files
        ranked = rank(files, self.cache, scenario)
        best = f"{ranked[0].file.name} is the fastest." if ranked[0].is_usable else "None can be used."
        caption = f"{best} {times_text(files)} {_PICK}"
        content = [parts.card("Schedules", self.table_of(ranked), caption=caption)]
        plotted = [row for row in ranked if {"period", "peak memory"} <= row.figures.keys()]
        points = [[row.file.name, *(row.figures[name].number for name in ("period", "peak memory"))] for row in plotted]
        if points:
            in_bytes = all("B" in row.figures["peak memory"].value for row in plotted)
            figure = memory_period_figure(points, f"peak memory ({'bytes' if in_bytes else 'activations'})")
            plot = parts.figure_view(figure, self.name("plot"), "Peak memory of each schedule against its period")
            content.append(parts.card("Memory against period", plot, caption="The lower left is best."))
        return [html.Div(content, className="wide")]

    def table_of(self, ranked: Sequence[RankedSchedule]) -> html.Div:
        """Build a row per schedule with its lanes and figures, to sort and to pick."""
        names, files = dict.fromkeys(name for row in ranked for name in row.figures), self.workspace.files
        is_pictured = sum(len(file.lanes) for file in files) <= MAX_PICTURED
        rows = []
        for file, entry, by_name, verdict in ranked:
            key = f"file/{files.index(file)}" if file.timeline is not None else None
            title, index = str(file.schedule.shape), "0" if key else None
            cells: list[object] = [parts.tag(html.Span, file.name, title=title, data_pick=key, tabIndex=index)]
            if is_pictured:
                timed, given = (lanes_address(self.cache.put(lanes)) for lanes in (entry, file.timed))
                cells.append(parts.div("lanes-spark", data_address=timed, data_original=given, data_title=file.name))
            for name in names:
                figure = by_name.get(name)
                cells.append(figure and parts.tag(html.Span, figure.value, data_sort=str(figure.number)))
            rows.append([*cells, verdict])
        head = ["", *(["lanes"] * is_pictured), *names, "checker"]
        return parts.table(head, rows, "scoreboard")

    def register(self, app: Dash) -> None:
        @app.callback(self.output("lanes"), Input(TABS, "value"), *INPUTS)
        def show(page: str, times: str, workers: str) -> Any:
            if page != self.prefix:
                return no_update
            try:
                content = self.content(Scenario.of(times, workers))
            except RecycleError as error:
                return parts.problems([str(error)])
            release_memory()
            return content


class RankedSchedule(NamedTuple):
    file: ScheduleFile
    entry: TimedLanes
    figures: dict[str, Figure]
    verdict: str

    @property
    def is_usable(self) -> bool:
        return "period" in self.figures and self.verdict != OVER and not self.file.findings.number("error")


def rank(files: Sequence[ScheduleFile], model: PageModel, scenario: Scenario = AS_GIVEN) -> list[RankedSchedule]:
    """Return the schedules under a scenario: valid ones within their limits first, of these the shortest period.

    Raises JobError or PlanError.
    """
    ranked = []
    for file in files:
        entry = model.entry(file.timed, scenario)
        by_name = {each.name: each for each in figures(entry.context, entry.unit)}
        is_over = entry.context is not None and exceeds_limit(entry.context)
        ranked.append(RankedSchedule(file, entry, by_name, OVER if is_over else verdict(file)))

    def place(row: RankedSchedule) -> tuple[bool, float]:
        return not row.is_usable, row.figures["period"].number if "period" in row.figures else float("inf")

    return sorted(ranked, key=place)


def times_text(files: Sequence[ScheduleFile]) -> str:
    """Describe which times apply to files without stated times and to executed files."""
    executed = ", ".join(file.name for file in files if file.executed)
    words = [SHARED_TIMES] * any(file.chunk_time is not None for file in files)
    return " ".join([*words, *([f"{executed}: as executed, in seconds."] if executed else [])])


def verdict(file: ScheduleFile) -> str:
    """Return "valid", or the numbers of errors and warnings in a file."""
    counts = {"error": file.findings.number("error") + len(file.left_out), "warning": file.findings.number("warning")}
    return ", ".join(parts.count_text(count, severity) for severity, count in counts.items() if count) or "valid"
