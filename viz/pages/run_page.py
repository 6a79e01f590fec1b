"""The page of a run: losses, live workers, promised and measured figures of plans, planned and executed steps."""

from __future__ import annotations

import json
from typing import Any

import plotly.graph_objects as go
from dash import Dash, dcc, html, no_update, set_props

from viz.figures.charts import event_text, run_figure
from viz.lane_cache import TimedLanes
from viz.lanes import LaneTable, with_common_span
from viz.numbers import is_number, short
from viz.pages import parts
from viz.pages.lanes_view import lanes_view
from viz.pages.page import Mode, PageOfRun, keep_in_address

MAX_EVENTS = 60


class RunPage(PageOfRun):
    kind = "run"
    has_lanes, first_panel = True, "run"

    @property
    def title(self) -> str:
        return self.run.name

    def layout(self) -> Mode:
        state = self.state_of_run()
        follow = dcc.Checklist(
            {"follow": "Follow the newest step"},
            ["follow"] if self.run.live else [],
            id=self.name("follow"),
            **state["follow"],
        )
        slider = dcc.Slider(id=self.name("step"), **self.slider(), step=1, included=False)
        attempt = [html.Span("Attempt"), dcc.RadioItems(id=self.name("attempt"), value="", inline=True)]
        controls = html.Div(
            [
                dcc.Store(id=self.name("newest")),
                parts.div("following", self.player(state), follow),
                parts.div("step", html.Label("Step", htmlFor=self.name("step")), slider),
                parts.div("choices attempts", html.Div(attempt, id=self.name("attempts"))),
            ],
            id=self.name("controls"),
            **state["controls"],
        )
        run, events = (html.Div(id=self.name(part), **state[part]) for part in ("run", "events"))
        panels = {"Run": [run, self.plot()], "Events": events}
        return Mode([], panels, [controls, self.ticks()])

    def state_of_run(self) -> dict[str, dict[str, Any]]:
        """Return the properties of the page's components that follow the run, except those of its slider."""
        run = self.run
        return {
            "run": {"children": self.overview()},
            "events": {"children": self.events()},
            "player": {"data-changes": json.dumps(self.changes)},
            "moments": {"children": self.moments()},
            "controls": {"className": "controls" if run.steps else "controls hidden"},
            "follow": {"className": "" if run.live else "hidden"},
        }

    @property
    def changes(self) -> list[int]:
        """The first and last step, and the first ones after a change of workers or plan."""
        steps = self.run.steps or [0]
        return sorted({steps[0], steps[-1], *(segment.first for segment in self.run.segments)})

    def slider(self) -> dict[str, Any]:
        changes = self.changes
        first = self.newest_step() if self.run.live else self.run.step_to_show
        tooltip = {"placement": "bottom", "always_visible": False}
        marks = {step: str(step) for step in changes}
        return {"min": changes[0], "max": changes[-1], "marks": marks, "value": first, "tooltip": tooltip}

    def player(self, state: dict[str, dict[str, Any]]) -> html.Div:
        """Build the buttons of `assets/modules/player.js`, which stay when a live run is read again."""
        moves = _MOVES.items()
        buttons = [
            parts.tag(html.Button, text, title=title, aria_label=title, data_go=move) for move, (text, title) in moves
        ]
        moments = html.Div(className="moments", id=self.name("moments"), **state["moments"])
        names = {"data_slider": self.name("step"), "data_follow": self.name("follow")}
        return parts.div("player", *buttons, moments, id=self.name("player"), **names, **state["player"])

    def moments(self) -> list[Any]:
        return [
            parts.tag(html.Button, f"{title}: step {step}", data_step=str(step))
            for title, step in self.run.notable_steps.items()
        ]

    def newest_step(self) -> int | None:
        """Return the last committed step that was traced, or else the last committed step."""
        steps, traced = self.run.steps, self.run.trace.steps if self.run.trace else []
        return max({*steps} & {*traced}, default=steps[-1] if steps else None)

    def overview(self) -> list[Any]:
        run = self.run
        hint = f"Losses appear here as {run.path / 'metrics.jsonl'} grows."
        empty = [] if run.metrics else [parts.empty_state("No step is committed yet.", hint)]
        return [parts.problems(run.problems), parts.chips(self.facts()), *empty]

    def plot(self) -> html.Section:
        view = parts.figure_view(self.figure(), self.name("curves"), "Losses and live workers over the steps")
        return parts.card("Loss and live workers", view)

    def figure(self) -> go.Figure:
        return run_figure({"": self.run.metrics}, ("loss", "live_workers"), "step")

    def static_content(self) -> list[Any]:
        views = [
            lanes_view(panel.title, TimedLanes(panel.table), f"{self.prefix}-{place}", self.cache, span=panel.span)
            for place, panel in enumerate(with_common_span(self.run.panels()))
        ] or [parts.empty_state("No iteration ran yet.")]
        heading = html.H2(self.run.name, className="source")
        cards = parts.card("Timelines", *views), parts.card("Events", self.events())
        return [heading, *self.overview(), self.plot(), *cards]

    def events(self) -> Any:
        rows = [[e.get("time"), event_text(e), e.get("step"), _details(e)] for e in self.run.events[-MAX_EVENTS:]]
        table = parts.table(("time (s)", "event", "step", "details"), rows)
        return table if rows else parts.empty_state("No events yet.")

    def facts(self) -> list[str]:
        run = self.run
        words = [str(run.shape)] if run.shape else []
        if run.metrics:
            last = run.metrics[-1]
            words.append(f"{parts.count_text(len(run.metrics), 'step')} committed")
            if is_number(last.get("loss")):
                words.append(f"last loss {last['loss']:.5g}")
            if run.evaluations:
                step, loss = max(run.evaluations.items())
                words.append(f"evaluation loss {loss:.5g} after step {step}")
            if last.get("live_workers") is not None:
                total = f" of {run.shape.worker_count}" if run.shape else ""
                words.append(f"{last['live_workers']}{total} workers alive")
        if deaths := run.further_deaths:
            least = parts.count_text(min(deaths), "more host")
            words.append(f"{least} of each stage can fail without losing an optimizer shard")
        words.append("finished" if not run.live else "running" if run.is_active else "ended early or stalled")
        return words

    def timelines(self, step: int | None, attempt: str = "") -> tuple[Any, Any, str, str]:
        """Build the planned and executed lanes of a step with its evaluation, and the choice of attempt.

        Args:
            attempt: step and generation of an aborted attempt, such as `3.0`; the one that counted if `attempt` is
                not one of the step.

        Returns:
            The lanes; options, value and class of the choice.
        """
        run = self.run
        if not run.steps:
            empty = parts.empty_state("No iteration ran yet.", "Timelines appear with the first one.")
            return empty, [], "", "hidden"
        step = run.steps[0] if step is None else step
        attempts: list[int | None] = [*run.generations_of(step)]
        *aborted, counted = attempts or [None]
        generation_of = {f"{step}.{generation}": generation for generation in aborted} | {"": counted}
        attempt = attempt if attempt in generation_of else ""
        chosen = generation_of[attempt]
        options = [
            {"label": f"generation {generation}" + (" (aborted)" if name else ""), "value": name}
            for name, generation in generation_of.items()
        ]
        digest, loss = run.plan_of(step, chosen), run.evaluations.get(step)
        unread = f"The plan {digest} of step {step} cannot be read." if digest else f"No plan is known for step {step}."
        untraced = f"Step {step} was not traced.", "An iteration is traced once it is complete." if run.live else ""
        evaluation = f"Evaluation after step {step}" + ("" if loss is None else f", loss {loss:.5g}")
        shown = {
            "planned": (f"Planned, step {step}", run.planned_lanes(step, chosen)),
            "executed": (f"Executed, step {step}", run.executed_lanes(step, chosen)),
            "evaluated": (evaluation, run.evaluation_lanes(step)),
        }
        missing = {"planned": (unread, f"Plans are in {run.path / 'plans'}."), "executed": untraced}
        left = parts.gutter(*(lanes.table for _, lanes in shown.values() if lanes is not None))
        views = []
        for part, (title, lanes) in shown.items():
            if lanes is not None:
                title += _failed(lanes.table)
                views.append(lanes_view(title, lanes, self.name(part), self.cache, left=left))
            elif part in missing:
                views.append(parts.empty_state(*missing[part]))
        return views, options, attempt, "" if aborted else "hidden"

    def register(self, app: Dash) -> None:
        keep_in_address(app, self.name("step"))

        @app.callback(
            self.output("lanes"),
            self.output("attempt", "options"),
            self.output("attempt", "value", again=True),  # otherwise the address's attempt waits for an answer
            self.output("attempts", "className"),
            self.input("step", "value"),
            self.input("attempt", "value"),
            prevent_initial_call="initial_duplicate",
        )
        def show_timelines(step: int | None, attempt: str) -> Any:
            views, options, shown, hidden = self.timelines(step, attempt)
            return views, options, no_update if shown == attempt else shown, hidden

        keep_in_address(app, self.name("attempt"))
        keep_in_address(app, self.name("follow"), self.state("follow", "options"))
        step, newest = self.output("step", "value", again=True), self.input("newest", "data")
        parts.in_browser(app, "followNewest", step, newest, self.state("follow", "value"))

        @app.callback(self.input("tick", "n_intervals"), prevent_initial_call=True, running=self.running)
        def read_again(_: int) -> None:
            self.refresh()
            step, newest, trace = self.slider(), self.newest_step(), self.run.trace
            del step["value"]
            is_evaluated = trace is not None and newest is not None and trace.evaluation(newest) is not None
            for part, properties in {
                **self.state_of_run(),
                "curves": {"figure": self.redrawn()},
                "step": step,
                "newest": {"data": [newest, is_evaluated]},
                "tick": {"disabled": not self.run.live},
            }.items():
                set_props(self.name(part), properties)


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


_NOT_DETAILS = "time", "kind", "worker", "step", "layout_limit"
"""Keys of events with a separate column, or whose content another key describes."""


def _details(event: dict[str, Any]) -> str:
    details = {key: value for key, value in event.items() if key not in _NOT_DETAILS}
    if isinstance(details.get("roles"), dict):
        swapped = {process: role for process, role in details["roles"].items() if process != role}
        details["roles"] = ", ".join(f"{process} has role {role}" for process, role in swapped.items()) or "as started"
    if isinstance(details.get("live"), list):
        details["live"] = f"{len(details['live'])} workers"
    return "; ".join(f"{key} {short(value) if isinstance(value, float) else value}" for key, value in details.items())
