"""The page of plans: plan browser and what-if for the dead and slow workers of the scenario.

One text field holds the workers. The page's address keeps it, so the browser's Back button restores earlier ones.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

from dash import ALL, Dash, Input, Output, State, ctx, dcc, html, no_update, set_props

from recycle.errors import RecycleError
from recycle.job.shape import Worker
from recycle.plans import dead_roles
from viz.condition import FORMS, Condition, named_workers, parse
from viz.details import figures_table
from viz.numbers import percent, short, signed_percent, unit_for
from viz.pages import parts
from viz.pages.bench import SCENARIO, store_id
from viz.pages.lanes_view import lanes_view
from viz.pages.page import OPENED, TABS, Mode, Page, Workspace
from viz.pages.scenario import FAILED, TIMES, worker_buttons
from viz.pages.schedule_page import layout_of
from viz.scenario import Scenario
from viz.what_if import PlannedOutcome, WhatIf

MAX_ENTRIES = 100
MAKE_LIBRARY = "Make one with: recycle plan job.toml --failures 2 --library plans, then: recycle view job.toml plans"
USAGE = (
    f"Press a worker's name to fail it, or to restore it; or select work, and press the key x. The field takes {FORMS}."
    " Outlines show the previous plan where lanes are high enough."
)
NO_JOB = " Without a job file every instruction takes 1."

Trail = list[str]
"""The text answered before the current one, if any, and the current one."""


class PlansPage(Page):
    prefix, title = "plans", "Plans and what-if"
    has_lanes, first_panel, worker_panel = True, SCENARIO, SCENARIO
    invitation = "Press a worker to fail it and see the new plan; the one before stays as an outline."

    @classmethod
    def count(cls, workspace: Workspace) -> int:
        return workspace.what_if is not None

    @property
    def what_if(self) -> WhatIf:
        assert self.workspace.what_if is not None
        return self.workspace.what_if

    def scenario(self) -> list[Any]:
        buttons = [("restore", "Restore all"), ("save", "Save the plan")]
        if self.what_if.searcher is not None:
            buttons.append(("longer", "Search longer"))
        controls = parts.div(
            "row",
            *(html.Button(text, id=self.name(part), n_clicks=0) for part, text in buttons),
            dcc.Download(id=self.name("saved")),
        )
        return [
            controls,
            parts.div("status", id=self.name("message"), role="status"),
            html.Div(worker_buttons(self.what_if.shape, ()), id=self.name("workers")),
            parts.loading_area(self.name("answer")),
            parts.hint(f"{self.what_if.shape}. {USAGE}{NO_JOB * (self.what_if.job is None)}"),
            dcc.Store(id=self.name("trail"), data=[""]),
            dcc.Store(id=self.name("searched"), data=0),
            dcc.Store(id=self.name("pressed")),
        ]

    def layout(self) -> Mode:
        return Mode([], {"Library": self.library()})

    def library(self) -> html.Section:
        entries = self.what_if.entries()
        if not entries:
            return parts.card("Library", parts.empty_state("No plan library was given.", MAKE_LIBRARY))
        fault_free_period = next((entry.period for entry in entries if not entry.failures), None)
        unit = unit_for(max(entry.period for entry in entries), self.what_if.unit)
        head = ("dead", f"period{unit.suffix}", "gap", "throughput", "")
        rows = []
        for entry in entries[:MAX_ENTRIES]:
            identifier = {"type": self.name("entry"), "vector": ",".join(map(str, entry.vector))}
            dead = [f"{count} on rank {rank}" for rank, count in enumerate(entry.vector) if count]
            failed_text = ", ".join(dead) or "none"
            rows.append(
                [
                    failed_text,
                    entry.period * unit.scale,
                    percent(entry.gap) if entry.gap > 1e-9 else "optimal",
                    percent(fault_free_period / entry.period) if fault_free_period and entry.period else None,
                    parts.button("Show", identifier, f"Show the plan for {failed_text} dead"),
                ]
            )
        caption = "Throughput is relative to the fault-free plan."
        if len(entries) > MAX_ENTRIES:
            caption += f" {len(entries) - MAX_ENTRIES:,} more are not listed."
        return parts.card("Library", parts.table(head, rows, "library"), caption=caption)

    def outcome_cards(self, text: str, history: Sequence[str], times: str = "") -> list[Any]:
        condition, what_if = self._condition(text)
        current = what_if.outcome(condition.failed)
        outcomes = {_title(condition): current}
        if current.plan.moves and (unmoved := what_if.without_moves(condition.failed)):
            outcomes["without moving layers"] = unmoved
        others = {f"before: {_title(parse(before, what_if.shape))}": before for before in history[-1:]}
        if text and (not history or history[-1]):
            others["all workers"] = ""
        outcomes |= {title: outcome for title, other in others.items() if (outcome := self._outcome_or_none(other))}
        scenario = Scenario.of(times, "")
        columns = [(title, self.cache.context_under(each.context, scenario)) for title, each in outcomes.items()]
        head, rows = figures_table(columns, current.timed.unit)
        if text and (whole := self._outcome_or_none("")) is not None:
            usual = self.cache.context_under(whole.context, scenario).timeline.period
            against = (signed_percent(each.timeline.period / usual - 1) for _, each in columns)
            rows.insert(1, ["against all workers", *against])
        origin = "Read from the library" if current.source == "library" else "Planned"
        idle = f" Idle: {', '.join(map(str, current.idle[:12]))}." if current.idle else ""
        caption = f"{origin} in {short(current.seconds)} s.{idle}"
        card, plan = parts.card(_title(condition).capitalize(), parts.table(head, rows), caption=caption), current.plan
        return [card, *([layout_of("Layout", plan.schedule, plan)] if plan.moves or plan.layout_limit else [])]

    def lanes(self, text: str, history: Sequence[str]) -> html.Div:
        current, old = self._outcome(text).timed, self._outcome_or_none(history[-1]) if history else None
        before = old.timed if old else None
        span = max(lanes.table.span for lanes in (current, before) if lanes is not None)
        return lanes_view("", current, self.name("all"), self.cache, span=span, ghost=before)

    def toggle(self, text: str, workers: Iterable[Worker]) -> str:
        """Return the text with these workers failed; if all of them are failed already, with them restored.

        Raises PlanError if no plan exists for them.
        """
        condition, pressed = parse(text, self.what_if.shape), frozenset(workers)
        failed = condition.failed
        return self.require_plan(condition.with_failed(failed - pressed if failed >= pressed else failed | pressed))

    def require_plan(self, condition: Condition) -> str:
        """Return the text of a condition. Raises PlanError without a plan for it."""
        text = ",".join(condition.names())
        self._outcome(text)
        return text

    def apply_press(self, pressed: Any, value: Any, text: str, answered: str) -> str | None:
        """Return the text after a press; None if nothing changes. Raises PlanError if no plan exists for the request.

        Args:
            answered: the text of the visible lanes and buttons; `text` may be one without a plan.
        """
        if pressed == self.name("restore"):
            return ""
        if pressed == FAILED:
            return text
        if self._outcome_or_none(text) is None:
            text = answered
        if pressed == store_id("choice"):
            worker = self.pressed_worker(value)
            return None if worker is None else self.toggle(text, [worker])
        if "workers" in pressed:
            return self.toggle(text, named_workers(pressed["workers"], self.what_if.shape))
        vector = [int(dead) for dead in pressed["vector"].split(",")]
        slow = parse(text, self.what_if.shape)
        return self.require_plan(slow.with_failed(dead_roles(self.what_if.shape, vector)))

    def search(self, text: str) -> tuple[bool, str]:
        condition, what_if = self._condition(text)
        try:
            before, after = what_if.search(condition.failed)
        except RecycleError as error:
            return False, str(error)
        if after is before:
            return False, "A longer search found no plan with a shorter period."
        change = signed_percent(after.plan.period / before.plan.period - 1)
        return True, f"A search of {short(after.seconds)} s changed the period by {change}."

    def static_content(self) -> list[Any]:
        content = [html.H2(self.title, className="source"), self.library()]
        if (fault_free := self._outcome_or_none("")) is not None:
            figures = parts.table(*figures_table([("all workers", fault_free.context)], fault_free.timed.unit))
            content[1:1] = [parts.card("Plan with all workers", self.lanes("", []), figures)]
        return content

    def download(self, text: str) -> dict[str, Any]:
        """Return file name and text of the plan for a download; `recycle check` and `recycle view` read it."""
        names = [re.sub("[>=:/]", "-", name) for name in parse(text, self.what_if.shape).names()[:8]]
        return {"content": self._outcome(text).plan.text(), "filename": "-".join(["plan", *names]) + ".json"}

    def pressed_worker(self, choice: Any) -> Worker | None:
        """Return the worker whose name was pressed next to the canvas; None for other selections or in another mode."""
        if not isinstance(choice, dict) or choice.keys() - {"lane", "address", "name"}:
            return None
        lane, shape = choice.get("lane"), self.what_if.shape
        if choice.get("name") != self.name("all") or not isinstance(lane, int):
            return None
        return shape.worker_at(lane) if 0 <= lane < shape.worker_count else None

    def _condition(self, text: str) -> tuple[Condition, WhatIf]:
        condition = parse(text, self.what_if.shape)
        return condition, self.what_if.under(condition)

    def _outcome(self, text: str) -> PlannedOutcome:
        condition, what_if = self._condition(text)
        return what_if.outcome(condition.failed)

    def _outcome_or_none(self, text: str) -> PlannedOutcome | None:
        try:
            return self._outcome(text)
        except RecycleError:
            return None

    def register(self, app: Dash) -> None:
        # Search and download apply to the visible plan: the last answered text, whatever the field holds.
        trail_now = self.state("trail", "data")

        @app.callback(
            self.output("message"),
            Input({"type": FAILED, "workers": ALL}, "n_clicks"),
            Input({"type": self.name("entry"), "vector": ALL}, "n_clicks"),
            self.input("restore", "n_clicks"),
            Input(FAILED, "n_submit"),
            Input(store_id("choice"), "data"),
            State(FAILED, "value"),
            trail_now,
            prevent_initial_call=True,
            # Two presses at once would both change one text.
            running=[(self.output("workers", "className"), "busy", "")],
        )
        def change(*values: Any) -> Any:
            pressed, value = ctx.triggered_id, ctx.triggered[0]["value"]
            if not value:  # buttons just drawn
                return no_update
            try:
                changed = self.apply_press(pressed, value, values[-2] or "", values[-1][-1])
            except RecycleError as error:
                return str(error)
            if changed is None:
                return no_update
            set_props(self.name("pressed"), {"data": [values[-2] or "", changed]})
            return ""

        now, opened = State(FAILED, "value"), Output(TABS, "value", allow_duplicate=True)
        failed = Output(FAILED, "value", allow_duplicate=True)
        parts.in_browser(app, "takePress", failed, opened, self.input("pressed", "data"), now)

        answered = [self.output("answer"), self.output("workers"), self.output("trail", "data")]
        asked = Input(FAILED, "value"), Input(OPENED, "data"), self.input("searched", "data"), Input(TIMES, "value")

        @app.callback(*answered, *asked, trail_now)
        def show(text: str | None, opened: list[str], _: int, times: str, trail: Trail) -> tuple[Any, ...]:
            if self.prefix not in opened:  # plans take time, and the page was not opened
                return (no_update,) * 3
            text = text or ""
            is_same, trail = trail[-1] == text, trail if trail[-1] == text else [trail[-1], text]
            try:
                cards = self.outcome_cards(text, trail[:-1], times)
            except RecycleError as error:
                return parts.problems([str(error)]), no_update, no_update
            workers = worker_buttons(self.what_if.shape, parse(text, self.what_if.shape).failed)
            # The browser applies other times to the lanes itself. A step back sets times and workers at once.
            return cards, workers, no_update if is_same and ctx.triggered_id == TIMES else trail

        @app.callback(self.output("lanes"), self.input("trail", "data"), prevent_initial_call=True)
        def draw(trail: Trail) -> html.Div:
            return self.lanes(trail[-1], trail[:-1])  # the outcome is known by now

        if self.what_if.searcher is not None:
            running = [(self.output("longer", "disabled"), True, False)]

            @app.callback(self.input("longer", "n_clicks"), trail_now, prevent_initial_call=True, running=running)
            def search_longer(clicks: int, trail: Trail) -> None:
                if clicks:
                    is_better, message = self.search(trail[-1])
                    set_props(self.name("message"), {"children": message})
                    if is_better:
                        set_props(self.name("searched"), {"data": clicks})

        @app.callback(
            self.output("saved", "data"), self.input("save", "n_clicks"), trail_now, prevent_initial_call=True
        )
        def save(clicks: int, trail: Trail) -> Any:
            return self.download(trail[-1]) if clicks else no_update


def _title(condition: Condition) -> str:
    names, count = condition.names(), len(condition.failed)
    omitted = f" and {count - 6} more" if count > 6 else ""
    title = f"without {', '.join(names[: min(count, 6)])}{omitted}" if count else "all workers"
    return ", ".join([title, *names[count : count + 6]])
