"""Drop a schedule file: what is wrong with it, where, and as much of it as can be drawn.

A press on a finding zooms to its place and frames it, with the other end of what does not fit together. Each browser's
file is its own: it stays in that page, of which the server keeps the lanes alone, as it does of any page.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from dash import Dash, dcc, html, no_update

from recycle.errors import RecycleError
from recycle.ir.check import Finding
from viz.dropped import MOST_BYTES, printable, read_dropped
from viz.lanes import LaneTable
from viz.numbers import short
from viz.pages import parts
from viz.pages.lanes_view import lanes_view
from viz.pages.page import Mode, Page, Workspace
from viz.sources import ScheduleFile

FINDINGS_SHOWN = 200
PLACES_SHOWN = 12
"""Of a long circle of waits."""

FORMATS = "native JSON, torch's schedule CSV, a Chrome trace, a trace of torch's profiler, a Megatron table; or gzip"


class ValidatePage(Page):
    """The page that takes files."""

    prefix, title = "validate", "Validate"
    has_lanes, opened = True, "findings"
    invitation = "Drop a schedule file of your own: findings with their rule, and the place of each."

    @classmethod
    def pages_of(cls, workspace: Workspace) -> Sequence[Page]:
        return [cls(workspace.cache)]

    def layout(self) -> Mode:
        formats = html.Span(f" {FORMATS}; up to {MOST_BYTES // 2**20} MB", className="hint")
        words = html.Div([html.Strong("Drop a schedule file here"), html.Span(" or press to choose one."), formats])
        upload = parts.div(
            "row",
            dcc.Upload(words, id=self.name("upload"), className="drop", max_size=MOST_BYTES),
            parts.div("status calm", id=self.name("message"), role="status"),
            **parts.attributes(data_most=str(MOST_BYTES)),
        )
        nothing = parts.empty("No file was dropped yet.", "It is read on this machine and not stored.")
        return Mode(
            [],
            {"Findings": [upload, html.Div(nothing, id=self.name("verdict"))]},
            identifier=self.name("answer"),
        )

    def answer(self, contents: str, name: str) -> tuple[list[Any], list[Any], str, str]:
        """What there is to say of a file as the browser sends it: its lanes; a verdict and findings; what became of it,
        and the class of that line."""
        name = printable(name)
        try:
            file = read_dropped(contents, name)
        except RecycleError as error:
            lanes = parts.empty(
                f"{name} could not be read as a schedule.", "docs/reference/file-format.md describes the files."
            )
            return [lanes], [parts.problems([str(error)])], f"{name}: refused", "status"
        left_out = [f"left out, because it cannot be read: {line}" for line in file.left_out]
        problems = parts.problems([*left_out, *([file.problem] if file.problem else [])])
        panel = [problems, self.verdict(file), self.findings(file)]
        return self.lanes(file), panel, f"{name}: read", "status calm"

    def verdict(self, file: ScheduleFile) -> html.Section:
        """In a line: valid or not, and what it is."""
        schedule = file.schedule
        errors, warnings = file.findings.number("error") + len(file.left_out), file.findings.number("warning")
        count = f" ({parts.counted(errors, 'error')}, {parts.counted(warnings, 'warning')})"
        dead = ", ".join(map(str, sorted(schedule.failed)[:12]))
        words = [f"{schedule.shape}", f"{len(schedule.columns):,} instructions", f"optimizer {schedule.optimizer}"]
        words += [f"failed: {dead}"] if dead else []
        if file.timeline is not None:
            words += [f"makespan {short(file.timeline.makespan)}", f"period {short(file.timeline.period)}"]
        verdict = "Valid" if not errors and not warnings else "Valid, with warnings" if not errors else "Not valid"
        return parts.card(
            f"{file.name}: {verdict}" + ("" if verdict == "Valid" else count),
            parts.chips(words),
        )

    def findings(self, file: ScheduleFile) -> Any:
        """A row per finding, with a button that zooms to it."""
        if not file.findings:
            return []
        buttons: list[parts.Cell] = [
            parts.show_button(places, f"Show where {finding.rule} was found") if places else ""
            for finding, places in ((one, self.places(file, one)) for one in file.findings[:FINDINGS_SHOWN])
        ]
        return parts.findings("Findings", file.findings, FINDINGS_SHOWN, buttons)

    def lanes(self, file: ScheduleFile) -> list[Any]:
        """What can be drawn, with the number of findings on each lane."""
        if not len(file.lanes):
            return [parts.empty(f"{file.name} holds no instruction that takes time, so there are no lanes to draw.")]
        halt = file.lanes.halt
        order = "" if halt is None else f"It runs until {halt:.6g} and hangs. What never runs is pale, back to back."
        table = _badged(file.lanes, Counter(str(finding.worker) for finding in file.findings))
        view = lanes_view(
            file.name,
            table,
            f"{self.prefix}-0",
            self.cache,
            span=table.span or None,
            explainer=file.explainer,
        )
        return [*([parts.hint(order)] if order else []), view]

    def places(self, file: ScheduleFile, finding: Finding) -> list[parts.LaneInterval]:
        """Where a finding lies: its own place first."""
        return [parts.LaneInterval(*place) for place in file.places(finding)[:PLACES_SHOWN]]

    def register(self, app: Dash) -> None:
        """Add the page's callbacks, and the server's limit of what a request may hold."""
        # A dropped file comes as base64 inside JSON; whatever is larger is refused before it is read.
        app.server.config["MAX_CONTENT_LENGTH"] = MOST_BYTES * 4 // 3 + 2**20

        @app.callback(
            self.output("answer"),
            self.output("verdict"),
            self.output("message"),
            self.output("message", "className"),
            self.input("upload", "contents"),
            self.state("upload", "filename"),
            prevent_initial_call=True,
        )
        def check_it(contents: str | None, name: str | None) -> Any:
            if not contents:
                return (no_update,) * 4
            return self.answer(contents, name or "file")


def _badged(table: LaneTable, counts: Mapping[str, int]) -> LaneTable:
    """The lanes with the number of findings beside their names."""
    labels = [
        f"{label} ▲{counts[str(worker)]}" if str(worker) in counts else label
        for label, worker in zip(table.labels, table.workers, strict=True)
    ]
    return replace(table, labels=tuple(labels))
