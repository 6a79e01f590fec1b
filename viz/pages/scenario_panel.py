"""The panel of the scenario: which workers are dead or slow, what instructions take, and what workers may hold.

Dead and slow workers are the text of one field, which the page's address keeps; buttons and lanes write into it, and
the page of plans draws the plan for it (`viz.pages.plans_page`). Times and limits are fields about the timeline in use;
the browser sends them to `retime/<hash>.bin` while one types and draws what comes back (see `assets/modules/times.js`):
the lanes, and what the headline says of them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import plotly.utils
from dash import Dash, dcc, html
from flask import Response, abort, request

from recycle.errors import RecycleError
from recycle.job.shape import Shape, Worker, place_workers
from viz import scenario
from viz.lane_cache import CachedLanes, Explainer, LaneCache
from viz.pages import parts
from viz.pages.lanes_view import lanes_address

FAILED = "fail"
"""Identifier of the field of dead and slow workers; the name in the address."""
BUTTONS, NODES_SHOWN = 512, 64
"""Workers up to which each has a button; of more, lanes are pressed or names typed."""
MOST_BYTES = 2**20
HINT = (
    "A number, or one per stage with spaces between; of the limit one per rank, in activations. The order of the"
    " schedule stays as it is. Bound and gap are shown where they hold for these times. A profile (.json) or job"
    " (.toml) that you choose or drop on the fields gives all of them."
)
_LONGEST_NAME = 120


def failed_field() -> list[Any]:
    """The field of dead and slow workers."""
    field = dcc.Input(
        id=FAILED,
        type="text",
        value="",
        placeholder="1.2, node:0/8, 0.1=1.5",
        debounce=True,
        n_submit=0,
        size="30",
    )
    return [html.Label("Failed and slow workers", htmlFor=FAILED), field]


def worker_buttons(shape: Shape, failed: Iterable[Worker]) -> Any:
    """A button per worker, pipeline and node; or how to name workers where there are too many."""
    dead = frozenset(failed)
    if shape.worker_count > BUTTONS:
        return parts.hint(f"{shape.worker_count:,} workers: type names, or press a lane below.")
    rows = []
    for k in range(shape.pipelines):
        workers = [_button(str(Worker(k, r)), str(Worker(k, r)), shape, dead) for r in range(shape.ranks)]
        rows.append(parts.div("pipeline", _button(f"pipeline:{k}", f"pipeline {k}", shape, dead), *workers))
    if shape.pipelines > 1:
        size = shape.ranks if shape.ranks > 1 else 2
        count = min(len(place_workers(shape, size)), NODES_SHOWN)
        nodes = [_button(f"node:{n}/{size}", f"node {n}", shape, dead) for n in range(count)]
        rows.append(parts.div("pipeline", html.Span(f"{size} a node", className="name"), *nodes))
    return parts.div("workers", *rows)


def _button(word: str, title: str, shape: Shape, dead: frozenset[Worker]) -> html.Button:
    first, *others = sorted(scenario.group(word, shape))
    is_failed = dead >= {first, *others}
    return html.Button(
        f"✕ {title}" if is_failed else title,
        id={"type": FAILED, "workers": word},
        n_clicks=0,
        className="worker failed" if is_failed else "worker",
        title=f"{'Restore' if is_failed else 'Fail'} {first}" + (f" to {others[-1]}" if others else ""),
        **parts.attributes(aria_pressed=str(is_failed).lower()),
    )


def times(_: CachedLanes, explainer: Explainer, __: Any = None) -> list[Any]:
    """The fields of times and limits for a planned timeline."""
    if explainer.executed:
        return [parts.empty("What ran has the times that it had.", "Choose a plan to try others.")]
    titles = {field.name: field.title for field in scenario.FIELDS} | {scenario.LIMIT: "Memory limit"}
    rows = [_field(name, titles[name], value) for name, value in scenario.values_of(explainer).items()]
    reset = html.Button("As given", className="quiet", type="button", **parts.attributes(data_retime_reset="yes"))
    choose = html.Button(
        "Profile or job …", className="quiet", type="button", **parts.attributes(data_retime_file=str(MOST_BYTES))
    )
    message = parts.div("status retime-message", role="status")
    below = parts.div("retime-buttons", reset, choose)
    fields = parts.div("retime", *rows, below, message)
    return [parts.card("Times and limits", fields, parts.hint(HINT))]


def _field(name: str, title: str, value: str) -> html.Label:
    identifier = {"type": "retime", "field": name}
    entry = dcc.Input(value=value, id=identifier, type="text", placeholder="none", autoComplete="off", spellCheck=False)
    return html.Label([html.Span(title), entry], **parts.attributes(data_field=name, data_given=value))


def register(app: Dash, cache: LaneCache) -> None:
    """Add the route that times lanes anew."""

    def answer(digest: str) -> Response:
        shown = cache.get(digest) or abort(404)
        if request.content_length is None or request.content_length > MOST_BYTES:
            abort(413)
        wanted, explainer = request.get_json(silent=True), shown.explainer
        if explainer is None or not isinstance(wanted, dict):
            abort(400)
        try:
            match wanted.get("file"):
                case [str(name), str(text)]:
                    asked = scenario.by_file(explainer, name[:_LONGEST_NAME], text)
                case None:
                    asked = scenario.by_fields(explainer, wanted)
                case _:
                    abort(400)
            retimed = cache.put(*scenario.retimed(shown.table, explainer, *asked))
        except RecycleError as error:
            return _answer({"problem": str(error)})
        made = cache.get(retimed)
        return _answer({"address": lanes_address(retimed), "headline": parts.headline_figures(made) if made else []})

    app.server.add_url_rule("/retime/<digest>.bin", "retime", answer, methods=["POST"])


def _answer(head: dict[str, Any]) -> Response:
    return Response(json.dumps(head, cls=plotly.utils.PlotlyJSONEncoder), mimetype="application/json")
