"""Cache of lanes as the browser fetches them, with their timelines; and release of freed memory to the system.

`lanes.bin` is an encoded LaneTable, named by its content. Little endian: magic `RLN2`, u32 lanes, u32 operations, u32
bytes of the description, f64 origin; u32 offsets (lanes + 1); the described columns, each in its narrowest type and
aligned to 4 bytes; then the description as JSON in UTF-8. The description includes the kinds with their drawing
(`figures.boxes`), the colors (`figures.palette`) and all texts (`kinds`).

Times are float32 from the origin: counted from the run's start, they would have a resolution of 8 ms after a day.
Instruction ids stay on the server: the browser refers to operations by index.
"""

from __future__ import annotations

import ctypes
import gc
import hashlib
import json
import math
import operator
import struct
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import cached_property, lru_cache
from typing import Any, Generic, TypeVar
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt

from recycle.errors import PlanError
from recycle.ir.event_graph import EventGraph, event_graph
from recycle.ir.schedule import Schedule
from recycle.ir.simulate import Timeline, slack
from recycle.plans import Plan
from viz.analysis.bubbles import Bubbles, DependencyIndex
from viz.condition import Condition
from viz.figures.boxes import box_parts
from viz.figures.palette import (
    CHUNK_PAINTS,
    COMMUNICATION,
    FAILURE,
    FAILURE_BAND,
    FAILURE_HATCH,
    INK,
    PAINTS,
    shade_of,
)
from viz.kinds import LABEL, LABEL_REROUTED, LINES, MARKS, kinds
from viz.lanes import Flag, LaneTable
from viz.numbers import TimeUnit, time_unit

MAGIC = b"RLN2"
COLUMNS = ("start", "end", "micro_batch", "stage", "pipeline", "kind", "flags")
PAIRED = ("pipeline2", "micro_batch2")
"""Columns for the backwards of overlapped pairs, in tables with pairs."""
_HEADER = struct.Struct("<4sIIId")
_UNSIGNED = ("u1", "<u2", "<u4")


def encode(table: LaneTable) -> bytes:
    columns = {name: _narrow(getattr(table, name)) for name in COLUMNS}
    if table.paired is not None:
        home, index = table.paired
        columns |= {PAIRED[0]: _narrow(home), PAIRED[1]: _narrow(index)}
    types = {name: column.dtype.kind + str(column.itemsize) for name, column in columns.items()}
    labels = [
        f"{label} \N{MULTIPLICATION SIGN}{table.speed[str(worker)]:g}" if str(worker) in table.speed else label
        for label, worker in zip(table.labels, table.workers, strict=True)
    ]
    description = {
        "columns": types,
        "labels": labels,
        "pipelines": [worker.pipeline for worker in table.workers],
        "ranks": [worker.rank for worker in table.workers],
        "failed": np.flatnonzero(table.failed).tolist(),
        "span": table.span,
        "halt": table.halt,
        "unit": time_unit(table),
        "by_rank": "stage" if table.shape.chunks == 1 else "rank",
        "stages_per_chunk": table.shape.ranks,
    }
    own = json.dumps(description, separators=(",", ":"))
    described = f"{own[:-1]},{_drawing(table.weight_share, table.chunks)[1:]}".encode()
    parts = [_HEADER.pack(MAGIC, table.lanes, len(table), len(described), table.origin)]
    parts.append(table.offsets.astype("<u4").tobytes())
    for column in columns.values():
        parts += [column.tobytes(), bytes(-column.nbytes % 4)]
    return b"".join([*parts, described])


def _narrow(column: npt.NDArray[Any]) -> npt.NDArray[Any]:
    if column.dtype.kind == "f":
        return column.astype("<f4")
    missing = np.iinfo(column.dtype).max
    values = column[column != missing]
    largest = int(values.max(initial=0))
    narrow = next(kind for kind in _UNSIGNED if largest < np.iinfo(kind).max)
    return np.where(column == missing, np.iinfo(narrow).max, column).astype(narrow)


