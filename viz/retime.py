"""A timeline in other times: what the panel of times asks for, field by field or with a profile or job that somebody
drops, and the lanes that come of it.

The order stays; only what instructions take and what workers may hold changes. What waits for what is worked out once
per timeline, so that an answer for a hundred thousand instructions takes less than a tenth of a second.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from recycle.errors import JobError, errors_as
from recycle.ir.graph import load_compiled
from recycle.ir.simulate import Timeline, time_graph
from recycle.job import Job, price
from recycle.pricing import profile_of_layout
from recycle.profile import PerStage, Profile
from recycle.sections import ANALYTIC
from viz.lane_cache import Explainer
from viz.lanes import LaneTable


@dataclass(frozen=True)
class Field:
    """A field of the panel.

    Attributes:
        name: in the request, and in the page's address.
        title: its label.
        keys: entries of the profile that it sets.
        is_per_stage: whether it may be a number per stage.
    """

    name: str
    title: str
    keys: tuple[str, ...]
    is_per_stage: bool = True


FIELDS = (
    Field("F", "Forward (F)", ("forward",)),
    Field("I", "Backward, input (I)", ("backward_input",)),
    Field("W", "Backward, weight (W)", ("backward_weight",)),
    Field("link", "Transfer", ("latency",), is_per_stage=False),
    Field("reduce", "Reduce", ("reduce",)),
    Field("step", "Step", ("step",)),
)
LIMIT = "limit"
"""The field of what a worker may hold, in activations: a number, or one per rank; none where it is left empty."""
_LONGEST = 100_000


_COMPILE_FROM = 20_000
"""Rows of a timeline from which the loops of the simulator are compiled before they are needed."""


def prepare(explainer: Explainer) -> None:
    """Have what every answer needs ready: takes a second or two for a large timeline."""
    _ = explainer.graph
    if len(explainer.timeline.start) >= _COMPILE_FROM:
        load_compiled()
        time_graph(explainer.graph, explainer.timeline.profile)
    _ = explainer.timeline.peak_activations


def values_of(explainer: Explainer) -> dict[str, str]:
    """What the fields hold for a timeline as it is."""
    profile = explainer.timeline.profile
    found = {field.name: _text(getattr(profile, field.keys[0])) for field in FIELDS}
    return found | {LIMIT: _text(list(explainer.limits)) if explainer.limits else ""}


def retimed(
    explainer: Explainer, wanted: Mapping[str, Any], table: LaneTable | None = None
) -> tuple[LaneTable, Explainer]:
    """The lanes of a planned timeline in the times that the fields say, and what explains them.

    Args:
        table: the lanes as given, where they are known: others are made from them in a tenth of the time.
        wanted: field -> its text; fields that are left out stay as they are.

    Raises:
        JobError: a text is no number of the wanted form, or the timeline is what ran.
    """
    if explainer.executed:
        raise JobError("times: an executed step keeps its measured times; choose a plan")
    profile, shape = explainer.timeline.profile, explainer.timeline.schedule.shape
    changed: dict[str, Any] = {}
    for field in FIELDS:
        if field.name not in wanted or str(wanted[field.name]).strip() == _text(getattr(profile, field.keys[0])):
            continue
        value = _number(field.title, wanted[field.name], shape.stages if field.is_per_stage else 1, "stage")
        changed |= dict.fromkeys(field.keys, value)
    if "latency" in changed:
        changed |= {"bandwidth": None, "links": {}}
    limits = explainer.limits
    if LIMIT in wanted:
        limits = _limits(wanted[LIMIT], shape.ranks)
    timeline = time_graph(explainer.graph, replace(profile, **changed)) if changed else explainer.timeline
    # What workers hold follows from the order and from what an activation weighs, not from times.
    timeline.__dict__["peak_activations"] = explainer.timeline.peak_activations
    is_same = not changed and not is_loosened(replace(explainer, limits=limits), explainer.limits)
    made = Explainer(timeline, limits=limits, bound=explainer.bound if is_same else None)
    made.__dict__["graph"] = explainer.graph  # which does not depend on times
    return _lanes(explainer, timeline, table), made


def timed_by(explainer: Explainer, name: str, text: str, table: LaneTable) -> tuple[LaneTable, Explainer]:
    """The lanes of a planned timeline in the times and limits of a profile or job that somebody dropped.

    Args:
        name: of the file; a job's ends with `.toml`.
        text: its content. Files that it names are not read.
        table: the lanes as given.

    Raises:
        JobError: it cannot be read, is of another shape, names a file of times, or the timeline is what ran.
    """
    if explainer.executed:
        raise JobError("times: an executed step keeps its measured times; choose a plan")
    shape, limits = explainer.timeline.schedule.shape, explainer.limits
    if name.lower().endswith(".toml"):
        job = Job.from_toml(text, name)
        if job.times.profile not in (None, ANALYTIC):
            raise JobError(f"{name}: [times] profile names a file, which the page does not read: drop that file here")
        priced = price(job)
        if replace(shape, cut=()) != priced.shape:
            raise JobError(f"{name} has the shape {priced.shape}, the timeline has {shape}: they must be the same")
        profile = profile_of_layout(priced, priced.prices, shape)
        limits = None if priced.limits is None else tuple(priced.limits)
    else:
        profile = Profile.from_bytes(text.encode(), name)
        with errors_as(JobError, name):
            profile.require(shape)
    timeline = time_graph(explainer.graph, profile)
    made = Explainer(timeline, limits=limits)
    made.__dict__["graph"] = explainer.graph
    return _lanes(explainer, timeline, table), made


def _lanes(explainer: Explainer, timeline: Timeline, table: LaneTable | None) -> LaneTable:
    """The lanes of a timeline, made from those as given where these are its rows."""
    if table is None or explainer.ids is not None:
        return LaneTable.from_timeline(timeline)
    return table.at_times_of(timeline)


def is_loosened(explainer: Explainer, stated: tuple[float, ...] | None) -> bool:
    """Whether workers may hold more than a plan's limits say, for which its bound was proven."""
    if stated is None:
        return False
    return explainer.limits is None or any(now > then for now, then in zip(explainer.limits, stated, strict=True))


def _limits(text: Any, ranks: int) -> tuple[float, ...] | None:
    if not str(text or "").strip():
        return None
    value = _number("Memory limit", text, ranks, "rank")
    return tuple(value) if isinstance(value, list) else (value,) * ranks


def _number(title: str, text: Any, count: int, what: str) -> PerStage:
    """A number, or `count` of them with spaces or commas between. Raises JobError."""
    words = str(text)[:_LONGEST].replace(",", " ").split()
    try:
        values = [float(word) for word in words]
    except ValueError:
        values = []
    form = "a number" + (f", or {count}, one per {what}" if count > 1 else "")
    if len(values) not in {1, count} or not all(math.isfinite(value) and value >= 0 for value in values):
        raise JobError(f"{title}: write {form}, of at least 0; got {str(text)[:40]!r}")
    return values[0] if len(values) == 1 else values


def _text(value: Any) -> str:
    """A value as the fields show it: numbers that are all alike once."""
    values = list(value) if isinstance(value, list | tuple) else [value]
    shown = [f"{number:.6g}" for number in values]
    return shown[0] if len(set(shown)) == 1 else " ".join(shown)
