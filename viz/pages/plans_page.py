"""The plan browser and what-if: press a worker, a pipeline or a node to fail or restore it, and see the plan that takes
over.

The state is a list of failed workers and those before it, kept by the browser: `undo` goes back, and the address bar
says `?fail=1.2,0.3`, which restores it. The answers are methods, so that tests need no browser.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any
from urllib.parse import parse_qs

from dash import ALL, Dash, Input, Output, State, ctx, dcc, html, no_update, set_props

from recycle.errors import RecycleError
from recycle.nodes import place_workers
from recycle.plans import Move
from recycle.shape import Worker
from viz.condition import FORMS, Condition, group, parse
from viz.lane_cache import Explainer, LaneCache
from viz.lanes import Panel
from viz.numbers import PLACE_DIGITS, percent, short
from viz.pages import parts
from viz.pages.bench import store_id
from viz.pages.lanes_view import lanes_view, pictures
from viz.pages.mode import Mode
from viz.pages.page import TABS, Page, Workspace
from viz.what_if import Answer, WhatIf

BUTTONS, NODES_SHOWN = 512, 64
"""Workers up to which each has a button; of more, lanes are pressed or names typed."""
ENTRIES_SHOWN = 100
HISTORY = 50
MOVES_SHOWN = 8
CHANGE_SHOWN = "Outlined: where the plan before had it, once lanes are high enough."

FailureState = dict[str, Any]
"""The state: `failed`, names of workers (`0.1=1.5` of a slow one), and `history`, the lists before it, oldest first."""


class PlansPage(Page):
    """The page of a job's plans."""

    prefix, title = "plans", "Plans and what-if"
    has_lanes, opened, named = True, "what", "what"
    invitation = "Press a worker to fail it and see the new plan; the one before stays as an outline."

    def __init__(self, what_if: WhatIf, cache: LaneCache | None = None) -> None:
        super().__init__(cache)
        self.what_if = what_if

    @classmethod
    def pages_of(cls, workspace: Workspace) -> Sequence[Page]:
        return [cls(workspace.what_if, workspace.cache)] if workspace.what_if is not None else []

    def fixtures(self) -> list[Any]:
        return [
            dcc.Location(id=self.name("address"), refresh=False),
            dcc.Store(id=self.name("state"), data={"failed": [], "history": []}),
            dcc.Store(id=self.name("addressed")),
        ]

    def layout(self) -> Mode:
        typed = self.name("typed")
        buttons = [("undo", "Undo"), ("restore", "Restore all"), ("save", "Save the plan")]
        if self.what_if.searcher is not None:
            buttons.append(("longer", "Search longer"))
        controls = parts.div(
            "row",
            html.Label("Failed and slow workers", htmlFor=typed),
            dcc.Input(id=typed, placeholder="1.2, node:0/8, 0.1=1.5", debounce=True, n_submit=0, size="30"),
            *(html.Button(text, id=self.name(part), n_clicks=0) for part, text in buttons),
            dcc.Download(id=self.name("saved")),
        )
        workers = html.Div(id=self.name("workers"))
        message = parts.div("status", id=self.name("message"), role="status")
        pressing = (
            "Press a worker's name to fail it, or to restore it; or select work, and press the key x. The field takes"
        )
        pressing += f" {FORMS}."
        says = html.P(f"{self.caption()} {pressing} {CHANGE_SHOWN}", className="hint")
        own = {
            "What if": [controls, message, workers, parts.awaited(self.name("answer")), says],
            "Library": parts.awaited(self.name("library")),
        }
        return Mode([], own, identifier=self.name("lanes"))

    def caption(self) -> str:
        """Where plans come from."""
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

    def workers(self, failed: Iterable[Worker]) -> Any:
        """A button per worker, by pipeline; or how to name one where there are too many."""
        shape, dead = self.what_if.shape, frozenset(failed)
        if shape.worker_count > BUTTONS:
            return html.P(f"{shape.worker_count:,} workers: type names, or press a lane below.", className="hint")
        rows = []
        for k in range(shape.pipelines):
            buttons = [self._worker_button(Worker(k, r), Worker(k, r) in dead) for r in range(shape.ranks)]
            rows.append(parts.div("pipeline", self._group_button(f"pipeline:{k}", f"pipeline {k}", dead), *buttons))
        if shape.pipelines > 1:
            size = shape.ranks if shape.ranks > 1 else 2
            count = len(place_workers(shape, size))
            nodes = [self._group_button(f"node:{n}/{size}", f"node {n}", dead) for n in range(min(count, NODES_SHOWN))]
            rows.append(parts.div("pipeline", html.Span(f"{size} a node", className="name"), *nodes))
        return parts.div("workers", *rows)

    def _group_button(self, word: str, title: str, dead: frozenset[Worker]) -> html.Button:
        members = sorted(group(word, self.what_if.shape))
        failed = dead >= set(members)
        spoken: dict[str, Any] = {"aria-pressed": str(failed).lower()}
        return html.Button(
            f"✕ {title}" if failed else title,
            id={"type": self.name("group"), "group": word},
            n_clicks=0,
            className="worker failed" if failed else "worker",
            title=f"{'Restore' if failed else 'Fail'} {members[0]} to {members[-1]}",
            **spoken,
        )

    def _worker_button(self, worker: Worker, failed: bool) -> html.Button:
        spoken: dict[str, Any] = {"aria-pressed": str(failed).lower()}
        return html.Button(
            f"✕ {worker}" if failed else str(worker),
            id={"type": self.name("worker"), "worker": str(worker)},
            n_clicks=0,
            className="worker failed" if failed else "worker",
            title=f"Restore {worker}" if failed else f"Fail {worker}",
            **spoken,
        )

    def library(self, is_exported: bool = False) -> Any:
        """The library by failures; a button shows each plan, but in a page without a server."""
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

    def answer(self, state: FailureState) -> list[Any]:
        """What the plan costs, beside the one before and the fault-free one."""
        asked, what_if = self._condition(state["failed"]), self._what_if(state["failed"])
        failed = asked.failed
        now = what_if.answer(failed)
        before = self._before(state)
        columns: list[tuple[str, Answer]] = [(_title(asked), now)]
        rerouted = what_if.without_moving(failed) if now.plan.moves else None
        columns += [("without moving layers", rerouted)] if rerouted else []
        if before is not None:
            columns.append((f"before: {_title(self._condition(state['history'][-1]))}", before))
        if state["failed"] and (before is None or state["history"][-1]):
            whole = self._try([])
            columns += [("all workers", whole)] if whole else []
        rows = [[title, *(measure(one) for _, one in columns)] for title, measure in _MEASURES]
        trail = [_title(self._condition(names)) for names in state["history"][-5:]]
        crumbs = [*(html.Span(step) for step in trail), html.Span(_title(asked), className="now")]
        spoken: dict[str, Any] = {"role": "group", "aria-label": "Failed workers, step by step"}
        came = "from the library" if now.source == "library" else "planned now"
        moved = f" {_moved(now)}" if now.plan.moves or now.plan.layout_limit else ""
        idle = f" Idle: {', '.join(map(str, now.idle[:12]))}." if now.idle else ""
        return [
            *([html.Nav(crumbs, className="crumbs", **spoken)] if trail else []),
            parts.card(
                _title(asked).capitalize(),
                parts.table(("", *(title for title, _ in columns)), rows),
                caption=f"The plan is {came}, in {short(now.seconds)} s.{moved}{idle}",
            ),
        ]

    def lanes(self, state: FailureState) -> Any:
        """The lanes of the plan, the plan before as outlines."""
        now, before = self._answer(state["failed"]), self._before(state)
        if before is not None:
            self.cache.put(before.lanes, _explainer(before))
        return lanes_view(
            "",
            now.lanes,
            self.name("all"),
            self.cache,
            span=max(now.lanes.span, before.lanes.span if before else 0.0),
            explainer=_explainer(now),
            ghost=before.lanes if before else None,
        )

    def toggled(self, state: FailureState, *workers: Worker) -> FailureState:
        """The state with these workers failed, or where all of them are already, restored."""
        failed, chosen = self._condition(state["failed"]).failed, frozenset(workers)
        return self.changed(state, failed - chosen if failed >= chosen else failed | chosen)

    def changed(self, state: FailureState, failed: frozenset[Worker]) -> FailureState:
        """The state with other failed workers. Raises PlanError when no plan is for them."""
        return self.named_anew(state, self._condition(state["failed"]).without(failed))

    def named_anew(self, state: FailureState, asked: Condition) -> FailureState:
        """The state with other failed and slow workers. Raises PlanError when no plan is for them."""
        names = asked.names()
        self._answer(names)
        if names == state["failed"]:
            return state
        return {"failed": names, "history": [*state["history"], state["failed"]][-HISTORY:]}

    def searched(self, state: FailureState) -> tuple[Any, str]:
        """The state once a longer search is through, and what came of it; no new state where that is no better plan."""
        try:
            before, after = self._what_if(state["failed"]).searched(self._condition(state["failed"]).failed)
        except RecycleError as error:
            return no_update, str(error)
        was = short(before.plan.period, PLACE_DIGITS)
        if after is before:
            return no_update, f"A longer search found no plan with a shorter period than {was}."
        periods = f"from {was} to {short(after.plan.period, PLACE_DIGITS)}"
        said = f"A search of {short(after.seconds)} s took the period {periods}."
        return {**state, "searched": state.get("searched", 0) + 1}, said

    def exported(self) -> list[Any]:
        """The plan with all workers and the library."""
        whole = self._try([])
        if whole is None:
            return [html.H2(self.title, className="source"), self.library(is_exported=True)]
        figures = parts.table(("", "all workers"), [[title, measure(whole)] for title, measure in _MEASURES])
        lanes = pictures(self.prefix, [Panel("All workers", whole.lanes)], "The plan holds no instruction.")
        return [
            html.H2(self.title, className="source"),
            lanes,
            parts.card("Plan with all workers", figures),
            self.library(is_exported=True),
        ]

    def undone(self, state: FailureState) -> FailureState:
        """The state before the last change."""
        *history, last = state["history"] or [state["failed"]]
        return {"failed": last, "history": history}

    def from_address(self, search: str | None) -> Condition | None:
        """The failed and slow workers in `?fail=1.2,0.3`; None when it does not say. Raises PlanError."""
        stated = parse_qs((search or "").lstrip("?")).get("fail")
        return parse(stated[0], self.what_if.shape) if stated else None

    def saved(self, state: FailureState) -> dict[str, Any]:
        """File name and text of the plan, for a download; `recycle check` and `recycle view` read it."""
        failed = self._condition(state["failed"]).failed
        names = "-".join(map(str, sorted(failed)[:8])) + (f"-and-{len(failed) - 8}-more" if len(failed) > 8 else "")
        text = self._answer(state["failed"]).plan.text()
        return {"content": text, "filename": f"plan-without-{names}.json" if failed else "plan.json"}

    def _before(self, state: FailureState) -> Answer | None:
        return self._try(state["history"][-1]) if state["history"] else None

    def _try(self, names: Sequence[str]) -> Answer | None:
        try:
            return self._answer(names)
        except RecycleError:
            return None

    def _answer(self, names: Sequence[str]) -> Answer:
        return self._what_if(names).answer(self._condition(names).failed)

    def _condition(self, names: Sequence[str]) -> Condition:
        return parse(",".join(map(str, names)), self.what_if.shape)

    def _what_if(self, names: Sequence[str]) -> WhatIf:
        """What answers where the workers that are slow are."""
        return self.what_if.with_slow(self._condition(names).slow)

    def register(self, app: Dash) -> None:
        state_id = self.name("state")

        @app.callback(
            Output(state_id, "data"),
            Output(self.name("message"), "children"),
            Input({"type": self.name("worker"), "worker": ALL}, "n_clicks"),
            Input({"type": self.name("group"), "group": ALL}, "n_clicks"),
            Input({"type": self.name("entry"), "vector": ALL}, "n_clicks"),
            Input(self.name("typed"), "value"),
            Input(self.name("undo"), "n_clicks"),
            Input(self.name("restore"), "n_clicks"),
            State(state_id, "data"),
            prevent_initial_call=True,
        )
        def change(
            _: list[int],
            __: list[int],
            ___: list[int],
            typed: str | None,
            ____: int,
            _____: int,
            state: FailureState,
        ) -> tuple[Any, Any]:
            pressed, value = ctx.triggered_id, ctx.triggered[0]["value"]
            if pressed is None or value is None or (not value and pressed != self.name("typed")):
                return no_update, no_update  # buttons that were just drawn
            if pressed == self.name("undo"):
                return self.undone(state), ""
            if pressed == self.name("restore"):
                return self._or_message(lambda: self.named_anew(state, Condition()))
            if pressed == self.name("typed"):
                return self._or_message(lambda: self.named_anew(state, parse(typed or "", self.what_if.shape)))
            if "group" in pressed:
                return self._or_message(lambda: self.toggled(state, *group(pressed["group"], self.what_if.shape)))
            if "worker" in pressed:
                return self._or_message(lambda: self.toggled(state, Worker.parse(pressed["worker"])))
            vector = [int(dead) for dead in pressed["vector"].split(",")]
            return self._or_message(lambda: self.changed(state, self.what_if.dead_of(vector)))

        @app.callback(
            Output(state_id, "data", allow_duplicate=True),
            Input(store_id("choice"), "data"),
            State(state_id, "data"),
            prevent_initial_call=True,
        )
        def press_name(choice: Any, state: FailureState) -> Any:
            worker = self.chosen(choice)
            if worker is None:
                return no_update
            changed, message = self._or_message(lambda: self.toggled(state, worker))
            set_props(self.name("message"), {"children": message})  # no output: other modes have no such place
            return changed

        if self.what_if.searcher is not None:

            @app.callback(
                Output(state_id, "data", allow_duplicate=True),
                Output(self.name("message"), "children", allow_duplicate=True),
                Input(self.name("longer"), "n_clicks"),
                State(state_id, "data"),
                prevent_initial_call=True,
                running=[(Output(self.name("longer"), "disabled"), True, False)],
            )
            def search_longer(clicks: int, state: FailureState) -> tuple[Any, Any]:
                return self.searched(state) if clicks else (no_update, no_update)

        @app.callback(
            Output(self.name("answer"), "children"),
            Output(self.name("workers"), "children"),
            Output(self.name("lanes"), "children"),
            Input(state_id, "data"),
            # Else Dash forgets it where a deep link sets the state before the page is there.
            Input(self.name("lanes"), "id"),
        )
        def show(state: FailureState, _: str) -> tuple[Any, Any, Any]:
            try:
                answer, lanes = self.answer(state), self.lanes(state)
            except RecycleError as error:
                return parts.problems([str(error)]), self.workers(()), parts.empty("There is no plan to draw.")
            return answer, self.workers(self._condition(state["failed"]).failed), lanes

        # Peaks are read from the plans themselves, so that a large library takes a moment: not while others wait.
        @app.callback(Output(self.name("library"), "children"), Input(self.name("library"), "id"))
        def list_library(_: str) -> Any:
            return self.library()

        @app.callback(
            Output(self.name("saved"), "data"),
            Input(self.name("save"), "n_clicks"),
            State(state_id, "data"),
            prevent_initial_call=True,
        )
        def save(clicks: int, state: FailureState) -> Any:
            return self.saved(state) if clicks else no_update

        @app.callback(
            Output(state_id, "data", allow_duplicate=True),
            Output(TABS, "value", allow_duplicate=True),
            Input(self.name("address"), "search"),
            State(state_id, "data"),
            prevent_initial_call="initial_duplicate",
        )
        def open_address(search: str | None, state: FailureState) -> tuple[Any, Any]:
            try:
                asked = self.from_address(search)
                if asked is None:  # where Back has led to an address without failures
                    return ({**state, "failed": []} if state["failed"] else no_update), no_update
                # An address that names another page stays there.
                named = parse_qs((search or "").lstrip("?")).get(TABS, [self.prefix])[0]
                return self.named_anew(state, asked), self.prefix if named == self.prefix else no_update
            except RecycleError:
                return no_update, self.prefix

        parts.in_browser(app, "failedInAddress", Output(self.name("addressed"), "data"), Input(state_id, "data"))

    def chosen(self, choice: Any) -> Worker | None:
        """The worker whose name was pressed beside the canvas; None where something else was chosen."""
        if not isinstance(choice, dict) or choice.keys() - {"lane", "address", "name"}:
            return None
        if choice.get("name") != self.name("all"):  # lanes of another mode
            return None
        lane, shape = choice.get("lane"), self.what_if.shape
        return shape.worker_at(lane) if isinstance(lane, int) and 0 <= lane < shape.worker_count else None

    def _or_message(self, make: Any) -> tuple[Any, Any]:
        """(new state, "") or (no change, what is wrong)."""
        try:
            return make(), ""
        except RecycleError as error:
            return no_update, str(error)


def _explainer(answer: Answer) -> Explainer:
    return Explainer(answer.timeline, limits=answer.plan.limits, bound=(answer.plan.lower_bound, answer.plan.gap))


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
    """Who takes on which layers from whom; or why no layer moves."""
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


def _memory(answer: Answer) -> str:
    limits = answer.plan.limits
    return short(answer.peak) + (f" of {short(max(limits))}" if limits else "")


_MEASURES: tuple[tuple[str, Any], ...] = (
    ("period", lambda answer: answer.plan.period),
    ("lower bound", lambda answer: answer.plan.lower_bound),
    ("gap", lambda answer: _gap(answer.plan.gap)),
    ("makespan", lambda answer: answer.plan.makespan),
    ("bubbles", lambda answer: percent(answer.timeline.bubble_ratio)),
    ("peak activations", _memory),
    ("answered in", lambda answer: f"{short(answer.seconds)} s"),
)
