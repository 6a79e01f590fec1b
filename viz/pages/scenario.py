"""The scenario panel: fields and sliders of times and limit, the text of workers and links, and curves of the period.

The browser sends the scenario to the route `scenario` during typing, and draws the returned lanes and headline (see
`assets/modules/scenario.js`); tables and comparisons follow by callbacks. All read the same `viz.scenario.PageModel`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

from dash import Dash, Input, Output, dcc, html, no_update
from flask import Response, abort, request

from recycle.errors import RecycleError
from recycle.job.profile import Profile
from recycle.job.shape import Shape, Worker, place_workers
from viz.condition import FORMS, named_workers
from viz.details import exceeds_limit, headline
from viz.figures.charts import period_curves_figure
from viz.lane_cache import TimelineContext
from viz.numbers import short
from viz.pages import parts
from viz.pages.lanes_view import answer
from viz.scenario import FIELDS, PageModel, Scenario

TIMES, FAILED, CURVE = "times", "fail", "curve"
"""Identifiers of the scenario's two texts, also their names in the address, and of the field of the curves."""
INPUTS = Input(TIMES, "value"), Input(FAILED, "value")
"""The scenario, for callbacks: `Scenario.of(times, workers)`."""
BUTTONS, MAX_NODES = 512, 64
"""Maximum workers with a button each, and nodes; beyond, lanes or typed names select workers."""
MAX_BYTES, MAX_TIMELINES = 2**20, 64
MAX_POINTS, MIN_POINTS, CURVE_ROWS = 25, 5, 2_500_000
"""Points of a curve; fewer for many instructions, and no curves if the fewest would simulate more than `CURVE_ROWS`."""
HINT = (
    "For every timeline of the page: a number, or one per stage with commas between; of the limit one per rank, in"
    " activations of a worker's whole part of the model. Without a value, times stay as given. The order of schedules"
    " stays as it is; executed steps keep their times. A slider shows the period over its values. A profile (.json) or"
    " job (.toml) that you choose or drop here gives all values."
)


def form(given: tuple[Profile | None, float], controls: Sequence[Any]) -> list[Any]:
    """Build the panel, with `controls` of pages; `assets/modules/scenario.js` adds fields and sliders to `.retime`.

    Args:
        given: see `Workspace.given`.
    """
    profile, share = given
    fields = []
    for field in FIELDS:
        value = getattr(profile, field.key, None)
        text = short(value / (share if field.is_work else 1.0), 6) if isinstance(value, float | int) else ""
        fields.append({"name": field.name, "title": field.title, "given": text})
    form = parts.div("retime", data_fields=json.dumps(fields), data_file_bytes=str(MAX_BYTES))
    title = f"{FORMS}. Dead workers need plans: recycle view job.toml"
    label = html.Label("Failed and slow workers, slow links", htmlFor=FAILED, title=title)
    example = "1.2, node:0/8, 0.1=1.5, 0.1>0.2=4"
    text_field: Any = dcc.Input(
        id=FAILED, type="text", value="", placeholder=example, debounce=True, n_submit=0, size="30"
    )
    return [
        parts.div("row", label, text_field),
        *controls,
        parts.card("Times and limits", form),
        dcc.Input(id=TIMES, type="text", value="", className="hidden"),
        dcc.Store(id=CURVE),
        dcc.Store(id="scenario"),
        parts.loading_area("curves"),
        parts.hint(HINT),
    ]


def worker_buttons(shape: Shape, failed: Iterable[Worker]) -> Any:
    dead = frozenset(failed)
    if shape.worker_count > BUTTONS:
        return parts.hint(f"{shape.worker_count:,} workers: type names, or press a lane below.")
    rows = []
    for k in range(shape.pipelines):
        workers = [_button(str(Worker(k, r)), str(Worker(k, r)), shape, dead) for r in range(shape.ranks)]
        rows.append(parts.div("pipeline", _button(f"pipeline:{k}", f"pipeline {k}", shape, dead), *workers))
    if shape.pipelines > 1:
        size = shape.ranks if shape.ranks > 1 else 2
        count = min(len(place_workers(shape, size)), MAX_NODES)
        nodes = [_button(f"node:{n}/{size}", f"node {n}", shape, dead) for n in range(count)]
        rows.append(parts.div("pipeline", html.Span(f"{size} a node", className="name"), *nodes))
    return parts.div("workers", *rows)


