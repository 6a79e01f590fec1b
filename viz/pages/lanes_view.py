"""A timeline on a page: the canvas and its axes, the routes that feed it, and the details of what is selected.

The browser fetches `lanes/<hash>.bin` once and draws, zooms, hovers and selects by itself (see `assets/modules`).
A selection lands in a store of the page's workbench (`viz.pages.bench`); the server answers with text, and with the
operations to draw arrows to.
"""

from __future__ import annotations

import gzip
from base64 import b64encode
from collections.abc import Mapping, Sequence
from typing import Any

from dash import Dash, html
from flask import Response, abort, request

from viz.analysis.memory import encode_held
from viz.details import details
from viz.kinds import summary
from viz.lane_cache import Explainer, LaneCache, encode
from viz.lanes import LaneTable, Panel, on_one_axis
from viz.numbers import time_unit
from viz.pages import parts

COMPRESSED = "data:application/gzip;base64"
"""How an address begins that holds lanes itself; `assets/modules/table.js` unpacks them."""
FOREVER = "public, max-age=31536000, immutable"


def lanes_view(
    title: str,
    table: LaneTable,
    name: str,
    cache: LaneCache | None,
    *,
    linked: str = "",
    place: int = 0,
    span: float | None = None,
    left: int | None = None,
    rows: int | None = None,
    explainer: Explainer | None = None,
    ghost: LaneTable | None = None,
    more: Mapping[str, str] | None = None,
    legend: Any = None,
) -> html.Div:
    """A timeline with its heading and what a screen reader says of it.

    Args:
        name: tells it from others of the application; it stands in links to the page.
        cache: from which the browser fetches the lanes; None for a page without a server, which holds them itself.
        linked: timelines with the same word here, not empty, keep one time axis.
        place: in its `linked` block.
        span: length of the time axis when it is to be longer than the table's own.
        left: as of `parts.margins`.
        rows: when it is not one per lane.
        explainer: what knows why the operations of `table` lie where they lie.
        ghost: lanes of the same workers, whose work is outlined.
        more: attributes for the canvas, see `assets/modules/derived.js` and `layers.js`.
        legend: of the colours where they are not those of kinds.
    """
    address = lanes_address(cache.put(table, explainer, span)) if cache else _inside(table)
    lanes: dict[str, Any] = {"--lanes": rows or table.lanes}  # the style sheet makes a height of it
    unit = time_unit(table, span)
    attributes = parts.attributes(
        data_name=name,
        data_address=address,
        data_scale=str(unit.scale),
        data_word=unit.word,
        data_margins=" ".join(map(str, parts.margins(table, left))),
        data_span=str(span or table.span),
        data_linked=linked,
        data_halt=None if table.halt is None else str(table.halt),
        data_ghost=lanes_address(cache.put(ghost)) if cache and ghost else None,
        **(more or {}),
    )
    stage = [
        html.Canvas(**parts.attributes(role="img", aria_label=f"{title}. {summary(table)}")),
        parts.div("lanes-axes"),
        parts.div("lanes-tip", hidden=True),
    ]
    view = parts.div(
        "lanes-view",
        parts.div("lanes-head", *([html.H3(title, title=title)] if title else []), parts.div("lanes-tools")),
        parts.div("lanes-minimap", hidden=True if linked and place else None),
        parts.div("lanes-stage", *stage),
        parts.div("lanes-memory", hidden=True),
        parts.div("lanes-deltas"),
        parts.div(
            "lanes-foot",
            html.P(className="lanes-status", **parts.attributes(aria_live="polite")),
            legend or parts.legend([table]),
        ),
        tabIndex=0,
        **attributes,
    )
    return parts.div("lanes", view, **{"data-place": str(place)}, style=lanes)


def pictures(prefix: str, panels: Sequence[Panel], nothing: str) -> html.Section | html.Div:
    """Timelines on one time axis for a page without a server; `nothing` is the text where there are none."""
    if not panels:
        return parts.empty(nothing)
    shown = [
        lanes_view(panel.title, panel.table, f"{prefix}-{place}", None, span=panel.span)
        for place, panel in enumerate(on_one_axis(panels))
    ]
    return parts.card("Timelines", *shown)


def _inside(table: LaneTable) -> str:
    return f"{COMPRESSED},{b64encode(gzip.compress(encode(table), 6, mtime=0)).decode()}"


def lanes_address(digest: str) -> str:
    """Where the browser finds the lanes with that hash."""
    return f"lanes/{digest}.bin"


def served(content: bytes, digest: str) -> Response:
    """An answer that never changes, for browsers to keep."""
    answer = Response(content, mimetype="application/octet-stream", headers={"Cache-Control": FOREVER})
    answer.set_etag(digest)
    answer.make_conditional(request)
    return answer


def register(app: Dash, cache: LaneCache) -> None:
    """Add the routes of all timelines."""

    def lanes(digest: str) -> Response:
        shown = cache.get(digest) or abort(404)
        return served(shown.content, digest)

    def held(digest: str) -> Response:
        shown = cache.get(digest)
        if shown is None or shown.explainer is None:
            abort(404)
        return served(encode_held(shown, shown.explainer), digest)

    for path, route in (("lanes/<digest>.bin", lanes), ("held/<digest>.bin", held)):
        app.server.add_url_rule(f"/{path}", route.__name__, route)


def answer(cache: LaneCache, choice: Any) -> tuple[Any, Any]:
    """The details of a choice as they stand on the page, and its links for the canvas."""
    if not isinstance(choice, dict):
        return [], None
    shown = cache.get(choice.get("address"))
    if shown is None:
        return parts.hint(parts.NOT_KEPT), None
    found = details(shown, choice)
    if found is None:
        return [], None
    body: list[Any] = [html.H4(found.title), html.Ul([html.Li(line) for line in found.lines])]
    if found.needs:
        body.append(parts.table(("needed", "of worker", "why", "there at", "slack"), found.needs))
    chosen = {name: choice.get(name) for name in ("operation", "address")}
    return html.Div(body, className="selection"), {**found.links, **chosen}
