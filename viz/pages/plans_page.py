"""The page of plans: plan browser and what-if for the dead and slow workers of the scenario.

One text field holds the workers (`viz.pages.scenario`); the browser keeps earlier texts, and `undo` restores the last
one. Answers are methods, so that tests need no browser.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from dash import ALL, Dash, Input, Output, State, ctx, dcc, html, no_update

from recycle.errors import RecycleError
from recycle.job.shape import Worker
from recycle.plans import Move
from viz.details import figures_beside
from viz.lane_cache import LaneCache
from viz.lanes import Panel
from viz.numbers import PLACE_DIGITS, percent, short
from viz.pages import parts
from viz.pages.bench import SCENARIO, store_id
from viz.pages.lanes_view import lanes_view, pictures
from viz.pages.page import OPENED, TABS, Mode, Page, Workspace, keep_in_address
from viz.pages.scenario import FAILED, FORMS, Condition, failed_field, group, parse, worker_buttons
from viz.what_if import Answer, WhatIf

ENTRIES_SHOWN = 100
HISTORY, CRUMBS = 50, 5
MOVES_SHOWN = 8
CHANGE_SHOWN = "Outlined: where the plan before had it, once lanes are high enough."

Trail = list[str]
"""The answered texts, the current one last."""


class PlansPage(Page):
    """The page of a job's plans."""

    prefix, title = "plans", "Plans and what-if"
    has_lanes, opened, named = True, SCENARIO, SCENARIO
    invitation = "Press a worker to fail it and see the new plan; the one before stays as an outline."

    def __init__(self, what_if: WhatIf, cache: LaneCache | None = None) -> None:
        super().__init__(cache)
        self.what_if = what_if

    @classmethod
    def pages_of(cls, workspace: Workspace) -> Sequence[Page]:
        return [cls(workspace.what_if, workspace.cache)] if workspace.what_if is not None else []

    def scenario(self) -> list[Any]:
        buttons = [("undo", "Undo"), ("restore", "Restore all"), ("save", "Save the plan")]
        if self.what_if.searcher is not None:
            buttons.append(("longer", "Search longer"))
        controls = parts.div(
            "row",
            *failed_field(),
            *(html.Button(text, id=self.name(part), n_clicks=0) for part, text in buttons),
            dcc.Download(id=self.name("saved")),
        )
        pressing = (
            "Press a worker's name to fail it, or to restore it; or select work, and press the key x. The field takes"
        )
        says = parts.hint(f"{self.caption()} {pressing} {FORMS}. {CHANGE_SHOWN}")
        return [
            controls,
            parts.div("status", id=self.name("message"), role="status"),
            html.Div(worker_buttons(self.what_if.shape, ()), id=self.name("workers")),
            parts.awaited(self.name("answer")),
            says,
            dcc.Store(id=self.name("trail"), data=[""]),
            dcc.Store(id=self.name("searched"), data=0),
        ]

    def layout(self) -> Mode:
        return Mode([], {"Library": parts.awaited(self.name("library"))}, identifier=self.name("lanes"))

    def caption(self) -> str:
        what_if = self.what_if
        count = len(what_if.entries())
        words = [f"{what_if.shape}."]
        words.append(f"The library holds {count:,} plans." if count else "No plan library is loaded.")
        if what_if.planner is not None:
            missing = "Plans that it lacks are made by the list scheduler as you press."
            words.append(missing if count else "The list scheduler makes plans as you press.")
        if what_if.job is None:
            words.append("Without the job file lanes are drawn with every instruction taking 1.")
        return " ".join(words)

    def library(self, is_exported: bool = False) -> Any:
        """Build the library by failures, with a button per plan unless exported."""
        entries = self.what_if.entries()
        if not entries:
            hint = (
                "Make one with: recycle plan job.toml --failures 2 --library plans, then: recycle view job.toml plans"
            )
            return parts.card("Library", parts.empty("No library of plans was given.", hint))
        shown = entries[:ENTRIES_SHOWN]
        whole = next((entry.period for entry in entries if not entry.failures), None)
        head = ("failures", "dead per rank", "period", "bound", "gap", "throughput", "peak activations", "")
        rows: list[list[parts.Cell]] = []
        for entry, peak in zip(shown, self.what_if.peaks(shown), strict=True):
            identifier = {"type": self.name("entry"), "vector": ",".join(map(str, entry.vector))}
            dead = _vector(entry.vector)
            rows.append(
                [
                    entry.failures,
                    dead,
                    entry.period,
                    entry.lower_bound,
                    _gap(entry.gap),
                    percent(whole / entry.period) if whole and entry.period else None,
                    peak,
                    None if is_exported else parts.button("Show", identifier, f"Show the plan for {dead} dead"),
                ]
            )
        more = len(entries) - len(shown)
        limits = self.what_if.limits
        caption = "Throughput: of the fault-free plan." + (f" {more:,} more are not listed." if more else "")
        if limits is not None:
            caption += f" Limit: {', '.join(f'{limit:g}' for limit in dict.fromkeys(limits))} activations."
        return parts.card("Library", parts.table(head, rows, "library"), caption=caption)

    def answer(self, text: str, before: Sequence[str]) -> list[Any]:
        """Build the costs of the plan for a text, next to the previous plan and the fault-free plan."""
        asked, what_if = self._asked(text)
        now = what_if.answer(asked.failed)
        columns: list[tuple[str, Answer | None]] = [(_title(asked), now)]
        if now.plan.moves:
            columns.append(("without moving layers", what_if.without_moving(asked.failed)))
        if before:
            columns.append((f"before: {self._title(before[-1])}", self._try(before[-1])))
        if text and (not before or before[-1]):
            columns.append(("all workers", self._try("")))
        shown = [(title, one) for title, one in columns if one is not None]
        head, rows = figures_beside([(title, one.explainer) for title, one in shown])
        rows.append(["answered in", *(f"{short(one.seconds)} s" for _, one in shown)])
        steps = [html.Span(self._title(step)) for step in before[-CRUMBS:]]
        crumbs = html.Nav(
            [*steps, html.Span(_title(asked), className="now")],
            className="crumbs",
            **parts.attributes(role="group", aria_label="Failed workers, step by step"),
        )
        came = "from the library" if now.source == "library" else "planned now"
        moved = f" {_moved(now)}" if now.plan.moves or now.plan.layout_limit else ""
        idle = f" Idle: {', '.join(map(str, now.idle[:12]))}." if now.idle else ""
        return [
            *([crumbs] if steps else []),
            parts.card(
                _title(asked).capitalize(),
                parts.table(head, rows),
                caption=f"The plan is {came}, in {short(now.seconds)} s.{moved}{idle}",
            ),
        ]

    def lanes(self, text: str, before: Sequence[str]) -> Any:
        """Build the lanes of the plan, with the previous plan as outlines."""
        now, old = self._answer(text), self._try(before[-1]) if before else None
        if old is not None:
            self.cache.put(old.lanes, old.explainer)
        return lanes_view(
            "",
            now.lanes,
            self.name("all"),
            self.cache,
            span=max(now.lanes.span, old.lanes.span if old else 0.0),
            explainer=now.explainer,
            ghost=old.lanes if old else None,
        )

    def toggled(self, text: str, workers: Iterable[Worker]) -> str:
        """Return the text with these workers failed; if all of them are failed already, with them restored.

        Raises PlanError if no plan exists for them.
        """
        asked, chosen = parse(text, self.what_if.shape), frozenset(workers)
        return self.planned(asked.without(asked.failed - chosen if asked.failed >= chosen else asked.failed | chosen))

    def planned(self, asked: Condition) -> str:
        """Return the text of a condition. Raises PlanError without a plan for it."""
        text = ",".join(asked.names())
        self._answer(text)
        return text

    def changed(self, pressed: Any, value: Any, text: str, trail: Trail) -> tuple[str, Trail] | None:
        """Return (text, trail) after a press; None if nothing changes.

        Raises PlanError if no plan exists for the request.
        """
        if pressed == self.name("restore"):
            return "", trail
        if pressed == FAILED:
            return text, trail
        is_refused = self._try(text) is None
        if pressed == self.name("undo"):
            if is_refused:
                return trail[-1], trail
            return (trail[-2], trail[:-1]) if len(trail) > 1 else None
        if is_refused:  # the visible lanes and buttons belong to the previous text
            text = trail[-1]
        if pressed == store_id("choice"):
            worker = self.chosen(value)
            return None if worker is None else (self.toggled(text, [worker]), trail)
        if "workers" in pressed:
            return self.toggled(text, group(pressed["workers"], self.what_if.shape)), trail
        vector = [int(dead) for dead in pressed["vector"].split(",")]
        slow = parse(text, self.what_if.shape)
        return self.planned(slow.without(self.what_if.dead_of(vector))), trail

    def searched(self, text: str) -> tuple[bool, str]:
        """Search longer; return whether the plan improved, and a message."""
        asked, what_if = self._asked(text)
        try:
            before, after = what_if.searched(asked.failed)
        except RecycleError as error:
            return False, str(error)
        was = short(before.plan.period, PLACE_DIGITS)
        if after is before:
            return False, f"A longer search found no plan with a shorter period than {was}."
        periods = f"from {was} to {short(after.plan.period, PLACE_DIGITS)}"
        return True, f"A search of {short(after.seconds)} s took the period {periods}."

    def exported(self) -> list[Any]:
        heading, library = html.H2(self.title, className="source"), self.library(is_exported=True)
        whole = self._try("")
        if whole is None:
            return [heading, library]
        figures = parts.table(*figures_beside([("all workers", whole.explainer)]))
        lanes = pictures(self.prefix, [Panel("All workers", whole.lanes)], "The plan holds no instruction.")
        return [heading, lanes, parts.card("Plan with all workers", figures), library]

    def saved(self, text: str) -> dict[str, Any]:
        """Return file name and text of the plan for a download; `recycle check` and `recycle view` read it."""
        failed = parse(text, self.what_if.shape).failed
        names = "-".join(map(str, sorted(failed)[:8])) + (f"-and-{len(failed) - 8}-more" if len(failed) > 8 else "")
        content = self._answer(text).plan.text()
        return {"content": content, "filename": f"plan-without-{names}.json" if failed else "plan.json"}

    def chosen(self, choice: Any) -> Worker | None:
        """Return the worker whose name was pressed next to the canvas; None for other selections or in another mode."""
        if not isinstance(choice, dict) or choice.keys() - {"lane", "address", "name"}:
            return None
        lane, shape = choice.get("lane"), self.what_if.shape
        if choice.get("name") != self.name("all") or not isinstance(lane, int):
            return None
        return shape.worker_at(lane) if 0 <= lane < shape.worker_count else None

    def _asked(self, text: str) -> tuple[Condition, WhatIf]:
        asked = parse(text, self.what_if.shape)
        return asked, self.what_if.with_slow(asked.slow)

    def _answer(self, text: str) -> Answer:
        asked, what_if = self._asked(text)
        return what_if.answer(asked.failed)

    def _try(self, text: str) -> Answer | None:
        try:
            return self._answer(text)
        except RecycleError:
            return None

    def _title(self, text: str) -> str:
        return _title(parse(text, self.what_if.shape))

    def register(self, app: Dash) -> None:
        # Search and download apply to the visible plan: the last answered text, whatever the field holds.
        trail_now = self.state("trail", "data")
        keep_in_address(app, FAILED, State(FAILED, "type"))

        @app.callback(
            Output(FAILED, "value", allow_duplicate=True),
            self.output("trail", "data", again=True),
            Output(TABS, "value", allow_duplicate=True),
            self.output("message"),
            Input({"type": FAILED, "workers": ALL}, "n_clicks"),
            Input({"type": self.name("entry"), "vector": ALL}, "n_clicks"),
            self.input("undo", "n_clicks"),
            self.input("restore", "n_clicks"),
            Input(FAILED, "n_submit"),
            Input(store_id("choice"), "data"),
            State(FAILED, "value"),
            trail_now,
            prevent_initial_call=True,
        )
        def change(*values: Any) -> tuple[Any, ...]:
            pressed, value = ctx.triggered_id, ctx.triggered[0]["value"]
            if not value:  # buttons just drawn
                return (no_update,) * 4
            try:
                changed = self.changed(pressed, value, values[-2] or "", values[-1])
            except RecycleError as error:
                return no_update, no_update, no_update, str(error)
            return (*changed, self.prefix, "") if changed else (no_update,) * 4

        @app.callback(
            self.output("answer"),
            self.output("workers"),
            self.output("trail", "data"),
            Input(FAILED, "value"),
            Input(OPENED, "data"),
            self.input("searched", "data"),
            trail_now,
        )
        def show(text: str | None, opened: list[str], _: int, trail: Trail) -> tuple[Any, ...]:
            if self.prefix not in opened:  # plans take time, and the page was not opened
                return (no_update,) * 3
            text = text or ""
            trail = trail if trail[-1] == text else [*trail, text][-HISTORY:]
            try:
                failed = parse(text, self.what_if.shape).failed
                return self.answer(text, trail[:-1]), worker_buttons(self.what_if.shape, failed), trail
            except RecycleError as error:
                return parts.problems([str(error)]), no_update, no_update

        @app.callback(
            self.output("lanes"),
            self.input("trail", "data"),
            self.input("searched", "data"),
            # Otherwise Dash drops the update if a deep link sets the text before the page exists.
            self.input("lanes", "id"),
        )
        def draw(trail: Trail, _: int, __: str) -> Any:
            try:
                return self.lanes(trail[-1], trail[:-1])
            except RecycleError:
                return parts.empty("There is no plan to draw.")

        if self.what_if.searcher is not None:

            @app.callback(
                self.output("message", again=True),
                self.output("searched", "data"),
                self.input("longer", "n_clicks"),
                trail_now,
                self.state("searched", "data"),
                prevent_initial_call=True,
                running=[(self.output("longer", "disabled"), True, False)],
            )
            def search_longer(clicks: int, trail: Trail, count: int) -> tuple[Any, Any]:
                if not clicks:
                    return no_update, no_update
                is_better, said = self.searched(trail[-1])
                return said, count + 1 if is_better else no_update

        # Peaks come from the plans, which takes a moment for a large library: do not block others.
        @app.callback(self.output("library"), self.input("library", "id"))
        def list_library(_: str) -> Any:
            return self.library()

        @app.callback(
            self.output("saved", "data"),
            self.input("save", "n_clicks"),
            trail_now,
            prevent_initial_call=True,
        )
        def save(clicks: int, trail: Trail) -> Any:
            return self.saved(trail[-1]) if clicks else no_update


