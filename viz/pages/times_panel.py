"""The panel of times: what instructions take and what workers may hold, as fields; lanes follow while one types.

The browser sends the fields of the timeline in use to `retime/<hash>.bin` and draws what comes back (see
`assets/lanes_times.js`): the lanes, and what the headline says of them.
"""

from __future__ import annotations

import json
import struct
import threading
from typing import Any

import plotly.utils
from dash import Dash, dcc, html
from flask import Response, abort, request

from recycle.errors import RecycleError
from viz import retime
from viz.lane_cache import CachedLanes, Explainer, LaneCache
from viz.lanes import LaneTable
from viz.pages import panels, parts
from viz.pages.headline_bar import figures
from viz.pages.lanes_view import lanes_address

MOST_BYTES = 2**20
HINT = (
    "A number, or one per stage with spaces between; of the limit one per rank, in activations. The order of the"
    " schedule stays as it is. Bound and gap are shown where they hold for these times. A profile (.json) or job"
    " (.toml) that you choose or drop on the fields gives all of them."
)
_LONGEST_NAME = 120


def times(shown: CachedLanes | None) -> list[Any]:
    """The fields for a planned timeline."""
    if shown is None or shown.explainer is None:
        return panels.explained(shown)
    if shown.explainer.executed:
        return [parts.empty("What ran has the times that it had.", "Choose a plan to try others.")]
    threading.Thread(target=retime.prepare, args=(shown.explainer,), name="prepare", daemon=True).start()
    values = retime.values_of(shown.explainer)
    rows = [_field(field.name, field.title, values[field.name]) for field in retime.FIELDS]
    rows.append(_field(retime.LIMIT, "Memory limit", values[retime.LIMIT]))
    reset = html.Button("As given", className="quiet", type="button", **_data("data-retime-reset", "yes"))
    choose = html.Button(
        "Profile or job …", className="quiet", type="button", **_data("data-retime-file", str(MOST_BYTES))
    )
    message = parts.div("status retime-message", role="status")
    below = parts.div("retime-buttons", reset, choose)
    return [parts.div("retime", *rows, below, message), html.P(HINT, className="hint")]


def _field(name: str, title: str, value: str) -> html.Label:
    identifier = {"type": "retime", "field": name}
    entry = dcc.Input(value=value, id=identifier, type="text", placeholder="none", autoComplete="off", spellCheck=False)
    return html.Label([html.Span(title), entry], **_data("data-field", name), **_data("data-given", value))


def _data(name: str, value: str) -> Any:
    return {name: value}


def register(app: Dash, cache: LaneCache) -> None:
    """Add the route that times lanes anew."""

    def answer(digest: str) -> Response:
        shown = cache.get(digest) or abort(404)
        if request.content_length is None or request.content_length > MOST_BYTES:
            abort(413)
        wanted = request.get_json(silent=True)
        if shown.explainer is None or not isinstance(wanted, dict):
            abort(400)
        try:
            retimed = cache.put(*_retimed(shown, shown.explainer, wanted))
        except RecycleError as error:
            return _answer({"problem": str(error)})
        made = cache.get(retimed)
        return _answer({"address": lanes_address(retimed), "headline": figures(made) if made else []}, made)

    app.server.add_url_rule("/retime/<digest>.bin", "retime", answer, methods=["POST"])


def _retimed(shown: CachedLanes, explainer: Explainer, wanted: dict[str, Any]) -> tuple[LaneTable, Explainer]:
    """The lanes in the times of the fields, or of the dropped `file`, a list of its name and its text."""
    file = wanted.get("file")
    if not isinstance(file, list):
        return retime.retimed(explainer, wanted, shown.table)
    if len(file) != 2 or not all(isinstance(part, str) for part in file):
        abort(400)
    return retime.timed_by(explainer, file[0][:_LONGEST_NAME], file[1], shown.table)


def _answer(head: dict[str, Any], made: CachedLanes | None = None) -> Response:
    """One answer with all that the browser needs: u32 bytes of JSON, the JSON padded to a multiple of 4, the lanes."""
    text = json.dumps(head, cls=plotly.utils.PlotlyJSONEncoder).encode()
    text += b" " * (-len(text) % 4)
    content = struct.pack("<I", len(text)) + text + (made.content if made else b"")
    return Response(content, mimetype="application/octet-stream")