def _button(word: str, title: str, shape: Shape, dead: frozenset[Worker]) -> html.Button:
    first, *others = sorted(named_workers(word, shape))
    is_failed = dead >= {first, *others}
    return parts.tag(
        html.Button,
        f"✕ {title}" if is_failed else title,
        id={"type": FAILED, "workers": word},
        n_clicks=0,
        className="worker failed" if is_failed else "worker",
        title=f"{'Restore' if is_failed else 'Fail'} {first}" + (f" to {others[-1]}" if others else ""),
        aria_pressed=str(is_failed).lower(),
    )


def curves(model: PageModel, field: str, most: float, timelines: Sequence[Any], scenario: Scenario) -> list[Any]:
    """Build the periods of timelines, given as (title, address), over the values of a field from 0 to `most`."""
    title = next((each.title for each in FIELDS if each.name == field and each.key), None)
    contexts = {}
    for name, address in timelines[:MAX_TIMELINES]:
        entry = model.get(address)
        if entry is not None and entry.context is not None and not entry.context.executed:
            contexts[str(name)] = entry.context
    rows = sum(len(context.timeline.start) for context in contexts.values())
    if title is None or not contexts or not most > 0:
        return []
    if rows * MIN_POINTS > CURVE_ROWS:
        return [parts.hint(f"Curves are drawn up to {CURVE_ROWS // MIN_POINTS:,} instructions.")]
    points = max(MIN_POINTS, min(MAX_POINTS, CURVE_ROWS // rows))
    values = [most * place / (points - 1) for place in range(points)]
    texts = scenario.fields()
    now = texts.pop(field, "")
    others = " ".join(f"{name}={text}" for name, text in texts.items())

    def period(context: TimelineContext, value: float) -> float:
        words = f"{others} {field}={value!r}"
        return model.context_under(context, scenario._replace(times=words)).timeline.period

    key = field, most, tuple(map(tuple, timelines)), scenario._replace(times=others)
    periods = model.curves.get(key) or model.curves.put(
        key, {name: [period(context, value) for value in values] for name, context in contexts.items()}
    )
    try:
        mark = float(now)
    except ValueError:
        mark = None
    figure = period_curves_figure(title, values, periods, mark)
    view = parts.figure_view(figure, "curves-figure", f"Period of each timeline over {title}")
    is_over = {name: exceeds_limit(model.context_under(each, scenario)) for name, each in contexts.items()}
    return [parts.hint(_shortest(values, {name: periods[name] for name in periods if not is_over[name]})), view]


def _shortest(values: Sequence[float], periods: dict[str, list[float]]) -> str:
    if not periods:
        return "All exceed the memory limit."
    best = [min(periods, key=lambda name: (round(periods[name][place], 9), name)) for place in range(len(values))]
    turns = [place for place in range(1, len(best)) if best[place] != best[place - 1]]
    words = [f"{best[0]} has the shortest period" if len(periods) > 1 else ""]
    words += [f"then {best[place]} from {short(values[place])}" for place in turns]
    return ", ".join(filter(None, words)) + ("." if len(periods) > 1 else "")


def register(app: Dash, model: PageModel) -> None:
    from viz.pages.page import keep_in_address

    def lanes_under() -> Response:
        if request.content_length is None or request.content_length > MAX_BYTES:
            abort(413)
        match request.get_json(silent=True):
            case {"file": [str(name), str(text)]}:
                return answer({"digest": model.keep_file(name[:120], text)})
            case {"addresses": [*addresses], **rest} if len(addresses) <= MAX_TIMELINES:
                pass
            case _:
                abort(400)
        scenario = Scenario.of(rest.get("times"), rest.get("workers"))
        try:
            timed = [model.under(str(address), scenario) for address in addresses]
        except RecycleError as error:
            return answer({"problem": str(error)})
        lanes, active = [model.get(address) for address in timed], rest.get("active")
        shown = lanes[active] if isinstance(active, int) and 0 <= active < len(lanes) else None
        return answer({"addresses": timed, "headline": headline(shown) if shown else []}, lanes)

    app.server.add_url_rule("/scenario", "scenario", lanes_under, methods=["POST"])
    for text in (TIMES, FAILED):
        keep_in_address(app, text)
    parts.in_browser(app, "underScenario", Output("scenario", "data"), *INPUTS, prevent_initial_call=False)

    @app.callback(Output("curves", "children"), Input(CURVE, "data"), *INPUTS, prevent_initial_call=True)
    def draw_curves(curve: Any, times: str, workers: str) -> Any:
        match curve:
            case {"field": str(field), "most": float(most) | int(most), "timelines": [*timelines]}:
                try:
                    return curves(model, field, float(most), timelines, Scenario.of(times, workers))
                except RecycleError:
                    return no_update  # the form shows the message
        return []
