"""The page of a run: losses, live workers, promised and measured figures of plans, planned and executed steps.

Callbacks call plain methods, so that tests need no browser.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from dash import ALL, Dash, Input, Output, State, ctx, dcc, html, no_update

from viz.figures.charts import curves_figure, event_text
from viz.lane_cache import Drawn
from viz.lanes import Flag, LaneTable
from viz.numbers import percent, seconds_unit
from viz.pages import parts
from viz.pages.lanes_view import lanes_view, pictures
from viz.pages.page import TABS, Mode, PageOfRun, keep_in_address

EVENTS_SHOWN = 60


class RunPage(PageOfRun):
    """The page of one run directory."""

    kind = "run"
    has_lanes, opened = True, "run"

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
        moments = parts.div("moments", *self.notable_steps(), id=self.name("moments"))
        slider = dcc.Slider(id=self.name("step"), **self.slider(), step=1, included=False)
        attempt = [html.Span("Attempt"), dcc.RadioItems(id=self.name("attempt"), inline=True)]
        controls = parts.div(
            "controls" if run.steps else "controls hidden",
            parts.div("following", self.player(), moments, follow),
            parts.div("step", html.Label("Step", htmlFor=self.name("step")), slider),
            parts.div("choices", html.Div(attempt, id=self.name("attempts"))),
            id=self.name("controls"),
        )
        own = {
            "Run": html.Div(self.overview(), id=self.name("overview")),
            "Events": html.Div(self.events(), id=self.name("events")),
        }
        return Mode(
            [],
            own,
            [
                controls,
                dcc.Store(id=self.name("began"), data=bool(run.steps)),
                dcc.Store(id=self.name("followed"), data=self.slider()["value"]),
                dcc.Interval(id=self.name("playing"), interval=int(PLAY_SECONDS * 1000), disabled=True),
                self.ticks(),
            ],
            self.name("timelines"),
        )

    def slider(self) -> dict[str, Any]:
        """Return range, marks (starts of segments) and first value of the step slider."""
        steps = self.run.steps or [0]
        marks = {steps[0]: str(steps[0]), steps[-1]: str(steps[-1])}
        marks |= {segment.first: str(segment.first) for segment in self.run.segments}
        first = self.newest() if self.run.live else self.run.step_to_show
        tooltip = {"placement": "bottom", "always_visible": False}
        value = first if first is not None else steps[0]
        return {"min": steps[0], "max": steps[-1], "marks": marks, "value": value, "tooltip": tooltip}

    def player(self) -> html.Div:
        """Build buttons for the previous and next step and change, and for playback."""
        before, step_before, step_after, after = (
            html.Button(
                text,
                id={"type": self.name("go"), "how": how},
                n_clicks=0,
                title=spoken,
                **parts.attributes(aria_label=spoken, data_go=how),
            )
            for how, (text, spoken) in _MOVES.items()
        )
        said = parts.attributes(title="Play the steps; key Space", data_go="play")
        play = html.Button("Play", id=self.name("play"), n_clicks=0, **said)
        return parts.div("player", before, step_before, play, step_after, after)

    def moved(self, step: int | None, how: str) -> int | None:
        """Return the step that a button of the player selects after `step`; the same step at an end."""
        steps = self.run.steps
        if not steps:
            return None
        here = steps[0] if step is None else step
        changes = sorted({steps[0], steps[-1], *(segment.first for segment in self.run.segments)})
        among = changes if how.startswith("change") else steps
        if how.endswith("before"):
            return max((one for one in among if one < here), default=here)
        return min((one for one in among if one > here), default=here)

    def newest(self) -> int | None:
        """Return the last committed step that was traced, or else the last committed step."""
        traced = set(self.run.trace.steps) if self.run.trace else set()
        known = self.run.steps
        return next((step for step in reversed(known) if step in traced), known[-1] if known else None)

    def notable_steps(self) -> list[Any]:
        kind = self.name("moment")
        return [
            html.Button(f"{title}: step {step}", id={"type": kind, "step": step}, n_clicks=0)
            for title, step in self.run.notable_steps
        ]

    def overview(self) -> list[Any]:
        """Build the content above the timelines."""
        run = self.run
        rows = self.segment_rows()
        hint = f"Losses appear here as {run.path / 'metrics.jsonl'} grows."
        curves: Any = parts.empty("No step is committed yet.", hint)
        if run.metrics:
            figure = curves_figure(run.metrics, run.events, run.workers)
            curves = parts.div("figure-view", parts.graph(figure, self.name("curves")))
        plans: Any = parts.table(PLANS_HEAD, rows) if rows else parts.empty("No plan is in use yet.")
        return [
            parts.problems(run.problems),
            parts.chips(self.facts()),
            parts.card("Loss and live workers", curves),
            parts.card("Plans in use", plans, caption=PLANS_CAPTION),
        ]

    def exported(self) -> list[Any]:
        problems, *overview = self.overview()
        heading = html.H2(self.run.name, className="source")
        timelines = pictures(self.prefix, self.run.panels(), "No iteration ran yet.")
        return [problems, heading, *overview, timelines, parts.card("Events", self.events())]

    def events(self) -> Any:
        return parts.table(*events_table(self.run.events)) if self.run.events else parts.empty("Nothing happened yet.")

    def facts(self) -> list[str]:
        run = self.run
        words = [str(run.shape)] if run.shape else []
        if run.metrics:
            last = run.metrics[-1]
            words.append(f"{parts.counted(len(run.metrics), 'step')} committed")
            if isinstance(last.get("loss"), int | float):
                words.append(f"last loss {last['loss']:.5g}")
            if run.evaluations:
                step, loss = max(run.evaluations.items())
                words.append(f"evaluation loss {loss:.5g} after step {step}")
            if last.get("live_workers") is not None:
                of = f" of {run.shape.worker_count}" if run.shape else ""
                words.append(f"{last['live_workers']}{of} workers alive")
        if deaths := run.further_deaths:
            least = min(deaths)
            poorest = ", ".join(str(stage) for stage, each in enumerate(deaths) if each == least)
            where = "each stage" if max(deaths) == least else f"stage {poorest}"
            words.append(f"{parts.counted(least, 'more host')} of {where} may die with no optimizer shard lost")
        words.append("finished" if not run.live else "running" if run.is_written else "ended early, or stands still")
        return words

    def modes(self, first: int, last: int) -> str:
        """Return the commit modes of the steps from `first` to `last`; the first step of a generation has a barrier."""
        lines = [
            line for line in self.run.metrics if first <= line["step"] <= last and isinstance(line.get("mode"), str)
        ]
        counts = Counter(line["mode"] for line in lines).most_common()
        if len(counts) < 2:
            return "".join(mode for mode, _ in counts)
        return ", ".join(f"{mode} in {parts.counted(count, 'step')}" for mode, count in counts)

    def segment_rows(self) -> list[list[parts.Cell]]:
        """Return a row per segment of steps with one plan, see PLANS_HEAD."""
        rows: list[list[parts.Cell]] = []
        for segment in self.run.segments:
            figures = self.run.figures(segment.plan)
            measured = self.run.measured(segment.first, segment.last)
            rows.append(
                [
                    segment.steps,
                    segment.alive,
                    segment.plan[:12] if segment.plan else None,
                    self.modes(segment.first, segment.last) or (figures.optimizer if figures else None),
                    figures.period if figures else None,
                    figures.lower_bound if figures else None,
                    percent(figures.gap) if figures and figures.gap is not None else None,
                    seconds_unit(measured).amount(measured) if measured is not None else None,
                ]
            )
        return rows

    def timelines(self, step: int | None, attempt: int | None) -> tuple[Any, Any, Any, str]:
        """Build the planned and executed lanes of a step with its evaluation, and the choice of attempt.

        Returns:
            The lanes; options, value and class of the choice.
        """
        run = self.run
        if not run.steps:
            return parts.empty("No iteration ran yet.", "Timelines appear with the first one."), [], None, "hidden"
        step = run.steps[0] if step is None else step
        tried = run.generations_of(step)
        chosen = attempt if attempt in tried else tried[-1] if tried else None
        options = [
            {"label": f"generation {g}" + ("" if g == tried[-1] else " (broken off)"), "value": g} for g in tried
        ]
        planned, executed, evaluated = run.planned(step, chosen), run.executed(step, chosen), run.evaluated(step)
        left = parts.gutter(*(drawn.lanes for drawn in (planned, executed, evaluated) if drawn is not None))

        def view(part: str, title: str, drawn: Drawn) -> html.Div:
            title += _reroutes(drawn.lanes)
            return lanes_view(title, drawn.lanes, self.name(part), self.cache, explainer=drawn.explainer, left=left)

        shown: list[Any] = []
        if planned is None:
            digest = run.plan_of(step, chosen)
            unread = f"The plan {digest} of step {step} cannot be read."
            why = unread if digest else f"No plan is known for step {step}."
            shown.append(parts.empty(why, f"Plans lie in {run.path / 'plans'}."))
        else:
            shown.append(view("planned", f"Planned, step {step}", planned))
        if executed is None:
            hint = "An iteration is traced when all of it ran." if run.live else ""
            shown.append(parts.empty(f"Nothing was traced of step {step}.", hint))
        else:
            shown.append(view("executed", f"Executed, step {step}", executed))
        if evaluated is not None:
            loss = run.evaluations.get(step)
            title = f"Evaluation after step {step}" + ("" if loss is None else f", loss {loss:.5g}")
            shown.append(view("evaluated", title, evaluated))
        return shown, options, chosen, "" if len(tried) > 1 else "hidden"

    def register(self, app: Dash) -> None:
        keep_in_address(app, self.name("step"))

        @app.callback(
            self.output("timelines"),
            self.output("attempt", "options"),
            self.output("attempt", "value"),
            self.output("attempts", "className"),
            self.input("step", "value"),
            self.input("attempt", "value"),
            self.input("began", "data"),
        )
        def show_timelines(step: int | None, attempt: int | None, _: bool) -> Any:
            # A step is shown first as it counted; only the reader's choice shows an aborted attempt.
            chosen = None if ctx.triggered_id == self.name("step") else attempt
            return self.timelines(step, chosen)

        @app.callback(
            self.output("step", "value"),
            self.output("playing", "disabled"),
            self.output("play"),
            self.output("play", "className"),
            Input({"type": self.name("moment"), "step": ALL}, "n_clicks"),
            Input({"type": self.name("go"), "how": ALL}, "n_clicks"),
            self.input("play", "n_clicks"),
            self.input("playing", "n_intervals"),
            self.state("step", "value"),
            self.state("playing", "disabled"),
            State(TABS, "value"),
            prevent_initial_call=True,
        )
        def go(*values: Any) -> tuple[Any, ...]:
            step, paused, page = values[-3:]
            pressed = ctx.triggered_id
            if not ctx.triggered[0]["value"]:  # buttons just drawn
                return (no_update,) * 4
            if isinstance(pressed, dict):
                to = pressed["step"] if "step" in pressed else self.moved(step, pressed["how"])
                return to, *(no_update,) * 3
            is_tick, after = pressed == self.name("playing"), self.moved(step, "step after")
            # Playback pauses a tick after the last step; steps during playback do not enter the browser's history.
            plays = (page == self.prefix if is_tick else paused) and after != step
            said = "Pause" if plays else "Play", "playing" if plays else ""
            return after if is_tick and plays else no_update, not plays, *said

        @app.callback(
            self.output("follow", "value"),
            self.input("step", "value"),
            self.state("followed", "data"),
            prevent_initial_call=True,
        )
        def stay(step: int | None, followed: int | None) -> Any:
            # Another step discards the reader's choice of attempt.
            return no_update if step == followed else []

        refreshed = {
            "overview": ("children",),
            "moments": ("children",),
            "events": ("children",),
            "controls": ("className",),
            "follow": ("className",),
            "tick": ("disabled",),
            "began": ("data",),
            "followed": ("data",),
            "step": ("min", "max", "marks"),
        }

        @app.callback(
            *(Output(self.name(part), what) for part, properties in refreshed.items() for what in properties),
            self.output("step", "value", again=True),
            self.input("tick", "n_intervals"),
            self.state("began", "data"),
            self.state("follow", "value"),
            prevent_initial_call=True,
        )
        def read_again(_: int, began: bool, follow: list[str] | None) -> Any:
            self.refresh()
            # Timelines follow only the newest step, except the first iteration of all, which draws them.
            begins = True if self.run.steps and not began else no_update
            newest = self.newest() if follow else None
            step = no_update if newest is None else newest
            slider = self.slider()
            controls = "controls" if self.run.steps else "controls hidden"
            shown = "" if self.run.live else "hidden"
            page = [self.overview(), self.notable_steps(), self.events(), controls, shown, not self.run.live]
            return *page, begins, step, slider["min"], slider["max"], slider["marks"], step


PLAY_SECONDS = 1.0
"""Seconds between two steps of the playback."""
_MOVES = {
    "change before": ("|◀", "The change of workers or plan before; key Shift+PageUp"),
    "step before": ("◀", "The step before; key PageUp"),
    "step after": ("▶", "The next step; key PageDown"),
    "change after": ("▶|", "The next change of workers or plan; key Shift+PageDown"),
}
"""Button of the player -> its text and title."""
PLANS_HEAD = ("steps", "workers", "plan", "optimizer", "period", "lower bound", "gap", "measured")
PLANS_CAPTION = (
    "Period: distance of two iterations in steady state, in units of the profile; the bound is proven for that failure."
    " Measured: median seconds from first start to last end of an iteration."
)


def _reroutes(lanes: LaneTable) -> str:
    dead = [str(worker) for worker, failed in zip(lanes.workers, lanes.failed, strict=True) if failed]
    homes = {int(home) for home in lanes.pipeline[lanes.has(Flag.REROUTED)]}
    text = f": {', '.join(dead)} failed" if dead else ""
    if homes:
        text += f"{',' if text else ':'} micro-batches of pipeline {', '.join(map(str, sorted(homes)))} re-routed"
    return text


def events_table(events: Sequence[dict[str, Any]]) -> tuple[tuple[str, ...], list[list[parts.Cell]]]:
    """Return head and rows of the last EVENTS_SHOWN events."""
    rows = [[_seconds(e), event_text(e), e.get("step"), _details(e)] for e in events[-EVENTS_SHOWN:]]
    return ("time", "event", "step", "details"), rows


def _seconds(event: dict[str, Any]) -> str | None:
    moment = event.get("time")
    return f"{moment:.2f} s" if isinstance(moment, int | float) else None


_NOT_DETAILS = "time", "kind", "worker", "step", "layout_limit"
"""Keys of events with a separate column, or whose content another key describes."""


def _details(event: dict[str, Any]) -> str:
    rest = {key: value for key, value in event.items() if key not in _NOT_DETAILS}
    if isinstance(rest.get("roles"), dict):
        swapped = {process: role for process, role in rest["roles"].items() if process != role}
        rest["roles"] = ", ".join(f"{process} plays {role}" for process, role in swapped.items()) or "as started"
    if isinstance(rest.get("live"), list):
        rest["live"] = f"{len(rest['live'])} workers"
    return "; ".join(f"{key} {value}" for key, value in rest.items())
