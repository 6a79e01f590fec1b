"""Comparison of schedules or executed steps on one time axis: differences, parts of the time, points of divergence.

The first choice is the reference. The lanes arrive first; figures and differences follow.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, Literal

from dash import Dash, dcc, html
from flask import Response, abort

from recycle.errors import RecycleError
from viz.figures.palette import SHADES
from viz.lane_cache import BoundedCache, content_hash, lanes_address, release_memory
from viz.pages import parts
from viz.pages.comparison import (
    ComparedPair,
    Comparison,
    LaneArrangement,
    choices,
    difference,
    figures,
    first_choice,
    instruction_times,
    shade_legend,
)
from viz.pages.lanes_view import cached_response, lanes_view
from viz.pages.page import Mode, Page, Workspace, keep_in_address
from viz.pages.scenario import INPUTS
from viz.scenario import AS_GIVEN, Scenario

MAX_COMPARED = 4
MAX_BYTES = 100_000_000
"""Maximum bytes of cached differences."""
Colour = Literal["later", "kind"]
LETTER_PIXELS = 14
"""Additional width of a lane's name that includes the timeline's letter."""


class ComparePage(Page):
    prefix, title = "compare", "Compare"
    has_lanes, first_panel = True, "differences"
    invitation = "Both on one axis: which instructions start later, where the time goes, where they first differ."

    def __init__(self, workspace: Workspace, place: int = 0) -> None:
        super().__init__(workspace, place)
        self.shades: BoundedCache[str, bytes] = BoundedCache(MAX_BYTES, len)
        self._last: tuple[Any, Comparison] | None = None
        self._answering = threading.Lock()

    @classmethod
    def count(cls, workspace: Workspace) -> int:
        return bool(workspace.runs or len(workspace.files) > 1)

    def layout(self) -> Mode:
        titles = {key: title for key, (title, _) in choices(self.workspace.sources()).items()}
        if len(titles) < 2:
            hint = "Pass two schedule files, or a run directory with an executed step:"
            hint += " recycle view fault-free.json adaptive.json"
            return Mode([], {"Differences": parts.empty_state("There is nothing to compare yet.", hint)})
        options: Any = {"multi": True, "clearable": False, "placeholder": "Choose two or more"}
        controls = parts.div(
            "controls",
            html.Span("Compared with the first:"),
            dcc.Dropdown(titles, first_choice(self.workspace.sources()), id=self.name("chosen"), **options),
            parts.div(
                "choices",
                _choice("Color", self.name("colour"), _COLOURS),
                _choice("Lanes", self.name("arrangement"), _ARRANGEMENTS),
                dcc.Checklist({"ghost": "Outline the first in the others"}, [], id=self.name("ghost")),
            ),
        )
        panels = {"Differences": [controls, parts.loading_area(self.name("answer"))]}
        return Mode([], panels)

    def lanes(
        self,
        keys: Sequence[str],
        colour: Colour = "later",
        arrangement: LaneArrangement = "stacked",
        ghost: bool = False,
        scenario: Scenario = AS_GIVEN,
    ) -> list[Any]:
        if len(keys) < 2:
            return [parts.empty_state("Choose two or more to compare.")]
        try:
            comparison = self.comparison(keys, scenario)
        except RecycleError as error:
            return [parts.problems([str(error)]), parts.empty_state("These cannot be put on one time axis.")]
        ignored = [f"only the first {MAX_COMPARED} are compared"] if len(keys) > MAX_COMPARED else []
        together = arrangement == "interleaved" and comparison.is_same_workers
        if arrangement == "interleaved" and not together:
            ignored.append("the timelines have different workers, so their lanes cannot be interleaved")
        shades = [self._shades(pair, colour == "later" and pair.is_matched) for pair in comparison.pairs]
        is_shaded = colour == "later" and all(pair.is_matched for pair in comparison.pairs)
        legends = [shade_legend(pair, comparison) if is_shaded else None for pair in comparison.pairs]
        first, *others = comparison.timelines
        common: dict[str, Any] = {
            "linked": self.prefix,
            "span": comparison.span,
            "left": parts.gutter(*comparison.tables) + LETTER_PIXELS * together,
            "is_timed": True,
        }
        if together:
            title = "; ".join(f"{chr(65 + place)}: {item.title}" for place, item in enumerate(comparison.timelines))
            addresses = [lanes_address(self.cache.put(other)) for other in others]
            extra = {"data-with": json.dumps(addresses), "data-shades": json.dumps([None, *shades])}
            rows = first.table.lanes * len(comparison.timelines)
            view = lanes_view(title, first, f"{self.prefix}-all", self.cache, rows=rows, extra=extra, **common)
            return [parts.problems(ignored), parts.div("linked", view, *legends)]
        views = [lanes_view(first.title, first, f"{self.prefix}-0", self.cache, **common)]
        for place, (item, shade, legend) in enumerate(zip(others, shades, legends, strict=True), 1):
            name, extra = f"{self.prefix}-{place}", {"data-shades": json.dumps([shade])}
            outline = first if ghost and first.table.workers == item.table.workers else None
            looks: Any = {"extra": extra, "legend": legend, "ghost": outline, **common}
            views.append(lanes_view(item.title, item, name, self.cache, place=place, **looks))
        return [parts.problems(ignored), parts.div("linked", *views)]

    def _shades(self, pair: ComparedPair, is_shaded: bool) -> dict[str, Any]:
        content = pair.deltas.astype("<f4").tobytes()
        digest = content_hash(content)
        self.shades.put(digest, content)
        return {
            "address": f"shades/{digest}.bin",
            "edges": pair.edges,
            "title": pair.first.title,
            "name": pair.second.title,
            "paints": [asdict(paint) for paint in SHADES],
            "is_shaded": is_shaded,
        }

    def compare(
        self, keys: Sequence[str], arrangement: LaneArrangement = "stacked", scenario: Scenario = AS_GIVEN
    ) -> list[Any]:
        """Build the content below the lanes: figures, parts of the difference, times of instructions."""
        if len(keys) < 2:
            return []
        try:
            comparison = self.comparison(keys, scenario)
        except RecycleError:
            return []  # the lanes' place shows the message
        cards = [
            parts.card("Makespan and period", figures(comparison), caption=" ".join(comparison.notes)),
            *(difference(comparison, pair, arrangement) for pair in comparison.pairs),
            *(instruction_times(comparison, pair) for pair in comparison.pairs if pair.is_matched),
        ]
        release_memory()
        return cards

    def comparison(self, keys: Sequence[str], scenario: Scenario) -> Comparison:
        """Return `Comparison.of_keys` for the first MAX_COMPARED keys, computed once."""
        request = (tuple(keys[:MAX_COMPARED]), list(self.workspace.sources()), scenario)
        if self._last is None or self._last[0] != request:
            self._last = request, Comparison.of_keys(request[1], request[0], self.cache, scenario)
            release_memory()
        return self._last[1]

    def register(self, app: Dash) -> None:
        chosen, arrangement = self.input("chosen", "value"), self.input("arrangement", "value")
        for control in ("chosen", "colour", "arrangement", "ghost"):
            keep_in_address(app, self.name(control), self.state(control, "options"))

        def shades(digest: str) -> Response:
            return cached_response(self.shades.get(digest) or abort(404), digest)

        app.server.add_url_rule("/shades/<digest>.bin", "shades", shades)

        appearance = self.input("colour", "value"), self.input("ghost", "value")

        @app.callback(self.output("lanes"), chosen, arrangement, *INPUTS, *appearance)
        def draw(keys: Any, lanes: LaneArrangement, times: Any, workers: Any, colour: Colour, ghost: Any) -> Any:
            with self._answering:
                return self.lanes(keys or [], colour, lanes, bool(ghost), Scenario.of(times, workers))

        @app.callback(self.output("answer"), chosen, arrangement, *INPUTS)
        def show(keys: Any, lanes: LaneArrangement, *scenario: Any) -> Any:
            with self._answering:  # the lanes are answered first
                return self.compare(keys or [], lanes, Scenario.of(*scenario))


_COLOURS = {"later": "how much later it starts", "kind": "kind of work"}
_ARRANGEMENTS = {"stacked": "one timeline below the other", "interleaved": "interleaved"}


def _choice(title: str, identifier: str, options: dict[str, str]) -> html.Div:
    return html.Div([html.Span(title), dcc.RadioItems(options, next(iter(options)), id=identifier, inline=True)])