def _title(asked: Condition) -> str:
    names = [str(worker) for worker in sorted(asked.failed)]
    more = f" and {len(names) - 6} more" if len(names) > 6 else ""
    title = f"without {', '.join(names[:6])}{more}" if names else "all workers"
    slow = ", ".join(f"{worker} {factor:g} times as long" for worker, factor in asked.slow[:6])
    return f"{title}, {slow}" if slow else title


def _vector(vector: Sequence[int]) -> str:
    hit = [f"{dead} on rank {rank}" for rank, dead in enumerate(vector) if dead]
    return ", ".join(hit[:6]) + (" …" if len(hit) > 6 else "") if hit else "none"


def _gap(gap: float) -> str:
    return percent(gap) if gap > 1e-9 else "optimal"


def _moved(answer: Answer) -> str:
    moves = answer.plan.moves
    if not moves:
        return f"No layer moves: {answer.plan.layout_limit}."
    copies = [f"{move.worker} copies {_what(move)} from {move.source}" for move in moves[:MOVES_SHOWN]]
    more = f"; and {len(moves) - MOVES_SHOWN} more" if len(moves) > MOVES_SHOWN else ""
    amount = sum(move.bytes for move in moves)
    return f"{'; '.join(copies)}{more}" + (f" ({amount:g} bytes in all)." if amount else ".")


def _what(move: Move) -> str:
    if not move.units:
        return move.role
    first, last = move.units[0], move.units[1] - 1
    return f"layer {first}" if first == last else f"layers {first} to {last}"
