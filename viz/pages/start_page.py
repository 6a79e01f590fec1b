"""What `recycle view` shows when it is given nothing: what the viewer does, examples to open, and the commands."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dash import Dash, html

from viz.pages import parts
from viz.pages.page import Page, Workspace, open_by_buttons

COMMANDS = (
    ("recycle view plan.json", "a schedule: its lanes, figures and findings"),
    ("recycle view fault-free.json adaptive.json", "two schedules on one time axis"),
    ("recycle view runs/latest", "a run, finished or live: losses, failures, planned and executed steps"),
    ("recycle view runs", "all runs of a folder: when, steps, losses, speed, failures"),
    ("recycle view job.toml", "plans of a job: press workers to fail them, and see who takes over"),
    ("recycle view job.toml plans", "the same with a library of plans, and the library itself"),
    ("recycle view comparison.json", "resilience systems over a failure trace, from recycle compare"),
    ("recycle view plan.json --export plan.svg", "a picture; .html for a page that needs no server"),
)


class StartPage(Page):
    """The page that comes first when no file was given."""

    prefix, title = "start", "Start"

    def __init__(self, workspace: Workspace) -> None:
        super().__init__()
        self.workspace = workspace

    @classmethod
    def pages_of(cls, workspace: Workspace) -> Sequence[Page]:
        return [cls(workspace)] if workspace.is_example else []

    def layout(self) -> html.Div:
        """A button for each page that has an invitation, and the commands."""
        links = [
            html.Button(
                [html.Strong(page.title), html.Span(page.invitation)],
                id={"type": self.name("link"), "page": page.prefix},
                n_clicks=0,
            )
            for page in self.workspace.pages
            if page.invitation
        ]
        rows: list[Any] = [html.Tr([html.Td(html.Code(command)), html.Td(text)]) for command, text in COMMANDS]
        words = (
            "3 pipelines of 4 stages with 6 micro-batches each, once with all workers and once without worker 1.2, in"
            " units of one forward."
        )
        examples = html.P(words, className="says"), parts.div("start", *links)
        commands = parts.div("facts commands", html.Table(html.Tbody(rows)))
        caption = "The page is served to this machine alone and loads nothing from elsewhere."
        return html.Div(
            [
                parts.card("Nothing was given to show, so here are examples", *examples),
                parts.card("To see your own", commands, caption=caption),
            ]
        )

    def register(self, app: Dash) -> None:
        open_by_buttons(app, self.name("link"))
