"""Two or more schedules or executed steps on one time axis: what differs, where the time goes, where they part.

The first one chosen is what the others are held against. The answers are methods, so that tests need no browser.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from dash import ALL, Dash, Input, Output, State, ctx, dcc, html, no_update

from recycle.errors import RecycleError
from viz.analysis.differences import (
    Divergence,
    Matches,
    first_late,
    first_order_divergence,
    match,
    shares,
    split,
)
from viz.figures.boxes import time_unit
from viz.figures.delta import delta_figure
from viz.lanes import Grouping, LaneTable
from viz.operands import Operand, Operands, on_one_axis
from viz.pages import linked, parts
from viz.pages.figure_view import figure_view, grouping_choice, gutter, lanes_view, on_the_page
from viz.run import Run
from viz.shelf import Shelf, Source
from viz.sources import ScheduleFile

MOST_COMPARED, DIFFERENCES_SHOWN = 4, 12
TOLERANCE = 0.01
"""Share of the first one's makespan from which a start counts as another."""


class Comparison(NamedTuple):
    """One operand held against the first."""

    first: Operand
    second: Operand
    matches: Matches

    @property
    def divergences(self) -> list[tuple[str, Divergence]]:
        """The first other instruction, and the first that starts at another time; what there is of them."""
        a, b = self.first.timeline, self.second.timeline
        found = [
            ("First other instruction", first_order_divergence(a, b)),
            ("First other start", first_late(a, b, self.matches, TOLERANCE * a.makespan)),
        ]
        return [(title, one) for title, one in found if one is not None]


class Compared(NamedTuple):
    """What is on the page: the operands, each but the first held against it, and how they came onto one axis."""

    operands: list[Operand]
    pairs: list[Comparison]
    said: list[str]


