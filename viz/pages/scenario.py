"""The scenario panel: times of instructions, memory limits, and dead or slow workers.

Times and limits come from fields, or from a dropped profile or job; the order of the schedule stays. The browser sends
them to `retime/<hash>.bin` during typing, and draws the returned lanes and headline (see `assets/modules/times.js`).

Dead and slow workers are one text that asks for another plan: `1.2, pipeline:0, stage:3, node:1/8, 0.1=1.5`.
`pipeline:K`, `stage:S` (all workers of a position) and `node:N/W` (node N with W workers per node, see
`recycle.job.shape`) name several dead workers; `0.1=1.5` is a worker that takes 1.5 times as long for all its work. The
page's address keeps the text; buttons and lanes edit it, and the page of plans draws the plan for it
(`viz.pages.plans_page`).
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import plotly.utils
from dash import Dash, dcc, html
from flask import Response, abort, request

from recycle.errors import JobError, PlanError, RecycleError, errors_as
from recycle.ir.event_graph import load_compiled
from recycle.ir.simulate import time_graph
from recycle.job import Job, price
from recycle.job.pricing import profile_of_layout
from recycle.job.profile import PerStage, Profile
from recycle.job.sections import ANALYTIC
from recycle.job.shape import Shape, Worker, place_workers
from viz.lane_cache import CachedLanes, LaneCache, Limits, TimelineContext
from viz.lanes import LaneTable
from viz.pages import parts
from viz.pages.lanes_view import lanes_address


class Field(NamedTuple):
    """A field of the panel.

    Attributes:
        name: in the request, and in the page's address.
        key: entry of the profile that it sets.
        is_per_stage: whether it accepts a number per stage.
    """

    name: str
    title: str
    key: str
    is_per_stage: bool = True


FIELDS = (
    Field("F", "Forward (F)", "forward"),
    Field("I", "Backward, input (I)", "backward_input"),
    Field("W", "Backward, weight (W)", "backward_weight"),
    Field("link", "Transfer", "latency", is_per_stage=False),
    Field("reduce", "Reduce", "reduce"),
    Field("step", "Step", "step"),
)
LIMIT = "limit"
"""Field of the memory limit in activations: a number, or one per rank; unlimited if empty."""
COMPILED_ROWS = 20_000
"""Rows of a timeline from which other times are computed by compiled loops."""
_LONGEST = 100_000


def field_values(context: TimelineContext) -> dict[str, str]:
    profile = context.timeline.profile
    values = {field.name: _text(getattr(profile, field.key)) for field in FIELDS}
    return values | {LIMIT: _text(list(context.limits)) if context.limits else ""}


def from_fields(context: TimelineContext, texts: Mapping[str, Any]) -> tuple[Profile, Limits]:
    """Apply the fields (name -> text) to a timeline's profile and limits; missing fields keep their values.

    Raises JobError if a text does not have the required form.
    """
    profile, shape = context.timeline.profile, context.timeline.schedule.shape
    changed: dict[str, Any] = {}
    for name, title, key, is_per_stage in FIELDS:
        if name in texts and str(texts[name]).strip() != _text(getattr(profile, key)):
            changed[key] = _number(title, texts[name], shape.stages if is_per_stage else 1, "stage")
    if "latency" in changed:
        changed |= {"bandwidth": None, "links": {}}
    limits = _limits(texts[LIMIT], shape.ranks) if LIMIT in texts else context.limits
    return replace(profile, **changed) if changed else profile, limits


def from_file(context: TimelineContext, name: str, text: str) -> tuple[Profile, Limits]:
    """Return profile and limits of a dropped profile or job.

    Args:
        name: file name; a job's ends with `.toml`.
        text: content. Files that it refers to are not read.

    Raises JobError if the content is invalid, has another shape, or refers to a file of times.
    """
    shape = context.timeline.schedule.shape
    if not name.lower().endswith(".toml"):
        profile = Profile.from_bytes(text.encode(), name)
        with errors_as(JobError, name):
            profile.require(shape)
        return profile, context.limits
    job = Job.from_toml(text, name)
    if job.times.profile not in (None, ANALYTIC):
        raise JobError(f"{name}: [times] profile names a file, which the page does not read: drop that file here")
    priced = price(job)
    if replace(shape, cut=()) != priced.shape:
        raise JobError(f"{name} has the shape {priced.shape}, the timeline has {shape}: they must be the same")
    return profile_of_layout(priced, priced.prices, shape), None if priced.limits is None else tuple(priced.limits)


def retime(
    table: LaneTable, context: TimelineContext, profile: Profile, limits: Limits
) -> tuple[LaneTable, TimelineContext]:
    """Return the lanes and context of a planned timeline under other times and limits; violations stay marked.

    Raises JobError if the timeline was executed, or the times add up to too much.
    """
    if context.executed:
        raise JobError("times: an executed step keeps its measured times; choose a plan")
    before = context.timeline
    if len(before.start) >= COMPILED_ROWS:  # one of many requests, so the first may take seconds
        load_compiled()
    timeline = before if profile is before.profile else time_graph(context.graph, profile)
    stashes = [(each.weight_stash, each.redundant_stash) for each in (profile, before.profile)]
    if stashes[0] == stashes[1]:  # then held activations depend on the order alone
        timeline.__dict__["peak_activations"] = before.peak_activations
    return table.with_times_of(timeline), TimelineContext(timeline, limits=limits, plan=context.plan)


def _limits(text: Any, ranks: int) -> Limits:
    if not str(text or "").strip():
        return None
    value = _number("Memory limit", text, ranks, "rank")
    return tuple(value) if isinstance(value, list) else (value,) * ranks


def _number(title: str, text: Any, count: int, noun: str) -> PerStage:
    words = str(text)[:_LONGEST].replace(",", " ").split()
    try:
        values = [float(word) for word in words]
    except ValueError:
        values = []
    form = "a number" + (f", or {count}, one per {noun}" if count > 1 else "")
    if len(values) not in {1, count} or not all(math.isfinite(value) and value >= 0 for value in values):
        raise JobError(f"{title}: write {form}, of at least 0; got {str(text)[:40]!r}")
    return values[0] if len(values) == 1 else values


def _text(value: Any) -> str:
    values = list(value) if isinstance(value, list | tuple) else [value]
    texts = [f"{number:.6g}" for number in values]
    return texts[0] if len(set(texts)) == 1 else " ".join(texts)


FORMS = "1.2, pipeline:0, stage:3, node:1/8 (the second node of 8 workers each), or 0.1=1.5 for a slow worker"
MAX_NAMED = 2048


class Condition(NamedTuple):
    """Dead workers, and slow workers with their factors.

    Attributes:
        slow: (worker, factor) of live workers, by worker.
    """

    failed: frozenset[Worker] = frozenset()
    slow: tuple[tuple[Worker, float], ...] = ()

    def names(self) -> list[str]:
        """Return a text for each worker, in the form that `parse` reads."""
        return [*map(str, sorted(self.failed)), *(f"{worker}={factor:g}" for worker, factor in self.slow)]

    def with_failed(self, failed: Iterable[Worker]) -> Condition:
        """Return the condition with other dead workers; dead workers are removed from `slow`."""
        dead = frozenset(failed)
        return Condition(dead, tuple(item for item in self.slow if item[0] not in dead))


def parse(text: str, shape: Shape) -> Condition:
    """Parse a condition. Raises PlanError that describes the error."""
    words = text.replace(",", " ").split()
    if len(words) > MAX_NAMED:
        raise PlanError(f"failed workers: {len(words)} are named; at most {MAX_NAMED}")
    failed: set[Worker] = set()
    slow: dict[Worker, float] = {}
    try:
        for word in words:
            name, is_slow, factor = word.partition("=")
            if is_slow:
                slow[shape.require(Worker.parse(name), "slow workers")] = _factor(word, factor)
            else:
                failed |= named_workers(word, shape)
    except JobError as error:
        raise PlanError(str(error)) from None
    return Condition(frozenset(), tuple(sorted(slow.items()))).with_failed(failed)


def named_workers(word: str, shape: Shape) -> frozenset[Worker]:
    """Return the workers that `1.2`, `pipeline:0`, `stage:3` or `node:1/8` names. Raises JobError or PlanError."""
    kind, is_group, which = word.partition(":")
    if not is_group:
        return frozenset([shape.require(Worker.parse(word), "failed workers")])
    if kind not in _GROUPS:
        raise PlanError(f"failed workers: {word!r} is not a worker or group: write {FORMS}")
    try:
        number, *size = (int(part) for part in which.split("/"))
        if number < 0 or min(size, default=1) < 1:
            raise IndexError(which)
        return frozenset(_GROUPS[kind](shape, *size)[number])
    except (ValueError, TypeError, IndexError):
        raise PlanError(f"failed workers: {word!r} does not exist in {shape}: write {FORMS}") from None


_GROUPS: dict[str, Callable[..., Sequence[Sequence[Worker]]]] = {
    "pipeline": lambda shape: [[Worker(k, r) for r in range(shape.ranks)] for k in range(shape.pipelines)],
    "stage": lambda shape: [[Worker(k, r) for k in range(shape.pipelines)] for r in range(shape.ranks)],
    "node": place_workers,
}


def _factor(word: str, text: str) -> float:
    try:
        factor = float(text)
    except ValueError:
        factor = math.nan
    if not (math.isfinite(factor) and factor > 0):
        raise PlanError(f"slow workers: {word!r}: write how many times as long it takes, for example 0.1=1.5")
    return factor


FAILED = "fail"
"""Identifier of the field of dead and slow workers; its name in the address."""
BUTTONS, MAX_NODES = 512, 64
"""Maximum workers with a button each, and nodes; beyond, lanes or typed names select workers."""
MAX_BYTES = 2**20
HINT = (
    "A number, or one per stage with spaces between; of the limit one per rank, in activations. The order of the"
    " schedule stays as it is. Bound and gap are shown where they hold for these times. A profile (.json) or job"
    " (.toml) that you choose or drop on the fields gives all of them."
)
_LONGEST_NAME = 120


def failed_field() -> list[Any]:
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
    return html.Button(
        f"✕ {title}" if is_failed else title,
        id={"type": FAILED, "workers": word},
        n_clicks=0,
        className="worker failed" if is_failed else "worker",
        title=f"{'Restore' if is_failed else 'Fail'} {first}" + (f" to {others[-1]}" if others else ""),
        **parts.attributes(aria_pressed=str(is_failed).lower()),
    )


def time_fields(_: CachedLanes, context: TimelineContext, __: Any = None) -> list[Any]:
    if context.executed:
        return [parts.empty_state("An executed step keeps its measured times.", "Choose a plan to try other times.")]
    titles = {field.name: field.title for field in FIELDS} | {LIMIT: "Memory limit"}
    rows = [_field(name, titles[name], value) for name, value in field_values(context).items()]
    reset = html.Button("As given", className="quiet", type="button", **parts.attributes(data_retime_reset="yes"))
    choose = html.Button(
        "Profile or job …", className="quiet", type="button", **parts.attributes(data_retime_file=str(MAX_BYTES))
    )
    message = parts.div("status retime-message", role="status")
    buttons = parts.div("retime-buttons", reset, choose)
    fields = parts.div("retime", *rows, buttons, message)
    return [parts.card("Times and limits", fields, parts.hint(HINT))]


def _field(name: str, title: str, value: str) -> html.Label:
    identifier = {"type": "retime", "field": name}
    entry = dcc.Input(value=value, id=identifier, type="text", placeholder="none", autoComplete="off", spellCheck=False)
    return html.Label([html.Span(title), entry], **parts.attributes(data_field=name, data_given=value))


def register(app: Dash, cache: LaneCache) -> None:
    def answer(digest: str) -> Response:
        entry = cache.get(digest) or abort(404)
        if request.content_length is None or request.content_length > MAX_BYTES:
            abort(413)
        request_values, context = request.get_json(silent=True), entry.context
        if context is None or not isinstance(request_values, dict):
            abort(400)
        try:
            match request_values.get("file"):
                case [str(name), str(text)]:
                    priced = from_file(context, name[:_LONGEST_NAME], text)
                case None:
                    priced = from_fields(context, request_values)
                case _:
                    abort(400)
            digest = cache.put(*retime(entry.table, context, *priced))
        except RecycleError as error:
            return _answer({"problem": str(error)})
        retimed = cache.get(digest)
        return _answer(
            {"address": lanes_address(digest), "headline": parts.headline_figures(retimed) if retimed else []}
        )

    app.server.add_url_rule("/retime/<digest>.bin", "retime", answer, methods=["POST"])


def _answer(head: dict[str, Any]) -> Response:
    return Response(json.dumps(head, cls=plotly.utils.PlotlyJSONEncoder), mimetype="application/json")
