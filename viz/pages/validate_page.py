"""Drop a schedule file: what is wrong with it, where, and as much of it as can be drawn.

A press on a finding zooms to its place and frames it, with the other end of what does not fit together. Each browser's
file is its own: it stays in that page, on the server only the last few are kept, by content.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from dash import ALL, ClientsideFunction, Dash, Input, Output, State, ctx, dcc, html, no_update

from recycle.ir.check import Finding, explain
from viz.bounded_cache import BoundedCache
from viz.dropped import MOST_BYTES, Dropped, read_dropped
from viz.free_memory import release_memory
from viz.lane_cache import Explainer, LaneCache
from viz.lanes import LaneTable
from viz.pages import linked, parts
from viz.pages.lanes_view import lanes_view
from viz.pages.page import Page, Workspace

FINDINGS_SHOWN, KEPT, KEPT_INSTRUCTIONS = 200, 4, 1_000_000
PLACES_SHOWN = 12
"""Of a long circle of waits."""

FORMATS = "native JSON, torch's schedule CSV, a Chrome trace, a Megatron table"


class ValidatePage(Page):
    """The page that takes files; `prefix` keeps its component names apart from other pages'."""

    title = "Validate"
    invitation = "Drop a schedule file of your own: findings with their rule, and the place of each."

    def __init__(self, cache: LaneCache | None = None, prefix: str = "validate") -> None:
        self.cache = cache or LaneCache()
        self.prefix = prefix
        self._files: BoundedCache[str, Dropped] = BoundedCache(KEPT_INSTRUCTIONS, _instructions, at_most=KEPT)

    @classmethod
    def pages_of(cls, workspace: Workspace) -> Sequence[Page]:
        return [cls(workspace.cache)]

    def layout(self) -> html.Div:
        return html.Div(
            [
                parts.card(
                    "Check a schedule",
                    dcc.Upload(
                        html.Div(
                            [
                                html.Strong("Drop a schedule file here"),
                                html.Span(" or press to choose one."),
                                html.P(f"{FORMATS}; up to {MOST_BYTES // 2**20} MB"),
                            ]
                        ),
                        id=self.name("upload"),
                        className="drop",
                        max_size=MOST_BYTES,
                    ),
                    dcc.Store(id=self.name("limit"), data=MOST_BYTES),
                    html.Div(id=self.name("message"), role="status", className="status calm"),
                    caption="The file is read on this machine and not stored.",
                ),
                *linked.stores(self.prefix),
                dcc.Store(id=self.name("file")),
                parts.awaited(self.name("answer")),
            ]
        )

    def take(self, contents: str, name: str) -> tuple[str, Dropped]:
        """Read a dropped file and keep it for a while; its key and what came of it."""
        key = hashlib.sha256(f"{name}\n{contents}".encode("utf-8", "replace")).hexdigest()[:32]
        known = self._files.get(key)
        if known is None:
            known = self._files.put(key, read_dropped(contents, name))
            release_memory()
        return key, known

    def kept(self, key: str | None) -> Dropped | None:
        """A file that was taken, unless newer ones have taken its place."""
        return self._files.get(key or "")

    def answer(self, file: Dropped) -> list[Any]:
        """What there is to say of a file: a verdict, findings, lanes."""
        if file.schedule is None:
            return [
                parts.problems([file.problem]),
                parts.empty(
                    f"{file.name} could not be read as a schedule.", "docs/file-format.md describes the files."
                ),
            ]
        errors = sum(finding.severity == "error" for finding in file.findings) + len(file.left_out)
        warnings = sum(finding.severity == "warning" for finding in file.findings)
        left_out = [f"left out, because it cannot be read: {line}" for line in file.left_out]
        problems = [*left_out, *([file.problem] if file.problem else [])]
        verdict = self.verdict(file, errors, warnings)
        return [parts.problems(problems), verdict, self.findings(file), self.lanes(file)]

    def verdict(self, file: Dropped, errors: int, warnings: int) -> html.Section:
        """In a line: valid or not, and what it is."""
        assert file.schedule is not None
        schedule = file.schedule
        count = [f"{errors:,} error{'s' * (errors != 1)}", f"{warnings:,} warning{'s' * (warnings != 1)}"]
        dead = ", ".join(map(str, sorted(schedule.failed)[:12]))
        words = [f"{schedule.shape}", f"{len(schedule.columns):,} instructions", f"optimizer {schedule.optimizer}"]
        words += [f"failed: {dead}"] if dead else []
        if file.timeline is not None:
            words += [f"makespan {file.timeline.makespan:.6g}", f"period {file.timeline.period:.6g}"]
        verdict = "Valid" if not errors and not warnings else "Valid, with warnings" if not errors else "Not valid"
        return parts.card(
            f"{file.name}: {verdict}" + ("" if verdict == "Valid" else f" ({', '.join(count)})"),
            html.P([html.Span(word) for word in words], className="chips"),
        )

    def findings(self, file: Dropped) -> Any:
        """A row per finding, with a button that zooms to it."""
        if not file.findings:
            return []
        rows = []
        for place, finding in enumerate(file.findings[:FINDINGS_SHOWN]):
            rule = explain(finding.rule)
            where = " ".join(
                filter(None, [finding.worker, f"#{finding.position}" if finding.position is not None else ""])
            )
            button: Any = ""
            if file.places(finding):
                button = html.Button(
                    "Show it",
                    id={"type": self.name("finding"), "place": place},
                    n_clicks=0,
                    className="quiet",
                    title=f"Show where {finding.rule} was found",
                )
            rows.append(
                [
                    html.Span(finding.severity, className=f"severity {finding.severity}"),
                    html.Abbr(finding.rule, title=rule.documentation if rule else ""),
                    where or None,
                    html.Code(finding.instruction) if finding.instruction else None,
                    html.Div([finding.message, html.Div(finding.hint, className="hint")]),
                    button,
                ]
            )
        head = ("", "rule", "worker, position", "instruction", "what is wrong, and what to do", "")
        more = len(file.findings) - FINDINGS_SHOWN
        caption = f"The first {FINDINGS_SHOWN}; {more:,} more from `recycle check`." if more > 0 else ""
        return parts.card("Findings", parts.table(head, rows, "findings"), caption=caption)

    def lanes(self, file: Dropped) -> Any:
        """What can be drawn, with the number of findings on each lane."""
        if file.lanes is None or not len(file.lanes):
            return parts.empty(f"{file.name} holds no instruction that takes time, so there are no lanes to draw.")
        halt = file.lanes.halt
        order = "" if halt is None else f"It runs until {halt:.6g} and hangs. What never runs is pale, back to back."
        table = _badged(file.lanes, _per_worker(file.findings))
        explainer = Explainer(file.timeline) if file.timeline else None
        view = lanes_view(
            file.name,
            table,
            f"{self.prefix}-0",
            self.cache,
            linked=self.prefix,
            span=table.span or None,
            explainer=explainer,
        )
        return parts.card("Lanes", linked.linked(self.prefix, view), parts.legend(), caption=order)

    def place_of(self, file: Dropped, finding: Finding) -> dict[str, Any] | None:
        """Where a finding lies, for `linked.goto`."""
        places = file.places(finding)[:PLACES_SHOWN]
        return linked.goto([linked.LaneInterval(*place) for place in places]) if places else None

    def register(self, app: Dash) -> None:
        """Add the page's callbacks, and the server's limit of what a request may hold."""
        # A dropped file comes as base64 inside JSON; whatever is larger is refused before it is read.
        app.server.config["MAX_CONTENT_LENGTH"] = MOST_BYTES * 4 // 3 + 2**20
        linked.register(app, self.prefix)

        in_browser: Any = app.clientside_callback
        in_browser(
            ClientsideFunction("recycle", "refuse"),
            Output(self.name("limit"), "data", allow_duplicate=True),
            Input(self.name("limit"), "data"),
            State(self.name("upload"), "id"),
            State(self.name("message"), "id"),
            prevent_initial_call="initial_duplicate",
        )

        @app.callback(
            Output(self.name("answer"), "children"),
            Output(self.name("file"), "data"),
            Output(self.name("message"), "children"),
            Output(self.name("message"), "className"),
            Input(self.name("upload"), "contents"),
            State(self.name("upload"), "filename"),
            prevent_initial_call=True,
        )
        def check_it(contents: str | None, name: str | None) -> Any:
            if not contents:
                return no_update, no_update, no_update, no_update
            key, file = self.take(contents, name or "file")
            verdict = (f"{file.name}: read", "status calm") if file.schedule else (f"{file.name}: refused", "status")
            return self.answer(file), key, *verdict

        @app.callback(
            Output(self.name("goto"), "data"),
            Input({"type": self.name("finding"), "place": ALL}, "n_clicks"),
            State(self.name("file"), "data"),
            prevent_initial_call=True,
        )
        def go(clicks: list[int], key: str | None) -> Any:
            pressed, file = ctx.triggered_id, self.kept(key)
            if pressed is None or not any(clicks) or file is None or pressed["place"] >= len(file.findings):
                return no_update
            return self.place_of(file, file.findings[pressed["place"]]) or no_update


def _instructions(file: Dropped) -> int:
    return len(file.schedule.columns) if file.schedule else 0


def _per_worker(findings: Sequence[Finding]) -> dict[str, int]:
    counts: dict[str, int] = {}
    for finding in findings:
        if finding.worker is not None:
            counts[finding.worker] = counts.get(finding.worker, 0) + 1
    return counts


def _badged(table: LaneTable, counts: dict[str, int]) -> LaneTable:
    """The lanes with the number of findings beside their names."""
    labels = [
        f"{label} ▲{counts[str(worker)]}" if str(worker) in counts else label
        for label, worker in zip(table.labels, table.workers, strict=True)
    ]
    return replace(table, labels=tuple(labels))
