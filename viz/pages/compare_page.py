"""Two or more schedules or executed steps on one time axis: what differs, where the time goes, where they part.

All others are compared with the first one chosen. The lanes come first, as one answer of a few kilobytes however
large they are; the figures and differences follow. The answers are methods, so that tests need no browser.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
from dash import Dash, Input, Output, State, dcc, html
from flask import Response, abort

from recycle.errors import RecycleError
from viz.analysis.differences import (
    Divergence,
    Matches,
    first_late,
    first_order_divergence,
    is_weight_half,
    match,
    shares,
    split,
)
from viz.figures.delta import delta_figure
from viz.figures.palette import SHADES
from viz.figures.time_axis import time_unit
from viz.free_memory import release_memory
from viz.lane_cache import LaneCache
from viz.lanes import LaneTable
from viz.operands import Operand, Operands, on_one_axis
from viz.pages import linked, parts
from viz.pages.bench import bench
from viz.pages.lanes_view import FOREVER, lanes_address, lanes_view
from viz.pages.page import Page, Workspace, keep_in_address
from viz.run import Run
from viz.shades import TOLERANCE, Shades, edges_of, for_canvas, later
from viz.sources import ScheduleFile

MOST_COMPARED, DIFFERENCES_SHOWN = 4, 12
Colour = Literal["later", "kind"]
Arrangement = Literal["stacked", "interleaved"]
LETTER_PIXELS = 14
"""What a lane's name takes more when it says whose it is."""


class ComparedPair(NamedTuple):
    """The first operand and one that is compared with it."""

    first: Operand
    second: Operand
    matches: Matches

    @property
    def divergences(self) -> list[tuple[str, Divergence]]:
        """The first point where a worker runs something else, and the first instruction that starts at another time."""
        a, b = self.first.timeline, self.second.timeline
        found = [
            ("First difference", first_order_divergence(a, b)),
            ("First difference of starts", first_late(a, b, self.matches, TOLERANCE * a.makespan)),
        ]
        return [(title, one) for title, one in found if one is not None]


class Compared(NamedTuple):
    """What is on the page: the operands, their lanes, the others each with the first, and how they share an axis."""

    operands: list[Operand]
    tables: list[LaneTable]
    pairs: list[ComparedPair]
    notes: list[str]

    @property
    def span(self) -> float:
        return max(table.span for table in self.tables)

    @property
    def is_same_workers(self) -> bool:
        """Whether lane i is the same worker in all, so that lanes can lie under each other."""
        return all(table.workers == self.tables[0].workers for table in self.tables)


