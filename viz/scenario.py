"""The scenario of a timeline: what instructions take, what workers may hold, and which workers are dead or slow.

Times and limits come field by field, or with a profile or job that somebody drops; the order of the schedule stays.
What waits for what is worked out once per timeline, so that an answer for a hundred thousand instructions takes less
than a tenth of a second.

Dead and slow workers are one text, which asks for another plan: `1.2, pipeline:0, stage:3, node:1/8, 0.1=1.5`.
`pipeline:K`, `stage:S` (all workers of a position) and `node:N/W` (node N where W workers share one, see
`recycle.job.shape`) name several dead workers at once; `0.1=1.5` is a worker that takes 1.5 times as long for all its
work.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from recycle.errors import JobError, PlanError, errors_as
from recycle.ir.event_graph import load_compiled
from recycle.ir.simulate import time_graph
from recycle.job import Job, price
from recycle.job.pricing import profile_of_layout
from recycle.job.profile import PerStage, Profile
from recycle.job.sections import ANALYTIC
from recycle.job.shape import Shape, Worker, place_workers
from viz.lane_cache import Explainer
from viz.lanes import LaneTable


class Field(NamedTuple):
    """A field of the panel.

    Attributes:
        name: in the request, and in the page's address.
        title: its label.
        key: entry of the profile that it sets.
        is_per_stage: whether it may be a number per stage.
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
"""The field of what a worker may hold, in activations: a number, or one per rank; none where it is left empty."""
Limits = tuple[float, ...] | None
_TIMES = (*(field.key for field in FIELDS), "bandwidth", "links")
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
    found = {field.name: _text(getattr(profile, field.key)) for field in FIELDS}
    return found | {LIMIT: _text(list(explainer.limits)) if explainer.limits else ""}


def by_fields(explainer: Explainer, wanted: Mapping[str, Any]) -> tuple[Profile, Limits]:
    """What the fields say: field -> its text; fields that are left out stay as they are.

    Raises:
        JobError: a text is no number of the wanted form.
    """
    profile, shape = explainer.timeline.profile, explainer.timeline.schedule.shape
    changed: dict[str, Any] = {}
    for name, title, key, is_per_stage in FIELDS:
        if name in wanted and str(wanted[name]).strip() != _text(getattr(profile, key)):
            changed[key] = _number(title, wanted[name], shape.stages if is_per_stage else 1, "stage")
    if "latency" in changed:
        changed |= {"bandwidth": None, "links": {}}
    limits = _limits(wanted[LIMIT], shape.ranks) if LIMIT in wanted else explainer.limits
    return replace(profile, **changed) if changed else profile, limits


def by_file(explainer: Explainer, name: str, text: str) -> tuple[Profile, Limits]:
    """What a profile or job says that somebody dropped.

    Args:
        name: of the file; a job's ends with `.toml`.
        text: its content. Files that it names are not read.

    Raises:
        JobError: it cannot be read, is of another shape, or names a file of times.
    """
    shape = explainer.timeline.schedule.shape
    if not name.lower().endswith(".toml"):
        profile = Profile.from_bytes(text.encode(), name)
        with errors_as(JobError, name):
            profile.require(shape)
        return profile, explainer.limits
    job = Job.from_toml(text, name)
    if job.times.profile not in (None, ANALYTIC):
        raise JobError(f"{name}: [times] profile names a file, which the page does not read: drop that file here")
    priced = price(job)
    if replace(shape, cut=()) != priced.shape:
        raise JobError(f"{name} has the shape {priced.shape}, the timeline has {shape}: they must be the same")
    return profile_of_layout(priced, priced.prices, shape), None if priced.limits is None else tuple(priced.limits)