class ComparePage:
    """The page that compares what `sources` hold; `prefix` keeps its component names apart from other pages'."""

    title = "Compare"

    def __init__(
        self,
        now: Callable[[], Sequence[Run | ScheduleFile]],
        shelf: Shelf | None = None,
        prefix: str = "compare",
    ) -> None:
        self.operands = Operands(now)
        self.shelf = shelf or Shelf()
        self.prefix = prefix
        self._last: tuple[Any, Compared] | None = None
        self._lock = threading.Lock()

    def layout(self) -> html.Div:
        choices = self.operands.choices()
        if len(choices) < 2:
            return html.Div(
                parts.empty(
                    "There is nothing to compare yet.",
                    "Give two schedule files, or a run directory with an executed step:"
                    " recycle view fault-free.json adaptive.json",
                )
            )
        options: Any = [{"label": choice.title, "value": choice.key} for choice in choices]
        return html.Div(
            [
                parts.card(
                    "What to compare",
                    html.Div(
                        [
                            dcc.Dropdown(
                                id=f"{self.prefix}-chosen",
                                options=options,
                                value=self.operands.first_choice(),
                                multi=True,
                                clearable=False,
                                placeholder="Choose two or more",
                            ),
                            html.Div(
                                [
                                    grouping_choice(f"{self.prefix}-grouping"),
                                    dcc.Checklist(
                                        id=f"{self.prefix}-ghost",
                                        options=[{"label": "Outline the first in the others", "value": "ghost"}],
                                        value=[],
                                    ),
                                ],
                                className="choices",
                            ),
                        ],
                        className="controls",
                    ),
                    caption="The first one is what the others are held against. At most four.",
                ),
                *linked.stores(self.prefix),
                dcc.Loading(html.Div(id=f"{self.prefix}-answer"), delay_show=300),
            ]
        )

    def compare(self, keys: Sequence[str], grouping: Grouping = "pipeline", ghost: bool = False) -> list[Any]:
        """Everything below the choice: figures, differences, lanes, the first one outlined in the others if `ghost`."""
        if len(keys) < 2:
            return [parts.empty("Choose two or more to compare.")]
        try:
            operands, pairs, said = self.compared(keys)
        except RecycleError as error:
            return [parts.problems([str(error)]), parts.empty("These cannot be put on one time axis.")]
        ignored = [f"only the first {MOST_COMPARED} are compared"] if len(keys) > MOST_COMPARED else []
        return [
            parts.problems(ignored),
            parts.card("Makespan and period", self.figures(operands), caption=" ".join(said)),
            *(self.difference(pair, place) for place, pair in enumerate(pairs)),
            self.lanes(pairs, operands, grouping, ghost),
            *(self.largest(pair) for pair in pairs),
        ]

    def compared(self, keys: Sequence[str]) -> Compared:
        """The operands of `keys` on one axis, each held against the first. Raises RecycleError as `on_one_axis`."""
        with self._lock:
            asked = (tuple(keys[:MOST_COMPARED]), self.operands.sources)
            if self._last is None or self._last[0] != asked:
                operands, said = on_one_axis([self.operands.get(key) for key in asked[0]])
                first, *others = operands
                pairs = [Comparison(first, other, match(first.timeline, other.timeline)) for other in others]
                self._last = asked, Compared(operands, pairs, said)
            return self._last[1]

    def figures(self, operands: Sequence[Operand]) -> Any:
        """A row per operand: makespan, period, bubbles."""
        first = operands[0].timeline
        rows: list[list[parts.Cell]] = []
        for operand in operands:
            t = operand.timeline
            more = t.makespan / first.makespan - 1 if first.makespan else 0.0
            against = None if t is first else "the same" if abs(more) < 5e-4 else f"{more:+.1%}"
            period = None if operand.executed else t.period
            rows.append([operand.title, t.makespan, against, period, f"{t.bubble_ratio:.1%}", len(t.schedule.live)])
        unit = f" ({operands[0].unit})" if operands[0].unit else ""
        head = ("", f"makespan{unit}", "against the first", f"period{unit}", "bubbles", "live workers")
        return parts.table(head, rows)

    def difference(self, pair: Comparison, place: int) -> html.Section:
        """Where the difference of the makespans comes from, and where the two part."""
        a, b = pair.first.timeline, pair.second.timeline
        unit = f" ({pair.first.unit})" if pair.first.unit else ""
        total = b.makespan - a.makespan
        rows: list[list[parts.Cell]] = [
            [share.title, share.first, share.second, _signed(share.difference)]
            for share in shares(split(a, pair.first.limits), split(b, pair.second.limits))
            if share.first or share.second
        ]
        rows.append(["makespan", a.makespan, b.makespan, _signed(total)])
        moved, missing = int(pair.matches.moved.sum()), (len(pair.matches.only_first), len(pair.matches.only_second))
        words = f"{len(pair.matches.first):,} instructions are in both"
        words += f", {moved:,} of them on another worker" if moved else ""
        words += f"; {missing[0]:,} only in the first, {missing[1]:,} only in the second." if any(missing) else "."
        divergences = [
            html.Li(
                [
                    html.Strong(f"{title}: "),
                    f"{one.text}, at {one.time:.5g} ",
                    html.Button(
                        "Show it",
                        id={"type": f"{self.prefix}-show", "place": place, "which": which},
                        n_clicks=0,
                        className="quiet",
                        title=f"{title}: show it in the lanes",
                    ),
                ]
            )
            for which, (title, one) in enumerate(pair.divergences)
        ]
        return parts.card(
            f"{pair.second.title} against {pair.first.title}",
            html.P(words, className="says"),
            html.Ul(divergences, className="says") if divergences else html.P("They do the same at the same times."),
            parts.table((f"per live worker{unit}", "first", "second", "difference"), rows),
            caption=(
                "Mean over the live workers: each is at work or waits for something at every moment, so the parts add"
                " up to the makespan and their differences to the difference. Memory limits count where they are"
                " known."
            ),
        )

    def lanes(
        self, pairs: Sequence[Comparison], operands: Sequence[Operand], grouping: Grouping, ghost: bool
    ) -> html.Section:
        """All operands under each other with their delta lanes, on one axis."""
        tables = self.tables(operands)
        span = max(table.span for table in tables)
        blocks: list[Any] = []
        left = gutter(tables)
        for place, (operand, table) in enumerate(zip(operands, tables, strict=True)):
            outlined = tables[0] if ghost and place and tables[0].workers == table.workers else None
            blocks.append(
                lanes_view(
                    operand.title,
                    table,
                    self.prefix,
                    len(blocks),
                    self.shelf,
                    span=span,
                    left=left,
                    source=Source(operand.timeline, limits=operand.limits),
                    grouping=grouping,
                    ghost=outlined,
                )
            )
            if place:
                scale, word = time_unit(table, span)
                pair = pairs[place - 1]
                figure = delta_figure(pair.first.timeline, operand.timeline, pair.matches, span, scale, word)
                heading = f"How much later instructions start in {operand.title}"
                spoken = f"{heading}, {operands[0].title} being zero"
                identifier = linked.graph_id(self.prefix, len(blocks))
                blocks.append(figure_view(heading, on_the_page(figure, left), identifier, spoken))
        return parts.card("Lanes", linked.linked(self.prefix, *blocks), parts.legend())

    def tables(self, operands: Sequence[Operand]) -> list[LaneTable]:
        """The lanes of all operands, in one unit of time."""
        return [operand.lanes for operand in operands]

    def largest(self, pair: Comparison) -> html.Details:
        """The instructions whose starts differ most."""
        a, b, matches = pair.first.timeline, pair.second.timeline, pair.matches
        order = np.argsort(-np.abs(matches.delta), kind="stable")[:DIFFERENCES_SHOWN]
        rows: list[list[parts.Cell]] = []
        for place in order.tolist():
            row, other = int(matches.first[place]), int(matches.second[place])
            rows.append(
                [
                    str(a.schedule.instruction(row)),
                    str(a.schedule.position(row)[0]),
                    str(b.schedule.position(other)[0]),
                    float(a.start[row]),
                    float(b.start[other]),
                    _signed(float(matches.delta[place])),
                ]
            )
        head = ("instruction", "worker", "worker in the second", "starts", "starts in the second", "difference")
        title = f"Largest differences of {pair.second.title}"
        return html.Details([html.Summary(title), parts.table(head, rows)], className="card")

    def place_of(self, keys: Sequence[str], grouping: Grouping, place: int, which: int) -> dict[str, Any]:
        """Where a divergence lies, for `linked.goto`. Raises RecycleError as `on_one_axis`."""
        operands, pairs, _ = self.compared(keys)
        first, second = operands[0], operands[1 + place]
        _, one = pairs[place].divergences[which]
        in_first = one.first >= 0
        timeline, row = (first.timeline, one.first) if in_first else (second.timeline, one.second)
        tables = self.tables(operands)
        span = max(table.span for table in tables)
        table = tables[0 if in_first else 1 + place].ordered(grouping)
        worker = timeline.schedule.position(row)[0]
        scale, _ = time_unit(table, span)
        return linked.goto(
            float(timeline.start[row]),
            float(timeline.end[row]),
            span,
            lane=table.workers.index(worker),
            worker=timeline.schedule.shape.worker_index(worker),
            graph=0 if in_first else 1 + 2 * place,
            scale=scale,
        )

    def register(self, app: Dash) -> None:
        """Add the page's callbacks."""
        linked.register(app, self.prefix)

        @app.callback(
            Output(f"{self.prefix}-answer", "children"),
            Input(f"{self.prefix}-chosen", "value"),
            Input(f"{self.prefix}-grouping", "value"),
            Input(f"{self.prefix}-ghost", "value"),
        )
        def show(keys: list[str] | None, grouping: Grouping, ghost: list[str] | None) -> Any:
            return self.compare(keys or [], grouping, bool(ghost))

        @app.callback(
            Output(f"{self.prefix}-goto", "data"),
            Input({"type": f"{self.prefix}-show", "place": ALL, "which": ALL}, "n_clicks"),
            State(f"{self.prefix}-chosen", "value"),
            State(f"{self.prefix}-grouping", "value"),
            prevent_initial_call=True,
        )
        def go(clicks: list[int], keys: list[str] | None, grouping: Grouping) -> Any:
            pressed = ctx.triggered_id
            if pressed is None or not any(clicks):
                return no_update
            try:
                return self.place_of(keys or [], grouping, pressed["place"], pressed["which"])
            except RecycleError:
                return no_update


def _signed(value: float) -> str:
    return "0" if abs(value) < 1e-9 else f"{value:+.5g}"
