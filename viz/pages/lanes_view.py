"""Timelines on pages: canvas and axes, the routes of their data, and details of the selection.

The browser fetches `lanes/<hash>.bin` once, and draws, zooms, hovers and selects locally (see `assets/modules`). A
selection goes to a store of the workbench (`viz.pages.bench`); the server answers with text, and with operations to
draw arrows to.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from dash import Dash, html
from flask import Response, abort, request

from viz.analysis.memory import encode_held
from viz.details import details, headline
from viz.kinds import summary
from viz.lane_cache import LaneCache, TimedLanes, lanes_address
from viz.numbers import time_unit
from viz.pages import parts

TOP, BOTTOM, RIGHT = 26, 4, 14
"""Pixels above, below and right of the axes."""
FOREVER = "public, max-age=31536000, immutable"


def lanes_view(
    title: str,
    lanes: TimedLanes,
    name: str,
    cache: LaneCache,
    *,
    linked: str = "",
    place: int = 0,
    span: float | None = None,
    left: int | None = None,
    rows: int | None = None,
    ghost: TimedLanes | None = None,
    is_timed: bool = False,
    extra: Mapping[str, str] | None = None,
    legend: Any = None,
) -> html.Div:
    """Build a timeline with its heading and a description for screen readers.

    Args:
        name: unique in the application; part of links to the page.
        linked: timelines with the same non-empty word share their time axis.
        place: index in its `linked` block.
        span: length of the time axis, if longer than the table.
        left: pixels for lane names, if other timelines on the page have longer names.
        rows: number of rows; None: one per lane.
        ghost: lanes of the same workers, drawn as outlines.
        is_timed: whether the lanes are under the scenario already, which the browser applies to others.
        extra: attributes for the canvas, see `assets/modules/derived.js` and `layers.js`.
    """
    table, unit = lanes.table, time_unit(lanes.table, span)
    clocks = lanes.context and lanes.timeline.clocks
    title += f"; {clocks}" if clocks and clocks.differed else ""
    view = parts.div(
        "lanes-view",
        parts.div("lanes-head", html.H3(title, title=title) if title else None, parts.div("lanes-tools")),
        parts.div("lanes-minimap", hidden=True if linked and place else None),
        parts.div(
            "lanes-stage",
            parts.tag(html.Canvas, role="img", aria_label=f"{title}. {summary(table)}"),
            parts.div("lanes-axes"),
            parts.div("lanes-tip", hidden=True),
        ),
        parts.div("lanes-memory", hidden=True),
        parts.div("lanes-deltas"),
        parts.div(
            "lanes-foot",
            parts.tag(html.P, className="lanes-status", aria_live="polite"),
            legend or parts.legend([table]),
        ),
        tabIndex=0,
        data_name=name,
        data_address=lanes_address(cache.put(lanes, span or table.span)),
        data_scale=str(unit.scale),
        data_word=unit.word,
        data_margins=f"{left or parts.gutter(table)} {TOP} {RIGHT} {BOTTOM}",
        data_span=str(span or table.span),
        data_linked=linked,
        data_timed="yes" if is_timed else None,
        data_ghost=lanes_address(cache.put(ghost)) if ghost else None,
        **(extra or {}),
    )
    height = {"--lanes": rows or table.lanes}  # the style sheet computes it from the lanes
    return parts.div("lanes", view, data_place=str(place), style=height)


def cached_response(content: bytes, digest: str) -> Response:
    answer = Response(content, mimetype="application/octet-stream", headers={"Cache-Control": FOREVER})
    answer.set_etag(digest)
    answer.make_conditional(request)
    return answer


def answer(content: Mapping[str, Any], lanes: Iterable[TimedLanes | None] = ()) -> Response:
    """Build an answer to the browser: JSON, then the lanes of its `addresses`, each after its length as u32."""
    blocks = [json.dumps(content).encode(), *(entry.content if entry else b"" for entry in lanes)]
    padded = (len(block).to_bytes(4, "little") + block + bytes(-len(block) % 4) for block in blocks)
    return Response(b"".join(padded), mimetype="application/octet-stream")


def register(app: Dash, cache: LaneCache) -> None:
    def lanes(digest: str) -> Response:
        return cached_response((cache.get(digest) or abort(404)).content, digest)

    def held(digest: str) -> Response:
        entry = cache.get(digest)
        if entry is None or entry.context is None:
            abort(404)
        return cached_response(encode_held(entry, entry.context), digest)

    def figures(digest: str) -> Response:
        entry = cache.get(digest)
        return answer({"headline": headline(entry) if entry else []})

    for path, route in (("lanes/<digest>.bin", lanes), ("held/<digest>.bin", held), ("figures/<digest>.bin", figures)):
        app.server.add_url_rule(f"/{path}", route.__name__, route)


def selection_details(cache: LaneCache, choice: Any) -> tuple[Any, Any]:
    """Return the details of a selection as page content, and its links for the canvas."""
    if not isinstance(choice, dict):
        return [], None
    entry = cache.get(choice.get("address"))
    if entry is None:
        return parts.hint(parts.NOT_CACHED), None
    selection = details(entry, choice)
    if selection is None:
        return [], None
    body: list[Any] = [html.H4(selection.title), html.Ul([html.Li(line) for line in selection.lines])]
    if selection.needs:
        body.append(parts.table(("input", "worker", "reason", "arrived", "slack"), selection.needs))
    chosen = {name: choice.get(name) for name in ("operation", "address")}
    return html.Div(body, className="selection"), {**selection.links, **chosen}
