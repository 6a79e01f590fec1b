"""Start pages: the page of `recycle view` without arguments, and the list of runs in folders.

A folder has a line per run, newest first. The newest runs open as pages, the others by a command in their line.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dash import Dash, dcc, html

from recycle.runs.logs import TRACE
from viz.figures.charts import run_figure
from viz.numbers import is_number
from viz.pages import parts
from viz.pages.page import Page, Workspace, keep_in_address, opener
from viz.run_files import content_of, last_written, read_metrics, read_objects, runs_in

HEAD = ("run", "last written", "steps", "last loss", "seconds per step", "tokens/s", "workers alive", "failures", "")
LISTED = 200
CAPTION = "Newest first. Press rows to compare their runs, a head to sort."
COMPARED = "step", "tokens_per_second", "seconds", "loss"


class RunsPage(Page):
    prefix, title = "runs", "Runs"

    @classmethod
    def count(cls, workspace: Workspace) -> int:
        return bool(workspace.run_folders)

    def layout(self) -> html.Div:
        chosen = dcc.Input(id=self.name("chosen"), type="text", value="", className="hidden")
        folders = [self.listed(folder) for folder in self.workspace.run_folders]
        return html.Div([*folders, chosen, html.Div(id=self.name("compared"))])

    def compared(self, names: Sequence[str]) -> list[Any]:
        """Build the curves of runs over time, by the names of their folders."""
        paths = {path.name: path for folder in self.workspace.run_folders for path in runs_in(folder)}
        runs = {name: with_seconds(read_metrics(paths[name], [])) for name in names if name in paths}
        if not any(runs.values()):
            return []
        figure, description = run_figure(runs, COMPARED, "time"), f"Progress of {', '.join(runs)} over time"
        view = parts.figure_view(figure, self.name("curves"), description)
        return [parts.card("Runs over time", view, caption="Press a row again to remove its run.")]

    def register(self, app: Dash) -> None:
        chosen = self.input("chosen", "value")
        keep_in_address(app, self.name("chosen"))
        parts.in_browser(app, "markPicked", self.output("chosen", "title"), chosen)

        @app.callback(self.output("compared"), chosen)
        def compare(names: str) -> Any:
            return self.compared(names.split("/"))

    def listed(self, folder: Path) -> html.Section:
        runs = runs_in(folder)
        opened = {live.run.path.resolve(): f"run{place}" for place, live in enumerate(self.workspace.runs)}
        rows = []
        for path in runs[:LISTED]:
            page = opened.get(path.resolve())
            command = html.Code(f"recycle view {path}")
            show = parts.button("Open", opener(page), f"Open {path.name}") if page is not None else command
            pick = {"data_pick": path.name, "data_target": self.name("chosen"), "tabIndex": "0"}
            rows.append([parts.tag(html.Span, path.name, **pick), *summary(path), show])
        count_text = f" The newest {LISTED} of {len(runs):,}." if len(runs) > LISTED else ""
        return parts.card(f"Runs in {folder}", parts.table(HEAD, rows, "scoreboard"), caption=f"{CAPTION}{count_text}")


def summary(run: Path) -> list[object]:
    """Return the cells of a run between name and button, see HEAD; unreadable values are left out."""
    metrics, events = read_metrics(run, []), read_objects(run / "events.jsonl", [])
    last = metrics[-1] if metrics else {}
    steps = [line["seconds"] for line in with_seconds(metrics) if line["seconds"] is not None]
    speeds = [line["tokens_per_second"] for line in metrics if is_number(line.get("tokens_per_second"))]
    loss, alive = last.get("loss"), last.get("live_workers")
    failures = sum(event.get("kind") == "fault" for event in events)
    written = max(map(last_written, [run, *content_of(run)]))
    moment = time.strftime("%Y-%m-%d %H:%M", time.localtime(written))
    return [
        moment if (run / TRACE).exists() else f"{moment}, not finished",
        len(metrics),
        f"{loss:.5g}" if isinstance(loss, int | float) else None,
        f"{statistics.median(steps):.3g}" if steps else None,
        f"{statistics.median(speeds):,.0f}" if speeds else None,
        alive if isinstance(alive, int) else None,
        failures,
    ]


def with_seconds(metrics: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Add the seconds since the commit before to each line; None if either time is unknown."""
    result, before = [], None
    for line in metrics:
        now = line.get("time") if is_number(line.get("time")) else None
        result.append({**line, "seconds": None if before is None or now is None else now - before})
        before = now
    return result


EXAMPLES = (
    "3 pipelines of 4 stages with 6 micro-batches each, once with all workers and once without worker 1.2, in units of"
    " one forward."
)
LOCAL = "The page is served only to this machine and loads nothing from other servers."
FORMS = {
    "FILE …": "schedules, plans and traces: lanes, findings and comparisons",
    "RUN_DIR": "a run, also while it trains: its steps as planned and as executed, losses, and where its time went",
    "JOB.toml [LIBRARY]": "plans of a job for any failed workers",
    "--families -P 4 -m 8": "the known schedules of a shape, ranked",
    "--help": "all forms and options",
}
"""Arguments of the command -> what the viewer shows for them."""


class StartPage(Page):
    prefix, title = "start", "Start"

    @classmethod
    def count(cls, workspace: Workspace) -> int:
        return workspace.is_example

    def layout(self) -> html.Div:
        links = [
            html.Button([html.Strong(page.title), html.Span(page.invitation)], id=opener(page.prefix), n_clicks=0)
            for page in self.workspace.pages
            if page.invitation
        ]
        examples = parts.card("Examples, because no file was given", parts.div("start", *links), caption=EXAMPLES)
        commands = parts.table(("", ""), [(html.Code(f"recycle view {form}"), what) for form, what in FORMS.items()])
        return html.Div([examples, parts.card("View your own files", commands, caption=LOCAL)])
