"""What `recycle view` shows when it is given nothing: what the viewer does, examples to open, and the commands."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from dash import ALL, Dash, Input, Output, ctx, html, no_update

from viz.pages import parts


class Door(NamedTuple):
    """A page to open from here: its prefix, and what one finds behind it."""

    prefix: str
    title: str
    text: str


COMMANDS = (
    ("recycle view plan.json", "a schedule: its lanes, figures and findings"),
    ("recycle view fault-free.json adaptive.json", "two schedules on one time axis"),
    ("recycle view runs/latest", "a run, finished or live: losses, failures, planned and executed steps"),
    ("recycle view job.toml", "plans of a job: press workers to fail them, and see who takes over"),
    ("recycle view job.toml plans", "the same with a library of plans, and the library itself"),
    ("recycle view comparison.json", "resilience systems over a failure trace, from recycle compare"),
    ("recycle view plan.json --export plan.svg", "a picture; .html for a page that needs no server"),
)
_TEXTS = {
    "schedules": "Lanes of a classic schedule and of one without a worker, whose micro-batches its peers run.",
    "explain": "Why it takes that long: the critical path, bubbles by cause, memory, a search.",
    "compare": "Both on one axis: who starts later, where the time goes, where they part.",
    "plans": "Press a worker to fail it. The plan is made on the spot; the one before stays as an outline.",
    "validate": "Drop a schedule file of your own: findings with their rule, and the place of each.",
}


class StartPage:
    """The page that comes first without any file; `others` are the pages to open from it."""

    title = "Start"

    def __init__(self, others: Sequence[tuple[str, str]], prefix: str = "start") -> None:
        self.prefix = prefix
        self.doors = [Door(name, title, _TEXTS[name]) for name, title in others if name in _TEXTS]

    def layout(self) -> html.Div:
        doors = [
            html.Button(
                [html.Strong(door.title), html.Span(door.text)],
                id={"type": f"{self.prefix}-door", "page": door.prefix},
                n_clicks=0,
            )
            for door in self.doors
        ]
        rows: list[Any] = [html.Tr([html.Td(html.Code(command)), html.Td(text)]) for command, text in COMMANDS]
        return html.Div(
            [
                parts.card(
                    "Nothing was given to show, so here are examples",
                    html.P(
                        "3 pipelines of 4 stages with 6 micro-batches each, once with all workers and once without"
                        " worker 1.2, in units of one forward.",
                        className="says",
                    ),
                    html.Div(doors, className="start"),
                ),
                parts.card(
                    "To see your own",
                    html.Div(html.Table(html.Tbody(rows)), className="facts commands"),
                    caption="The page is served to this machine alone and loads nothing from elsewhere.",
                ),
            ]
        )

    def register(self, app: Dash) -> None:
        """Add the page's callback."""

        @app.callback(
            Output("pages", "value", allow_duplicate=True),
            Input({"type": f"{self.prefix}-door", "page": ALL}, "n_clicks"),
            prevent_initial_call=True,
        )
        def open_page(clicks: list[int]) -> Any:
            return ctx.triggered_id["page"] if ctx.triggered_id is not None and any(clicks) else no_update
