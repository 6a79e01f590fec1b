"""The scenario of a page: times, memory limit, dead and slow workers, slow links, for every timeline and figure.

A scenario is two texts, which the page's address keeps. `times` has fields: `F=2 I=1,2,2,1 link=0.5 limit=4`, where
`file=DIGEST` stands for a dropped profile or job, which the fields change. `workers` is a `viz.condition.Condition`.
Dead workers ask for another plan (`viz.what_if`); everything else keeps the order of a schedule.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, NamedTuple

from recycle.errors import JobError, errors_as
from recycle.ir.event_graph import load_compiled
from recycle.ir.simulate import time_graph
from recycle.job import Job, price
from recycle.job.pricing import profile_of_layout
from recycle.job.profile import PerStage, Profile
from recycle.job.sections import ANALYTIC
from viz.condition import Condition, parse
from viz.lane_cache import BoundedCache, LaneCache, Limits, TimedLanes, TimelineContext, content_hash, lanes_address


class Field(NamedTuple):
    """A field of `times`.

    Attributes:
        key: entry of the profile that it sets; "" for the memory limit.
        is_work: whether it accepts a number per stage, and a chunk takes its share of the value on a page whose
            schedules differ in chunks.
    """

    name: str
    title: str
    key: str
    is_work: bool = True


FIELDS = (
    Field("F", "Forward (F)", "forward"),
    Field("I", "Backward, input (I)", "backward_input"),
    Field("W", "Backward, weight (W)", "backward_weight"),
    Field("link", "Transfer", "latency", is_work=False),
    Field("reduce", "Reduce", "reduce"),
    Field("step", "Step", "step"),
    Field("limit", "Memory limit", ""),
)
FILE = "file"
COMPILED_ROWS = 20_000
"""Rows of a timeline from which other times are computed by compiled loops."""
_LONGEST = 100_000


class Scenario(NamedTuple):
    """The two texts of a scenario; empty texts leave all timelines as given."""

    times: str = ""
    workers: str = ""

    @classmethod
    def of(cls, times: Any, workers: Any) -> Scenario:
        """Return the scenario of two values from the browser."""
        return cls(*(" ".join(str(text or "")[:_LONGEST].split()) for text in (times, workers)))

    def fields(self) -> dict[str, str]:
        """Return field -> text. Raises JobError for a word that is not `FIELD=VALUE`."""
        pairs = dict(word.partition("=")[::2] for word in self.times.split())
        for name in pairs.keys() - {field.name for field in FIELDS} - {FILE}:
            known = ", ".join(field.name for field in FIELDS)
            raise JobError(f"times: {name!r} is not a field; write FIELD=NUMBER with one of {known}")
        return pairs


AS_GIVEN = Scenario()


class PageModel(LaneCache):
    """The timelines of an application, as given and under scenarios. All pages, panels and routes ask it."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._under: BoundedCache[tuple[str, Scenario], str] = BoundedCache(4096)
        self.files: BoundedCache[str, tuple[str, str]] = BoundedCache(8)
        self.curves: BoundedCache[Any, dict[str, list[float]]] = BoundedCache(8)

    def keep_file(self, name: str, text: str) -> str:
        """Keep a dropped profile or job; returns its digest for `file=DIGEST`."""
        digest = content_hash(f"{name}\n{text}".encode())[:12]
        self.files.put(digest, (name, text))
        return digest

    def under(self, address: str, scenario: Scenario) -> str | None:
        """Return the address of lanes under a scenario; None if they are not cached. Raises JobError or PlanError."""
        entry = self.get(address)
        return None if entry is None else lanes_address(self._put_under(entry, scenario))

    def entry(self, lanes: TimedLanes, scenario: Scenario) -> TimedLanes:
        """Return the cached lanes of a timeline under a scenario. Raises JobError or PlanError."""
        entry = self.get(self._put_under(lanes, scenario))
        assert entry is not None
        return entry

    def _put_under(self, entry: TimedLanes, scenario: Scenario) -> str:
        table, context = entry.table, entry.context
        given = self.put(entry)
        if context is None or context.executed or not any(scenario):
            return given
        known = self._under.get((given, scenario))
        if known is None or self.get(known) is None:
            timed = self.context_under(context, scenario)
            lanes = table if timed is context else table.with_times_of(timed.timeline)
            known = self._under.put((given, scenario), self.put(TimedLanes(lanes, timed)))
        return known

    def context_under(self, context: TimelineContext, scenario: Scenario) -> TimelineContext:
        profile, limits = self.prices(context, scenario)
        before = context.timeline
        if profile == before.profile and limits == context.limits:
            return context
        if len(before.start) >= COMPILED_ROWS:  # one of many requests, so the first may take seconds
            load_compiled()
        timeline = before if profile == before.profile else time_graph(context.graph, profile)
        stashes = [(each.weight_stash, each.redundant_stash) for each in (profile, before.profile)]
        if stashes[0] == stashes[1]:  # then held activations depend on the order alone
            timeline.__dict__["peak_activations"] = before.peak_activations
        return replace(context, timeline=timeline, limits=limits)

    def prices(self, context: TimelineContext, scenario: Scenario) -> tuple[Profile, Limits]:
        """Return a timeline's profile and limits under a scenario. Raises JobError or PlanError."""
        profile, limits, shape = context.timeline.profile, context.limits, context.timeline.schedule.shape
        texts = scenario.fields()
        if FILE in texts:
            kept = self.files.get(texts[FILE])
            if kept is None:
                raise JobError("times: the file of times is not known to this viewer; choose it again")
            profile, limits = prices_of_file(context, *kept)
        changed: dict[str, Any] = {}
        for field in FIELDS:
            if field.name not in texts:
                continue
            noun, count = ("stage", shape.stages) if field.key else ("rank", shape.ranks)
            value = numbers(field.title, texts[field.name], count if field.is_work else 1, noun)
            if not field.key:
                per_rank = value if isinstance(value, list) else [value] * shape.ranks
                limits = tuple(limit * context.chunks for limit in per_rank)
            else:
                changed[field.key] = value * context.share if field.is_work and not isinstance(value, list) else value
        if "latency" in changed:
            changed |= {"bandwidth": None, "links": {}}
        profile = replace(profile, **changed) if changed else profile
        condition = parse(scenario.workers, shape) if scenario.workers else Condition()
        return condition.slow_down(profile, shape, context.condition), limits


def prices_of_file(context: TimelineContext, name: str, text: str) -> tuple[Profile, Limits]:
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


def numbers(title: str, text: str, count: int, noun: str) -> PerStage:
    words = text.replace(",", " ").split()
    try:
        values = [float(word) for word in words]
    except ValueError:
        values = []
    form = "a number" + (f", or {count}, one per {noun}" if count > 1 else "")
    if len(values) not in {1, count} or not all(math.isfinite(value) and value >= 0 for value in values):
        raise JobError(f"{title}: write {form}, of at least 0; got {text[:40]!r}")
    return values[0] if len(values) == 1 else values