class ComparePage(Page):
    """The page that compares what `now` gives."""

    prefix, title = "compare", "Compare"
    invitation = "Both on one axis: which instructions start later, where the time goes, where they first differ."

    def __init__(self, now: Callable[[], Sequence[Run | ScheduleFile]], cache: LaneCache | None = None) -> None:
        super().__init__(cache)
        self.operands = Operands(now)
        self.shades = Shades()
        self._last: tuple[Any, Compared] | None = None
        self._lock, self._answering = threading.Lock(), threading.Lock()

    @classmethod
    def pages_of(cls, workspace: Workspace) -> Sequence[Page]:
        is_enough = workspace.runs or len(workspace.files) > 1
        return [cls(workspace.sources, workspace.cache)] if is_enough else []

    def layout(self) -> html.Div:
        choices = self.operands.choices()
        if len(choices) < 2:
            hint = "Give two schedule files, or a run directory with an executed step:"
            hint += " recycle view fault-free.json adaptive.json"
            return html.Div(parts.empty("There is nothing to compare yet.", hint))
        chosen = dcc.Dropdown(
            choices,
            self.operands.first_choice(),
            id=self.name("chosen"),
            multi=True,
            clearable=False,
            placeholder="Choose two or more",
        )
        how = parts.div(
            "choices",
            _choice("Colour", self.name("colour"), _COLOURS),
            _choice("Lanes", self.name("arrangement"), _ARRANGEMENTS),
            dcc.Checklist({"ghost": "Outline the first in the others"}, [], id=self.name("ghost")),
        )
        own = {"Differences": parts.awaited(self.name("answer"))}
        return html.Div(
            [
                bench(
                    self.prefix,
                    [],
                    own,
                    controls=parts.div("controls", chosen, how),
                    opened="differences",
                    identifier=self.name("lanes"),
                ),
                linked.store(self.prefix),
            ],
            className="through",
        )

    def lanes(
        self, keys: Sequence[str], colour: Colour = "later", arrangement: Arrangement = "stacked", ghost: bool = False
    ) -> list[Any]:
        """The timelines of all on one axis, with how much later their instructions start."""
        if len(keys) < 2:
            return [parts.empty("Choose two or more to compare.")]
        try:
            compared = self.compared(keys)
        except RecycleError as error:
            return [parts.problems([str(error)]), parts.empty("These cannot be put on one time axis.")]
        ignored = [f"only the first {MOST_COMPARED} are compared"] if len(keys) > MOST_COMPARED else []
        together = arrangement == "interleaved" and compared.is_same_workers
        if arrangement == "interleaved" and not together:
            ignored.append("these have other workers, so their lanes cannot lie under each other")
        shades = [self._shaded(pair, table) for pair, table in zip(compared.pairs, compared.tables[1:], strict=True)]
        left = parts.gutter(compared.tables) + LETTER_PIXELS * together
        coloured = [shade if colour == "later" else None for shade in shades]
        legends = [_shade_legend(pair, compared) if colour == "later" else None for pair in compared.pairs]
        if together:
            blocks = [self._interleaved(compared, coloured, left), *filter(None, legends)]
        else:
            blocks = self._stacked(compared, coloured, legends, left, ghost)
        for place, pair in enumerate(compared.pairs):
            blocks.append(self._delta(pair, compared, left, len(compared.operands) + place))
        return [parts.problems(ignored), linked.linked(self.prefix, *blocks)]

    def _shaded(self, pair: ComparedPair, table: LaneTable) -> dict[str, Any]:
        address = self.shades.put(later(table, pair.matches))
        return for_canvas(address, edges_of(pair.first.timeline, pair.matches), pair.first.title)

    def _stacked(
        self,
        compared: Compared,
        coloured: Sequence[dict[str, Any] | None],
        legends: Sequence[Any],
        left: int,
        ghost: bool,
    ) -> list[Any]:
        first = compared.tables[0]
        shown = zip(compared.operands, compared.tables, [None, *coloured], [None, *legends], strict=True)
        return [
            lanes_view(
                operand.title,
                table,
                f"{self.prefix}-{place}",
                self.cache,
                linked=self.prefix,
                place=place,
                span=compared.span,
                left=left,
                explainer=operand.explainer,
                ghost=first if ghost and place and first.workers == table.workers else None,
                more={"data-shades": json.dumps([shade])} if shade else None,
                legend=legend,
            )
            for place, (operand, table, shade, legend) in enumerate(shown)
        ]

    def _interleaved(self, compared: Compared, coloured: Sequence[dict[str, Any] | None], left: int) -> html.Div:
        """One canvas: of each worker the lane of the first, below it that of the second, and so on."""
        addresses = [
            lanes_address(self.cache.put(table, operand.explainer))
            for operand, table in zip(compared.operands, compared.tables, strict=True)
        ]
        title = "; ".join(f"{chr(65 + place)}: {operand.title}" for place, operand in enumerate(compared.operands))
        return lanes_view(
            title,
            compared.tables[0],
            f"{self.prefix}-all",
            self.cache,
            linked=self.prefix,
            span=compared.span,
            left=left,
            rows=compared.tables[0].lanes * len(compared.tables),
            more={"data-with": json.dumps(addresses[1:]), "data-shades": json.dumps([None, *coloured])},
        )

    def _delta(self, pair: ComparedPair, compared: Compared, left: int, place: int) -> html.Div:
        unit = time_unit(compared.tables[0], compared.span)
        figure = delta_figure(pair.first.timeline, pair.second.timeline, pair.matches, compared.span, unit)
        heading = f"How much later instructions start in {pair.second.title}"
        spoken = f"{heading}, {pair.first.title} being zero"
        return parts.figure_view(heading, parts.under_lanes(figure, left), linked.graph_id(self.prefix, place), spoken)

    def compare(self, keys: Sequence[str], arrangement: Arrangement = "stacked") -> list[Any]:
        """What stands beside the lanes: figures, where the difference comes from, what differs most."""
        if len(keys) < 2:
            return []
        try:
            compared = self.compared(keys)
        except RecycleError:
            return []  # the message stands where the lanes would be
        cards = [
            parts.card("Makespan and period", self.figures(compared.operands), caption=" ".join(compared.notes)),
            *(self.difference(compared, pair, arrangement) for pair in compared.pairs),
            *(self.largest(pair) for pair in compared.pairs),
        ]
        release_memory()
        return cards

    def compared(self, keys: Sequence[str]) -> Compared:
        """The operands of `keys` on one axis, each compared with the first. Raises RecycleError as `on_one_axis`."""
        with self._lock:
            asked = (tuple(keys[:MOST_COMPARED]), self.operands.sources)
            if self._last is None or self._last[0] != asked:
                operands, notes = on_one_axis([self.operands.get(key) for key in asked[0]])
                first, *others = operands
                pairs = [ComparedPair(first, other, match(first.timeline, other.timeline)) for other in others]
                self._last = asked, Compared(operands, [operand.lanes for operand in operands], pairs, notes)
                release_memory()
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

    def difference(self, compared: Compared, pair: ComparedPair, arrangement: Arrangement) -> html.Section:
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
        divergences = []
        for title, one in pair.divergences:
            lane, graph = self.place_of(compared, pair, one, arrangement)
            show = linked.show_button([lane], f"{title}: show it in the lanes", graph)
            divergences.append(html.Li([html.Strong(f"{title}: "), f"{one.text}, at {one.time:.5g} ", show]))
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

    def largest(self, pair: ComparedPair) -> html.Details:
        """The instructions whose starts differ most."""
        a, b, matches = pair.first.timeline, pair.second.timeline, pair.matches
        order = np.argsort(-np.abs(matches.delta), kind="stable")[:DIFFERENCES_SHOWN]
        rows: list[list[parts.Cell]] = []
        is_half = is_weight_half(a, matches)
        for place in order.tolist():
            row, other = int(matches.first[place]), int(matches.second[place])
            rows.append(
                [
                    f"{a.schedule.instruction(row)}{' (weight half)' if is_half[place] else ''}",
                    str(a.schedule.position(row)[0]),
                    str(b.schedule.position(other)[0]),
                    float(matches.time[place]),
                    float(matches.time[place] + matches.delta[place]),
                    _signed(float(matches.delta[place])),
                ]
            )
        head = ("instruction", "worker", "worker in the second", "starts", "starts in the second", "difference")
        title = f"Largest differences of {pair.second.title}"
        return html.Details([html.Summary(title), parts.table(head, rows)], className="card")

    def place_of(
        self, compared: Compared, pair: ComparedPair, one: Divergence, arrangement: Arrangement
    ) -> tuple[linked.LaneInterval, int]:
        """Where a divergence lies, and the place of that timeline in the block."""
        graph = 0 if one.first >= 0 else 1 + compared.pairs.index(pair)
        timeline, row = compared.operands[graph].timeline, one.first if one.first >= 0 else one.second
        lane = timeline.schedule.shape.worker_index(timeline.schedule.position(row)[0])
        if arrangement == "interleaved" and compared.is_same_workers:
            lane, graph = lane * len(compared.tables) + graph, 0
        return linked.LaneInterval(lane, float(timeline.start[row]), float(timeline.end[row])), graph

    def register(self, app: Dash) -> None:
        """Add the page's callbacks, and the route of the differences."""
        chosen, arrangement = self.name("chosen"), self.name("arrangement")
        linked.register(app, self.prefix)
        for control in ("chosen", "colour", "arrangement", "ghost"):
            keep_in_address(app, self.name(control), State(self.name(control), "options"))

        def shades(digest: str) -> Response:
            content = self.shades.get(digest) or abort(404)
            return Response(content, mimetype="application/octet-stream", headers={"Cache-Control": FOREVER})

        app.server.add_url_rule("/shades/<digest>.bin", "shades", shades)

        @app.callback(
            Output(self.name("lanes"), "children"),
            Input(chosen, "value"),
            Input(self.name("colour"), "value"),
            Input(arrangement, "value"),
            Input(self.name("ghost"), "value"),
        )
        def draw(keys: list[str] | None, colour: Colour, how: Arrangement, ghost: list[str] | None) -> Any:
            with self._answering:
                return self.lanes(keys or [], colour, how, bool(ghost))

        @app.callback(Output(self.name("answer"), "children"), Input(chosen, "value"), Input(arrangement, "value"))
        def show(keys: list[str] | None, how: Arrangement) -> Any:
            with self._answering:  # after the lanes, which are there first
                return self.compare(keys or [], how)


