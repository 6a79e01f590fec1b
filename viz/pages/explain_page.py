"""Why an iteration takes as long as it does: its critical path, its bubbles by cause, the memory of a worker, a search.

One schedule or executed step at a time. The lanes come first, what takes longer to work out follows. What stands in the
table of what is in view follows the zoom; each bubble and each hit of the search leads to its place, and a press on any
bubble in the lanes tells its cause. The answers are methods, so that tests need no browser.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import numpy as np
from dash import Dash, Input, Output, State, ctx, dcc, html

from recycle.errors import RecycleError
from recycle.ir.gaps import Gap, GapCause
from recycle.ir.kinds import KIND_CLASSES
from recycle.ir.simulate import TOLERANCE
from recycle.ir.slack import slack
from recycle.shape import Worker
from viz.analysis.bubbles import TITLES
from viz.analysis.memory import memory_curve
from viz.analysis.ranges import range_statistics
from viz.analysis.waits import name
from viz.figures.memory_strip import memory_figure
from viz.figures.time_axis import time_unit
from viz.free_memory import release_memory
from viz.labels import marks
from viz.lane_cache import Explainer, LaneCache
from viz.lanes import LaneTable
from viz.operands import Operand, Operands
from viz.pages import linked, parts
from viz.pages.lanes_view import lanes_address, lanes_view
from viz.pages.page import Page, Workspace
from viz.run import Run
from viz.sources import ScheduleFile

BUBBLES_SHOWN, HITS_SHOWN, WORKERS_OFFERED = 12, 40, 2000


class Explained:
    """One operand with what the page asks of it, each worked out once."""

    def __init__(self, operand: Operand, cache: LaneCache) -> None:
        self.operand, self.timeline, self.cache = operand, operand.timeline, cache

    @cached_property
    def table(self) -> LaneTable:
        return self.operand.lanes

    @property
    def address(self) -> str:
        """Where the browser finds its lanes."""
        return lanes_address(self.cache.put(self.table, self.explainer))

    @cached_property
    def explainer(self) -> Explainer:
        """What the canvas asks of it; that of another page which shows the same lanes, where there is one."""
        made = self.operand.explainer
        shown = self.cache.get(self.cache.put(self.table, made))
        kept = shown.explainer if shown else None
        return kept if kept and (kept.timeline, kept.limits) == (made.timeline, made.limits) else made

    @cached_property
    def slack(self) -> Any:
        """Slack of each instruction of a plan, None for an executed step."""
        return None if self.operand.executed else slack(self.timeline)

    @cached_property
    def highest(self) -> Worker:
        """The live worker that holds the most activations, by its share of the limit where there is one."""
        peaks = self.timeline.peak_activations
        limits = self.operand.limits or [1.0] * self.timeline.schedule.shape.ranks
        shares = [-1.0 if peak is None else peak / (limits[w % len(limits)] or 1.0) for w, peak in enumerate(peaks)]
        return self.timeline.schedule.shape.worker_at(int(np.argmax(shares)))


class ExplainPage(Page):
    """The page that explains one of what `now` gives."""

    prefix, title = "explain", "Explain"
    invitation = "Why it takes that long: the critical path, bubbles by cause, memory, a search."

    def __init__(self, now: Callable[[], Sequence[Run | ScheduleFile]], cache: LaneCache | None = None) -> None:
        super().__init__(cache)
        self.operands = Operands(now)
        self._last: tuple[Any, Explained] | None = None
        self._lock, self._answering = threading.Lock(), threading.Lock()

    @classmethod
    def pages_of(cls, workspace: Workspace) -> Sequence[Page]:
        return [cls(workspace.sources, workspace.cache)] if workspace.sources() else []

    def layout(self) -> html.Div:
        choices = self.operands.choices()
        if not choices:
            hint = "It takes a schedule that finishes, or an executed step."
            return html.Div(parts.empty("There is nothing to explain yet.", hint))
        chosen = dcc.Dropdown(choices, self.operands.first_choice()[-1], id=self.name("chosen"), clearable=False)
        search = parts.div(
            "row wide",
            html.Label("Search", htmlFor=self.name("query")),
            dcc.Input(id=self.name("query"), placeholder="kind:W mb:1.3 stage:2 dur>1.2", debounce=True, size="44"),
        )
        return html.Div(
            [
                parts.card("What to explain", parts.div("controls", chosen, search)),
                *linked.stores(self.prefix),
                dcc.Store(id=self.name("searched")),
                dcc.Store(id=self.name("found")),
                html.Div(id=self.name("hits")),
                *(parts.awaited(self.name(part)) for part in ("lanes", "path", "bubbles")),
            ]
        )

    def explained(self, key: str) -> Explained:
        """What there is to say of an operand; the last one is kept. Raises RecycleError as `Operands.get`."""
        with self._lock:
            asked = (key, self.operands.sources)
            if self._last is None or self._last[0] != asked:
                self._last = asked, Explained(self.operands.get(key), self.cache)
            return self._last[1]

    def path(self, one: Explained) -> html.Section:
        """What the critical path is made of."""
        timeline, unit = one.timeline, one.table.unit
        rows = np.array(timeline.critical_path, dtype=np.int64)
        kinds = timeline.schedule.columns.kind[rows]
        seconds = np.bincount(kinds, weights=(timeline.end - timeline.start)[rows], minlength=len(KIND_CLASSES))
        order = np.argsort(-seconds, kind="stable")
        waited = timeline.makespan - float(seconds.sum())
        cells: list[list[parts.Cell]] = [
            [_kind(int(kind)), int((kinds == kind).sum()), float(seconds[kind]), _share(seconds[kind], timeline)]
            for kind in order.tolist()
            if seconds[kind] > 0
        ]
        if waited > timeline.makespan * TOLERANCE:
            cells.append(["between them", None, waited, _share(waited, timeline)])
        free = ""
        if one.slack is not None:
            critical = int((one.slack <= timeline.makespan * TOLERANCE).sum())
            free = f" {critical:,} of {len(one.slack):,} instructions are critical: delaying one delays the iteration."
        return parts.card(
            f"{one.operand.title}: makespan {timeline.makespan:.6g}{unit and ' ' + unit}",
            parts.table(("on the critical path", "instructions", f"time{unit and f' ({unit})'}", "share"), cells),
            caption=f"One chain of waits from the first start to the last end.{free}",
        )

    def lanes(self, one: Explained) -> html.Section:
        """Lanes, the memory of a worker below them, and what is in view."""
        table, left = one.table, parts.gutter([one.table])
        live = [str(worker) for worker in one.timeline.schedule.live[:WORKERS_OFFERED]]
        view = lanes_view(
            one.operand.title,
            table,
            f"{self.prefix}-0",
            self.cache,
            linked=self.prefix,
            span=table.span or None,
            left=left,
            explainer=one.explainer,
        )
        worker = self.name("worker")
        chosen = dcc.Dropdown(live, str(one.highest), id=worker, clearable=False, style={"width": "140px"})
        choice = parts.div("row", html.Label("Memory of worker", htmlFor=worker), chosen)
        memory = html.Div(self.memory(one, one.highest, left), id=self.name("memory"))
        return parts.card(
            "Lanes and memory",
            linked.linked(self.prefix, view, choice, memory),
            parts.legend(),
            html.H3("In view"),
            html.Div(id=self.name("view")),
            dcc.Store(id=self.name("left"), data=left),
        )

    def memory(self, one: Explained, worker: Worker, left: int) -> html.Div:
        """The memory strip of a worker."""
        timeline, table = one.timeline, one.table
        limits = one.operand.limits
        limit = limits[worker.rank] if limits else None
        curve = memory_curve(timeline, timeline.schedule.shape.worker_index(worker), limit)
        setter = str(timeline.schedule.instruction(curve.peak_row)) if curve.peak_row >= 0 else "nothing"
        figure = parts.under_lanes(memory_figure(curve, setter, table.span or 1.0, time_unit(table)), left)
        spoken = f"Worker {worker} holds at most {curve.peak:.4g} activations, from {setter} on"
        spoken += f"; its limit is {limit:g}." if limit is not None else "; no limit is known."
        return parts.figure_view("", figure, linked.graph_id(self.prefix, 1), spoken, spoken)

    def in_view(self, one: Explained, shown: Sequence[float] | None) -> html.Div:
        """Work by kind and bubbles by cause between two times of the axis; of all when `shown` is None."""
        table = one.table
        unit = time_unit(table)
        scale, word = unit
        begin, end = (value / scale for value in shown) if shown else (0.0, one.timeline.makespan)
        found = range_statistics(one.timeline, one.explainer.bubbles.gaps, begin, end)
        rows: list[list[parts.Cell]] = []
        for kind, seconds in sorted(found.work.items(), key=lambda item: -item[1]):
            rows.append([_kind(kind), seconds * scale, f"{found.share(seconds):.1%}"])
        if found.rerouted:
            rows.append(["of that re-routed", found.rerouted * scale, f"{found.share(found.rerouted):.1%}"])
        for cause, seconds in sorted(found.bubbles.items(), key=lambda item: -item[1]):
            rows.append([f"idle: {TITLES[cause]}", seconds * scale, f"{found.share(seconds):.1%}"])
        where = f"{found.begin * scale:.5g} to {unit.text(found.end, 5)}"
        words = f"From {where}: {found.operations:,} instructions on {found.workers:,} live workers."
        head = ("", f"worker time{word and f' ({word})'}", "share")
        return html.Div([html.P(words, className="hint"), parts.table(head, rows)])

    def longest(self, one: Explained) -> html.Section:
        """The longest bubbles, each with its cause and a way to its place."""
        gaps = one.explainer.bubbles.gaps.longest(None, BUBBLES_SHOWN)
        if not gaps:
            return parts.card("Bubbles", html.P("No worker waits for anything before its program ends."))
        totals = one.explainer.bubbles.gaps.seconds.sum(axis=0)
        order = [GapCause(int(cause)) for cause in np.argsort(-totals, kind="stable") if totals[cause] > 0]
        spent = "; ".join(f"{TITLES[cause]} {totals[cause]:.4g}" for cause in order)
        unit = " Times in seconds." if one.table.unit == "s" else ""
        rows: list[list[parts.Cell]] = [
            [
                str(gap.worker),
                TITLES[gap.cause],
                one.explainer.bubbles.reason(gap),
                linked.show_button(self.prefix, "bubble", place),
            ]
            for place, gap in enumerate(gaps)
        ]
        return parts.card(
            "Longest bubbles",
            parts.table(("worker", "cause", "", ""), rows, "findings"),
            caption=f"In all, over all workers: {spent}.{unit}",
        )

    def searched(self, key: str) -> dict[str, Any]:
        """Where the browser searches, and how many hits it sends."""
        return {"address": self.explained(key).address, "most": HITS_SHOWN}

    def hits(self, key: str, found: Any) -> Any:
        """What the browser's search found, by time, with why each starts when it does; or what is wrong with the query.

        Args:
            found: as of `find` in `assets/lanes_search.js`; None for an empty query.
        """
        if not isinstance(found, dict):
            return []
        if "problem" in found:
            return parts.problems([str(found["problem"])])
        one = self.explained(key)
        chosen = [i for i in found["operations"][:HITS_SHOWN] if isinstance(i, int) and 0 <= i < len(one.table)]
        if found["address"] != one.address or not chosen:
            return parts.empty(f"No match for {found['query']}.", "docs/viewer.md lists the fields.")
        rows: list[list[parts.Cell]] = []
        for operation in chosen:
            row = int(one.table.instruction_id[operation])
            rows.append(
                [
                    name(one.timeline, row),
                    f"{one.timeline.start[row]:.6g}",
                    f"{one.timeline.end[row] - one.timeline.start[row]:.6g}",
                    None if one.slack is None else float(one.slack[row]),
                    one.explainer.waits.reason(row),
                    marks(one.table, operation),
                    linked.show_button(self.prefix, "hit", operation),
                ]
            )
        total = int(found["total"])
        more = f"{total:,} found" + (f", the first {len(rows)} by time" if total > len(rows) else "")
        unit = " (s)" if one.table.unit == "s" else ""
        head = ("instruction", f"starts{unit}", f"takes{unit}", f"slack{unit}", "why then", "", "")
        return parts.card("Found", parts.table(head, rows, "findings"), caption=f"{more}.")

    def place_of(self, key: str, what: str, place: int) -> dict[str, Any]:
        """Where the bubble at a place of the list, or a hit (an operation), lies, for `linked.goto`.

        Raises:
            RecycleError: as `Operands.get`.
            IndexError: there is none.
        """
        one = self.explained(key)
        if what == "bubble":
            gap: Gap = one.explainer.bubbles.gaps.longest(None, BUBBLES_SHOWN)[place]
            worker, start, end = gap.worker, gap.start, gap.end
        else:
            row = int(one.table.instruction_id[place])
            worker = one.timeline.schedule.position(row)[0]
            start, end = float(one.timeline.start[row]), float(one.timeline.end[row])
        lane = one.timeline.schedule.shape.worker_index(worker)
        return linked.goto([linked.LaneInterval(lane, start, end)])

    def _answered(self, answer: Callable[[], Any], quietly: bool = False) -> Any:
        """The answer, or what is wrong; nothing if `quietly`, where another answer says it. One at a time: what several
        need is worked out once, and what they need meanwhile is not there all at once."""
        with self._answering:
            try:
                return answer()
            except RecycleError as error:
                return [] if quietly else parts.problems([str(error)])
            finally:
                release_memory()

    def register(self, app: Dash) -> None:
        chosen = self.name("chosen")
        linked.register(
            app, self.prefix, lambda what, place, key: self.place_of(key, what, place), State(chosen, "value")
        )

        @app.callback(
            Output(self.name("lanes"), "children"), Output(self.name("searched"), "data"), Input(chosen, "value")
        )
        def draw(key: str) -> Any:
            lanes = self._answered(lambda: self.lanes(self.explained(key)))
            return lanes, self._answered(lambda: self.searched(key), quietly=True)

        for part, part_of in (("path", self.path), ("bubbles", self.longest)):
            app.callback(Output(self.name(part), "children"), Input(chosen, "value"))(
                lambda key, part_of=part_of: self._answered(lambda: part_of(self.explained(key)), quietly=True)
            )

        parts.in_browser(
            app,
            "find",
            Output(self.name("found"), "data"),
            Input(self.name("query"), "value"),
            Input(self.name("searched"), "data"),
            prevent_initial_call=False,
        )

        @app.callback(Output(self.name("hits"), "children"), Input(self.name("found"), "data"), State(chosen, "value"))
        def show_hits(found: Any, key: str) -> Any:
            return self._answered(lambda: self.hits(key, found))

        @app.callback(
            Output(self.name("memory"), "children"),
            Input(self.name("worker"), "value"),
            State(chosen, "value"),
            State(self.name("left"), "data"),
            prevent_initial_call=True,
        )
        def strip(worker: str, key: str, left: int) -> Any:
            return self._answered(lambda: self.memory(self.explained(key), Worker.parse(worker), left))

        @app.callback(
            Output(self.name("view"), "children"),
            Input(self.name("range"), "data"),
            Input(self.name("left"), "data"),
            State(chosen, "value"),
        )
        def zoomed(shown: Any, _: int, key: str) -> Any:
            begun = ctx.triggered_id != self.name("range")  # other lanes, drawn whole
            usable = None if begun or not is_range(shown) else shown
            return self._answered(lambda: self.in_view(self.explained(key), usable))


def is_range(shown: Any) -> bool:
    """Whether the browser sent two times."""
    return (
        isinstance(shown, list)
        and len(shown) == 2
        and all(isinstance(time, int | float) and np.isfinite(time) for time in shown)
    )


def _kind(kind: int) -> str:
    """Its token, or its title where that is no word."""
    cls = KIND_CLASSES[kind]
    return cls.token if cls.token[0].isalpha() else cls.row.title


def _share(seconds: Any, timeline: Any) -> str:
    return f"{float(seconds) / timeline.makespan:.1%}" if timeline.makespan else "–"