@lru_cache(64)
def _drawing(weight_share: float, chunks: int) -> str:
    """Return the drawing of each kind and mark as JSON, the same for many tables."""
    places = {paint.key: place for place, paint in enumerate(PAINTS)}
    drawing = {
        "bits": {flag.name: int(flag) for flag in Flag},
        "kinds": [
            {**kind, "parts": [[places[part[0].key], *part[1:]] for part in box_parts(number, weight_share)]}
            for number, kind in enumerate(kinds())
        ],
        "texts": {"label": LABEL, "label_away": LABEL_REROUTED, "lines": LINES},
        "marks": {flag.name: text for flag, text in MARKS.items()},
        "paints": list(map(asdict, PAINTS)),
        "chunk_paints": [list(map(asdict, CHUNK_PAINTS[shade_of(chunk, chunks)])) for chunk in range(chunks)],
        "busy": [places[paint.key] for paint in PAINTS if paint is not COMMUNICATION],
        "failure": {"fill": FAILURE_BAND, "hatch": FAILURE_HATCH, "line": FAILURE, "ink": INK},
    }
    return json.dumps(drawing, separators=(",", ":"))


def release_memory() -> None:
    """Return freed memory to the system: glibc keeps freed blocks below 32 MB, such as most columns of a schedule."""
    gc.collect()
    if sys.platform.startswith("linux"):
        with suppress(AttributeError):  # other C libraries return freed memory
            ctypes.CDLL(None).malloc_trim(0)


K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class BoundedCache(Generic[K, V]):
    """A thread-safe cache that evicts the least recently used values.

    Args:
        max_weight: maximum total weight.
        weight_of: weight of a value; without it, values are counted.
        min_items: number of values kept at any weight.
    """

    def __init__(self, max_weight: float, weight_of: Callable[[V], float] = lambda _: 1, min_items: int = 1) -> None:
        self.max_weight, self.weight_of, self.min_items = max_weight, weight_of, min_items
        self._kept: OrderedDict[K, V] = OrderedDict()
        self._weight = 0.0
        self._lock = threading.Lock()

    def put(self, key: K, value: V) -> V:
        with self._lock:
            if key in self._kept:
                self._weight -= self.weight_of(self._kept.pop(key))
            self._kept[key] = value
            self._weight += self.weight_of(value)
            while len(self._kept) > self.min_items and self._weight > self.max_weight:
                self._weight -= self.weight_of(self._kept.popitem(last=False)[1])
        return value

    def get(self, key: K) -> V | None:
        """Return the value of a key; None if it was never added or was evicted."""
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
            return self._kept.get(key)


MAX_BYTES = 400_000_000
"""Maximum bytes of a lane cache; the last tables stay in any case, at least four, as many as one page compares."""
TABLE_BYTES = 60
"""Bytes per operation of a table and its timeline."""


Limits = tuple[float, ...] | None
"""Activations (in chunks) that a worker of each rank may hold; None: unlimited."""