_COLOURS = {"later": "how much later it starts", "kind": "kind of work"}
_ARRANGEMENTS = {"stacked": "one timeline under the other", "interleaved": "lane under lane"}


def _choice(title: str, identifier: str, options: dict[str, str]) -> html.Div:
    """A choice of one of a few; the first is chosen."""
    return html.Div([html.Span(title), dcc.RadioItems(options, next(iter(options)), id=identifier, inline=True)])


def _shade_legend(pair: ComparedPair, compared: Compared) -> html.Ul:
    """What the shades of one timeline stand for, with their lengths of time."""
    unit = time_unit(compared.tables[0], compared.span)
    some, much = (unit.text(length, 4) for length in edges_of(pair.first.timeline, pair.matches))
    words = (
        f"over {much} earlier «",
        f"over {some} earlier ‹",
        "the same",
        f"over {some} later ›",
        f"over {much} later »",
    )
    entries = [html.Li(html.Strong(f"{pair.second.title}, against {pair.first.title}"))]
    for paint, text in zip(SHADES, (*words, "only here *"), strict=True):
        entries.append(html.Li([html.Span(className="swatch", style={"background": paint.fill}), text]))
    return html.Ul(entries, className="legend")


def _signed(value: float) -> str:
    return "0" if abs(value) < 1e-9 else f"{value:+.5g}"
