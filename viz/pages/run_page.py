"""The page of a run: losses, live workers, promised and measured figures of plans, planned and executed steps."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from dash import Dash, Output, ctx, dcc, html, no_update

from viz.figures.charts import curves_figure, event_text
from viz.lane_cache import TimedLanes
from viz.lanes import LaneTable
from viz.pages import parts
from viz.pages.lanes_view import lanes_view, static_timelines
from viz.pages.page import Mode, PageOfRun, keep_in_address

MAX_EVENTS = 60


class RunPage(PageOfRun):
    kind = "run"
    has_lanes, first_panel = True, "run"

    @property
    def title(self) -> str:
        return self.run.name

    @property
    def begins_with_graph(self) -> bool:
        return bool(self.run.steps)

    def layout(self) -> Mode:
        run = self.run
        follow = dcc.Checklist(
            {"follow": "Follow the newest step"},
            ["follow"] if run.live else [],
            id=self.name("follow"),
            className="" if run.live else "hidden",
        )
        slider = dcc.Slider(id=self.name("step"), **self.slider(), step=1, included=False)
        attempt = [html.Span("Attempt"), dcc.RadioItems(id=self.name("attempt"), inline=True)]
        controls = parts.div(
            "controls" if run.steps else "controls hidden",
            parts.div("following", html.Div(self.player(), id=self.name("moments")), follow),
            parts.div("step", html.Label("Step", htmlFor=self.name("step")), slider),
            parts.div("choices", html.Div(attempt, id=self.name("attempts"))),
            id=self.name("controls"),
        )
        panels = {
            "Run": html.Div(self.overview(), id=self.name("overview")),
            "Events": html.Div(self.events(), id=self.name("events")),
        }
        return Mode(
            [],
            panels,
            [
                controls,
                self.ticks(),
            ],
            self.name("timelines"),
        )

    def slider(self) -> dict[str, Any]:
        steps = self.run.steps or [0]
        marks = {steps[0]: str(steps[0]), steps[-1]: str(steps[-1])}
        marks |= {segment.first: str(segment.first) for segment in self.run.segments}
        first = self.newest_step() if self.run.live else self.run.step_to_show
        tooltip = {"placement": "bottom", "always_visible": False}
        return {"min": steps[0], "max": steps[-1], "marks": marks, "value": first, "tooltip": tooltip}

    def player(self) -> html.Div:
        """Build the buttons of `assets/modules/player.js`."""
        run, steps = self.run, self.run.steps or [0]
        changes = sorted({steps[0], steps[-1], *(segment.first for segment in run.segments)})
        buttons = [
            html.Button(text, title=title, **parts.attributes(aria_label=title, data_go=move))
            for move, (text, title) in _MOVES.items()
        ]
        moments = [
            html.Button(f"{title}: step {step}", **parts.attributes(data_step=str(step)))
            for title, step in run.notable_steps
        ]
        attributes = parts.attributes(
            data_slider=self.name("step"), data_follow=self.name("follow"), data_changes=json.dumps(changes)
        )
        return parts.div("player", *buttons, parts.div("moments", *moments), **attributes)

    def newest_step(self) -> int | None:
        """Return the last committed step that was traced, or else the last committed step."""
        traced = set(self.run.trace.steps) if self.run.trace else set()
        steps = self.run.steps
        return next((step for step in reversed(steps) if step in traced), steps[-1] if steps else None)

    def overview(self) -> list[Any]:
        run = self.run
        hint = f"Losses appear here as {run.path / 'metrics.jsonl'} grows."
        curves: Any = parts.empty_state("No step is committed yet.", hint)
        if run.metrics:
            figure = curves_figure(run.metrics, run.events)
            curves = parts.div("figure-view", parts.graph(figure, self.name("curves")))
        return [
            parts.problems(run.problems),
            parts.chips(self.facts()),
            parts.card("Loss and live workers", curves),
        ]

    def static_content(self) -> list[Any]:
        problems, *overview = self.overview()
        heading = html.H2(self.run.name, className="source")
        timelines = static_timelines(self.prefix, self.run.panels(), "No iteration ran yet.")
        return [problems, heading, *overview, timelines, parts.card("Events", self.events())]

    def events(self) -> Any:
        return parts.table(*events_table(self.run.events)) if self.run.events else parts.empty_state("No events yet.")

    def facts(self) -> list[str]:
        run = self.run
        words = [str(run.shape)] if run.shape else []
        if run.metrics:
            last = run.metrics[-1]
            words.append(f"{parts.count_text(len(run.metrics), 'step')} committed")
            if isinstance(last.get("loss"), int | float):
                words.append(f"last loss {last['loss']:.5g}")
            if run.evaluations:
                step, loss = max(run.evaluations.items())
                words.append(f"evaluation loss {loss:.5g} after step {step}")
            if last.get("live_workers") is not None:
                total = f" of {run.shape.worker_count}" if run.shape else ""
                words.append(f"{last['live_workers']}{total} workers alive")
        if deaths := run.further_deaths:
            least = min(deaths)
            weakest = ", ".join(str(stage) for stage, count in enumerate(deaths) if count == least)
            stages_text = "each stage" if max(deaths) == least else f"stage {weakest}"
            words.append(
                f"{parts.count_text(least, 'more host')} of {stages_text} can fail without losing an optimizer shard"
            )
        words.append("finished" if not run.live else "running" if run.is_active else "ended early or stalled")
        return words

    def timelines(self, step: int | None, attempt: int | None) -> tuple[Any, Any, Any, str]:
        """Build the planned and executed lanes of a step with its evaluation, and the choice of attempt.

        Returns:
            The lanes; options, value and class of the choice.
        """
        run = self.run
        if not run.steps:
            return (
                parts.empty_state("No iteration ran yet.", "Timelines appear with the first one."),
                [],
                None,
                "hidden",
            )
        step = run.steps[0] if step is None else step
        attempts = run.generations_of(step)
        chosen = attempt if attempt in attempts else attempts[-1] if attempts else None
        options = [
            {"label": f"generation {g}" + ("" if g == attempts[-1] else " (aborted)"), "value": g} for g in attempts
        ]
        planned, executed, evaluated = (
            run.planned_lanes(step, chosen),
            run.executed_lanes(step, chosen),
            run.evaluation_lanes(step),
        )
        left = parts.gutter(*(lanes.table for lanes in (planned, executed, evaluated) if lanes is not None))

        def view(part: str, title: str, lanes: TimedLanes) -> html.Div:
            return lanes_view(title + _failed(lanes.table), lanes, self.name(part), self.cache, left=left)

        views: list[Any] = []
        if planned is None:
            digest = run.plan_of(step, chosen)
            unreadable = f"The plan {digest} of step {step} cannot be read."
            reason = unreadable if digest else f"No plan is known for step {step}."
            views.append(parts.empty_state(reason, f"Plans are in {run.path / 'plans'}."))
        else:
            views.append(view("planned", f"Planned, step {step}", planned))
        if executed is None:
            hint = "An iteration is traced once it is complete." if run.live else ""
            views.append(parts.empty_state(f"Step {step} was not traced.", hint))
        else:
            views.append(view("executed", f"Executed, step {step}", executed))
        if evaluated is not None:
            loss = run.evaluations.get(step)
            title = f"Evaluation after step {step}" + ("" if loss is None else f", loss {loss:.5g}")
            views.append(view("evaluated", title, evaluated))
        return views, options, chosen, "" if len(attempts) > 1 else "hidden"

    def register(self, app: Dash) -> None:
        keep_in_address(app, self.name("step"))

        @app.callback(
            self.output("timelines"),
            self.output("attempt", "options"),
            self.output("attempt", "value"),
            self.output("attempts", "className"),
            self.input("step", "value"),
            self.input("attempt", "value"),
        )
        def show_timelines(step: int | None, attempt: int | None) -> Any:
            # A step is shown first as it counted; only the reader's choice shows an aborted attempt.
            chosen = None if ctx.triggered_id == self.name("step") else attempt
            return self.timelines(step, chosen)

        refreshed = {
            "overview": ("children",),
            "moments": ("children",),
            "events": ("children",),
            "controls": ("className",),
            "follow": ("className",),
            "tick": ("disabled",),
            "step": ("min", "max", "marks"),
        }

        @app.callback(
            *(
                Output(self.name(part), property_name)
                for part, properties in refreshed.items()
                for property_name in properties
            ),
            self.output("step", "value"),
            self.input("tick", "n_intervals"),
            self.state("follow", "value"),
            prevent_initial_call=True,
        )
        def read_again(_: int, follow: list[str] | None) -> Any:
            self.refresh()
            newest = self.newest_step() if follow else None
            step = no_update if newest is None else newest
            slider = self.slider()
            controls = "controls" if self.run.steps else "controls hidden"
            follow_class = "" if self.run.live else "hidden"
            page = [self.overview(), self.player(), self.events(), controls, follow_class, not self.run.live]
            return *page, slider["min"], slider["max"], slider["marks"], step


_MOVES = {
    "change before": ("|◀", "Previous change of workers or plan; key Shift+PageUp"),
    "step before": ("◀", "Previous step; key PageUp"),
    "play": ("Play", "Play the steps; key Space"),
    "step after": ("▶", "Next step; key PageDown"),
    "change after": ("▶|", "Next change of workers or plan; key Shift+PageDown"),
}
"""Button of the player -> its text and title."""


def _failed(table: LaneTable) -> str:
    names = ", ".join(str(table.workers[lane]) for lane in table.failed.nonzero()[0].tolist())
    return f": {names} failed" if names else ""


def events_table(events: Sequence[dict[str, Any]]) -> tuple[tuple[str, ...], list[list[parts.Cell]]]:
    rows = [[_seconds(e), event_text(e), e.get("step"), _details(e)] for e in events[-MAX_EVENTS:]]
    return ("time", "event", "step", "details"), rows


def _seconds(event: dict[str, Any]) -> str | None:
    moment = event.get("time")
    return f"{moment:.2f} s" if isinstance(moment, int | float) else None


_NOT_DETAILS = "time", "kind", "worker", "step", "layout_limit"
"""Keys of events with a separate column, or whose content another key describes."""


def _details(event: dict[str, Any]) -> str:
    details = {key: value for key, value in event.items() if key not in _NOT_DETAILS}
    if isinstance(details.get("roles"), dict):
        swapped = {process: role for process, role in details["roles"].items() if process != role}
        details["roles"] = ", ".join(f"{process} has role {role}" for process, role in swapped.items()) or "as started"
    if isinstance(details.get("live"), list):
        details["live"] = f"{len(details['live'])} workers"
    return "; ".join(f"{key} {value}" for key, value in details.items())