def retimed(
    explainer: Explainer, profile: Profile, limits: Limits, table: LaneTable | None = None
) -> tuple[LaneTable, Explainer]:
    """The lanes of a planned timeline in other times and limits, and what explains them.

    Args:
        table: the lanes as given, where they are known: others are made from them in a tenth of the time.

    Raises:
        JobError: the timeline is what ran, or the times add up to too much.
    """
    if explainer.executed:
        raise JobError("times: an executed step keeps its measured times; choose a plan")
    before = explainer.timeline
    timeline = before if profile is before.profile else time_graph(explainer.graph, profile)
    if replace(profile, **{key: getattr(before.profile, key) for key in _TIMES}) == before.profile:
        # What workers hold follows from the order and from what an activation weighs, not from times.
        timeline.__dict__["peak_activations"] = before.peak_activations
    is_same = timeline is before and not is_loosened(replace(explainer, limits=limits), explainer.limits)
    made = Explainer(timeline, limits=limits, bound=explainer.bound if is_same else None)
    made.__dict__["graph"] = explainer.graph  # which does not depend on times
    if table is None or explainer.ids is not None:
        return LaneTable.from_timeline(timeline), made
    return table.at_times_of(timeline), made


def is_loosened(explainer: Explainer, stated: Limits) -> bool:
    """Whether workers may hold more than a plan's limits say, for which its bound was proven."""
    if stated is None:
        return False
    return explainer.limits is None or any(now > then for now, then in zip(explainer.limits, stated, strict=True))


def _limits(text: Any, ranks: int) -> Limits:
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


FORMS = "1.2, pipeline:0, stage:3, node:1/8 (the second node of 8 workers each), or 0.1=1.5 for a slow worker"
MOST_NAMED = 2048


class Condition(NamedTuple):
    """Dead workers, and how many times as long slow ones take.

    Attributes:
        failed: the dead ones.
        slow: (worker, factor) of live ones, by worker.
    """

    failed: frozenset[Worker] = frozenset()
    slow: tuple[tuple[Worker, float], ...] = ()

    def names(self) -> list[str]:
        """A text for each worker, as `parse` reads them."""
        return [*map(str, sorted(self.failed)), *(f"{worker}={factor:g}" for worker, factor in self.slow)]

    def without(self, failed: Iterable[Worker]) -> Condition:
        """The same condition with other dead workers; a worker that is dead does not count as slow."""
        dead = frozenset(failed)
        return Condition(dead, tuple(one for one in self.slow if one[0] not in dead))


def parse(text: str, shape: Shape) -> Condition:
    """The condition that a text names. Raises PlanError that says what is wrong with it."""
    words = text.replace(",", " ").split()
    if len(words) > MOST_NAMED:
        raise PlanError(f"failed workers: {len(words)} are named; at most {MOST_NAMED}")
    failed: set[Worker] = set()
    slow: dict[Worker, float] = {}
    try:
        for word in words:
            name, is_slow, factor = word.partition("=")
            if is_slow:
                slow[shape.require(Worker.parse(name), "slow workers")] = _factor(word, factor)
            else:
                failed |= group(word, shape)
    except JobError as error:
        raise PlanError(str(error)) from None
    return Condition(frozenset(), tuple(sorted(slow.items()))).without(failed)


def group(word: str, shape: Shape) -> frozenset[Worker]:
    """The workers that `1.2`, `pipeline:0`, `stage:3` or `node:1/8` names. Raises JobError or PlanError."""
    kind, is_group, which = word.partition(":")
    if not is_group:
        return frozenset([shape.require(Worker.parse(word), "failed workers")])
    if kind not in _GROUPS:
        raise PlanError(f"failed workers: {word!r} is none of the forms: {FORMS}")
    try:
        number, *size = (int(part) for part in which.split("/"))
        if number < 0 or min(size, default=1) < 1:
            raise IndexError(which)
        return frozenset(_GROUPS[kind](shape, *size)[number])
    except (ValueError, TypeError, IndexError):
        raise PlanError(f"failed workers: {word!r} names nothing of {shape}: write {FORMS}") from None


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