@dataclass(frozen=True, eq=False)
class TimelineContext:
    """The timeline behind a table, with limits and plan, to explain operations.

    Attributes:
        timeline: planned, or executed.
        executed: whether the timeline was executed; its order then follows no model of times.
        plan: the plan that was timed; None for other schedules.
        share: a chunk's part of the times in a scenario; below 1 on pages whose schedules differ in chunks.
        condition: slow workers and links that the times include.
    """

    timeline: Timeline
    limits: Limits = None
    executed: bool = False
    plan: Plan | None = None
    share: float = 1.0
    condition: Condition | None = None

    @classmethod
    def of_plan(cls, timeline: Timeline, limits: Limits = None) -> TimelineContext:
        """Return the context of a planned timeline, with the limits of its plan, or `limits` if the plan has none."""
        plan = plan_of(timeline.schedule)
        return cls(timeline, limits=(plan.limits if plan else None) or limits, plan=plan)

    @property
    def key(self) -> bytes:
        """What distinguishes contexts of equal lanes."""
        proven = self.plan and (self.plan.lower_bound, self.plan.period, self.plan.limits, self.plan.profile)
        return f"{self.timeline.profile.digest()} {self.limits} {self.executed} {self.share} {proven}".encode()

    @property
    def chunks(self) -> int:
        """Chunks in a worker's whole part of the model, the unit of memory on pages."""
        shape = self.timeline.schedule.shape
        return 1 if shape.cut else shape.chunks

    @property
    def bound(self) -> tuple[float, float] | None:
        """(proven lower bound of the period, gap); None without a plan for these times and limits.

        The plan's profile must be the timeline's. For a cut of other stages than the profile's, the periods must be
        equal.
        """
        plan, timeline, limits = self.plan, self.timeline, self.limits
        if plan is None:
            return None
        if plan.limits is not None and (limits is None or any(map(operator.gt, limits, plan.limits))):
            return None  # the timeline may hold more than the bound allows
        if timeline.schedule.shape.cut:
            is_timed = math.isclose(plan.period, timeline.period, rel_tol=1e-6)
        else:
            is_timed = plan.profile == timeline.profile.digest()
        return (plan.lower_bound, plan.gap) if is_timed else None

    @cached_property
    def slack(self) -> Any:
        """Slack of each row of a plan; None for an executed timeline."""
        return None if self.executed else slack(self.timeline)

    @cached_property
    def graph(self) -> EventGraph:
        """Dependency graph of the timeline, for new times."""
        return event_graph(self.timeline.schedule, graph=self.timeline.dependencies)

    @cached_property
    def dependency_index(self) -> DependencyIndex:
        return DependencyIndex(self.timeline)

    @cached_property
    def bubbles(self) -> Bubbles:
        return Bubbles(self.timeline, self.limits, self.chunks)


def plan_of(schedule: Schedule) -> Plan | None:
    """Return the plan that the metadata of a schedule describe; None if they describe none."""
    try:
        return Plan.from_schedule(schedule)
    except PlanError:
        return None


@dataclass(frozen=True, eq=False)
class TimedLanes:
    """Lanes and their timeline.

    Attributes:
        context: the timeline, planned, or executed in seconds; None if it is not known.
        content: the encoded table, if it is cached.
        span: length of the time axis of the last drawing, if it differs from the table's span.
        title: name among compared timelines.
        seconds_per_unit: seconds per unit of a plan's times, if known.
    """

    table: LaneTable
    context: TimelineContext | None = None
    content: bytes = b""
    span: float | None = None
    title: str = ""
    seconds_per_unit: float | None = None

    @property
    def known_context(self) -> TimelineContext:
        assert self.context is not None
        return self.context

    @property
    def timeline(self) -> Timeline:
        return self.known_context.timeline

    @property
    def unit(self) -> TimeUnit:
        """The unit of that axis, for all texts about these lanes."""
        return time_unit(self.table, self.span)


class LaneCache:
    """Thread-safe cache of tables by the hash of their `lanes.bin` and context."""

    def __init__(self, max_bytes: int = MAX_BYTES, min_tables: int = 4) -> None:
        self._kept: BoundedCache[str, TimedLanes] = BoundedCache(
            max_bytes, lambda entry: len(entry.content) + TABLE_BYTES * len(entry.table), min_tables
        )
        self._digests: WeakKeyDictionary[LaneTable, str] = WeakKeyDictionary()

    def put(self, lanes: TimedLanes, span: float | None = None) -> str:
        """Add lanes, drawn on a time axis of length `span` (None: as before), and return their hash."""
        table, context = lanes.table, lanes.context
        digest = self._digests.get(table, "")
        entry = self.get(digest)
        if entry is not None:
            if span not in (None, entry.span):
                self._kept.put(digest, replace(entry, span=span))
            return digest
        content = encode(table)
        digest = content_hash(content + (context.key if context else b""))
        self._kept.put(digest, TimedLanes(table, context, content, span))
        self._digests[table] = digest
        return digest

    def get(self, digest: object) -> TimedLanes | None:
        """Return the table of a hash, or of an address with the hash; None if it was never added or was evicted."""
        return self._kept.get(str(digest).removeprefix("lanes/").removesuffix(".bin"))


def lanes_address(digest: str) -> str:
    return f"lanes/{digest}.bin"


def content_hash(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:32]
