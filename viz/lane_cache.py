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
import struct
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Generic, NamedTuple, TypeVar
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt

from recycle.ir.columns import Rows
from recycle.ir.event_graph import EventGraph, event_graph
from recycle.ir.schedule import Schedule
from recycle.ir.simulate import Timeline, slack
from recycle.job.shape import Worker
from viz.analysis.bubbles import Bubbles, Waits
from viz.figures.boxes import parts_of
from viz.figures.palette import (
    CHUNK_PAINTS,
    COMMUNICATION,
    FAILURE,
    FAILURE_BAND,
    FAILURE_HATCH,
    INK,
    PAINTS,
    Paint,
    shade_of,
)
from viz.kinds import LABEL, LABEL_AWAY, LINES, MARKS, kinds
from viz.lanes import Flag, LaneTable
from viz.numbers import TimeUnit, time_unit

MAGIC = b"RLN2"
COLUMNS = ("start", "end", "micro_batch", "stage", "pipeline", "kind", "flags")
PAIRED = ("pipeline2", "micro_batch2")
"""Columns for the backwards of overlapped pairs, in tables with pairs."""
_HEADER = struct.Struct("<4sIIId")
_UNSIGNED = ("u1", "<u2", "<u4")


def encode(table: LaneTable) -> bytes:
    """Encode a table as `lanes.bin`."""
    columns = {name: _narrow(getattr(table, name)) for name in COLUMNS}
    if table.paired is not None:
        home, index = table.paired
        columns |= {PAIRED[0]: _narrow(home), PAIRED[1]: _narrow(index)}
    types = {name: column.dtype.kind + str(column.itemsize) for name, column in columns.items()}
    described = json.dumps({"columns": types, **describe_table(table)}, separators=(",", ":")).encode()
    parts = [_HEADER.pack(MAGIC, table.lanes, len(table), len(described), table.origin)]
    parts.append(table.offsets.astype("<u4").tobytes())
    for column in columns.values():
        parts += [column.tobytes(), bytes(_padding(column.nbytes))]
    return b"".join([*parts, described])


def _narrow(column: npt.NDArray[Any]) -> npt.NDArray[Any]:
    if column.dtype.kind == "f":
        return column.astype("<f4")
    none = np.iinfo(column.dtype).max
    known = column[column != none]
    most = int(known.max(initial=0))
    narrow = next(kind for kind in _UNSIGNED if most < np.iinfo(kind).max)
    return np.where(column == none, np.iinfo(narrow).max, column).astype(narrow)


def _padding(size: int) -> int:
    return -size % 4


def describe_table(table: LaneTable) -> dict[str, Any]:
    """Return the canvas's data besides the columns: lane names, and the drawing of each kind and mark."""
    places = {paint.key: place for place, paint in enumerate(PAINTS)}
    return {
        "labels": table.labels,
        "pipelines": [worker.pipeline for worker in table.workers],
        "ranks": [worker.rank for worker in table.workers],
        "failed": np.flatnonzero(table.failed).tolist(),
        "span": table.span,
        "unit": time_unit(table),
        "by_rank": "stage" if table.shape.chunks == 1 else "rank",
        "bits": {flag.name: int(flag) for flag in Flag},
        "kinds": [
            {**kind, "parts": [[places[part[0].key], *part[1:]] for part in parts_of(number, table.weight_share)]}
            for number, kind in enumerate(kinds())
        ],
        "texts": {"label": LABEL, "label_away": LABEL_AWAY, "lines": LINES},
        "marks": {flag.name: text for flag, text in MARKS.items()},
        "paints": _paints(PAINTS),
        "chunk_paints": [_paints(CHUNK_PAINTS[shade_of(chunk, table.chunks)]) for chunk in range(table.chunks)],
        "stages_per_chunk": table.shape.ranks,
        "busy": [places[paint.key] for paint in PAINTS if paint is not COMMUNICATION],
        "failure": {"fill": FAILURE_BAND, "hatch": FAILURE_HATCH, "line": FAILURE, "ink": INK},
    }


def _paints(paints: Sequence[Paint]) -> list[dict[str, str]]:
    return [{name: getattr(paint, name) for name in paint.__slots__} for paint in paints]


def release_memory() -> None:
    """Return freed memory to the system: glibc keeps freed blocks below 32 MB, such as most columns of a schedule."""
    gc.collect()
    if not sys.platform.startswith("linux"):
        return
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except AttributeError:
        return  # other C libraries return freed memory


K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class BoundedCache(Generic[K, V]):
    """A thread-safe cache that evicts the least recently used values.

    Args:
        most: maximum total weight.
        weigh: weight of a value.
        at_least: number of values kept at any weight.
        at_most: maximum number of values; None: unlimited.
    """

    def __init__(self, most: float, weigh: Callable[[V], float], at_least: int = 1, at_most: int | None = None) -> None:
        self.most, self.weigh, self.at_least, self.at_most = most, weigh, at_least, at_most
        self._kept: OrderedDict[K, V] = OrderedDict()
        self._lock = threading.Lock()

    def put(self, key: K, value: V) -> V:
        """Add a value, and evict the least recently used ones."""
        with self._lock:
            self._kept[key] = value
            self._kept.move_to_end(key)
            weights = [self.weigh(kept) for kept in self._kept.values()]
            while len(weights) > self.at_least and (
                sum(weights) > self.most or (self.at_most is not None and len(weights) > self.at_most)
            ):
                self._kept.popitem(last=False)
                del weights[0]
        return value

    def get(self, key: K) -> V | None:
        """Return the value of a key; None if it was never added or was evicted."""
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
            return self._kept.get(key)


MOST_BYTES = 400_000_000
"""Maximum bytes of a lane cache; the last tables stay in any case, at least four, as many as one page compares."""
TABLE_BYTES = 60
"""Bytes per operation of a table and its timeline."""


Limits = tuple[float, ...] | None
"""Activations (in chunks) that a worker of each rank may hold; None: unlimited."""


@dataclass(frozen=True, eq=False)
class Explainer:
    """The timeline behind a table, with limits and bounds, to explain operations.

    Attributes:
        timeline: planned, or executed.
        ids: the table's instruction id of each row of `timeline`; None if they are equal.
        executed: whether the timeline was executed; its order then follows no model of times.
        bound: (proven lower bound of the period for these times and limits, gap) from a planner.
    """

    timeline: Timeline
    ids: Rows | None = None
    limits: Limits = None
    executed: bool = False
    bound: tuple[float, float] | None = None

    @property
    def proven(self) -> tuple[float, float] | None:
        """(lower bound of the period, gap) for these times and limits, from the planner or the metadata of the plan."""
        if self.bound is not None or is_loosened(self.limits, stated_limits(self.timeline.schedule)):
            return self.bound
        return stated_bound(self.timeline)

    @cached_property
    def slack(self) -> Any:
        """Slack of each row of a plan; None for an executed timeline."""
        return None if self.executed else slack(self.timeline)

    @cached_property
    def graph(self) -> EventGraph:
        """Dependency graph of the timeline, for new times."""
        return event_graph(self.timeline.schedule, graph=self.timeline.dependencies)

    @cached_property
    def waits(self) -> Waits:
        return Waits(self.timeline)

    @cached_property
    def bubbles(self) -> Bubbles:
        return Bubbles(self.timeline, self.limits)

    def row(self, table: LaneTable, operation: int) -> int:
        """Return the row of the timeline for an operation."""
        instruction = int(table.instruction_id[operation])
        return instruction if self.ids is None else int(np.flatnonzero(self.ids == instruction)[0])

    def operation(self, table: LaneTable, row: int) -> int:
        """Return the operation for a row of the timeline; -1 if it is not drawn."""
        instruction = row if self.ids is None else int(self.ids[row])
        found = np.flatnonzero(table.instruction_id == instruction)
        return int(found[0]) if len(found) else -1

    def lane(self, table: LaneTable, worker: Worker) -> int:
        """Return the lane of a worker of the timeline; -1 if it is not drawn.

        For an executed timeline it is the lane of the process that had the worker's role.
        """
        columns, w = self.timeline.schedule.columns, self.timeline.schedule.shape.worker_index(worker)
        if self.ids is None:
            return w
        first = int(columns.offsets[w])
        operation = self.operation(table, first) if first < int(columns.offsets[w + 1]) else -1
        return int(np.searchsorted(table.offsets, operation, side="right")) - 1 if operation >= 0 else -1


def stated_limits(schedule: Schedule) -> Limits:
    """Return the limits in a plan's metadata, or None if absent or invalid."""
    stated = schedule.metadata.get("limits")
    if not isinstance(stated, list) or len(stated) != schedule.shape.ranks:
        return None
    usable = all(isinstance(limit, int | float) and not isinstance(limit, bool) and limit >= 0 for limit in stated)
    return tuple(float(limit) for limit in stated) if usable else None


def stated_bound(timeline: Timeline) -> tuple[float, float] | None:
    """Return (lower bound, gap) from a plan's metadata; None if they apply to other times than the timeline's.

    The hash in the metadata must match the profile. Without a hash, or with a cut of other stages than the profile's,
    the periods must be equal.
    """
    metadata = timeline.schedule.metadata
    bound, gap, period = (metadata.get(name) for name in ("lower_bound", "gap", "period"))
    if not isinstance(bound, int | float) or not isinstance(gap, int | float):
        return None
    made_for = metadata.get("profile")
    if isinstance(made_for, str) and not timeline.schedule.shape.cut:
        return (bound, gap) if made_for == timeline.profile.digest() else None
    is_same = isinstance(period, int | float) and math.isclose(period, timeline.period, rel_tol=1e-6)
    return (bound, gap) if is_same else None


def is_loosened(limits: Limits, stated: Limits) -> bool:
    """Return whether the limits exceed a plan's stated limits, for which its bound was proven."""
    if stated is None:
        return False
    return limits is None or any(now > then for now, then in zip(limits, stated, strict=True))


class Drawn(NamedTuple):
    """Lanes, and their explainer if known."""

    lanes: LaneTable
    explainer: Explainer | None = None


class Operand(NamedTuple):
    """A timeline to compare: its lanes, by rows of its explainer's timeline.

    Attributes:
        seconds_per_unit: seconds per unit of a plan's times, if known.
    """

    title: str
    explainer: Explainer
    lanes: LaneTable
    seconds_per_unit: float | None = None

    @property
    def timeline(self) -> Timeline:
        """Planned, or executed with times in seconds."""
        return self.explainer.timeline


@dataclass(frozen=True, eq=False)
class CachedLanes:
    """A table in the cache, its `lanes.bin`, and its explainer if known."""

    table: LaneTable
    content: bytes
    explainer: Explainer | None
    span: float | None = None
    """Length of the time axis of the last drawing, if it differs from the table's span."""

    @property
    def unit(self) -> TimeUnit:
        """The unit of that axis, for all texts about these lanes."""
        return time_unit(self.table, self.span)


class LaneCache:
    """Thread-safe cache of tables by the hash of their `lanes.bin`."""

    def __init__(self, most_bytes: int = MOST_BYTES, at_least: int = 4) -> None:
        self._kept: BoundedCache[str, CachedLanes] = BoundedCache(most_bytes, _bytes, at_least)
        self._digests: WeakKeyDictionary[LaneTable, str] = WeakKeyDictionary()

    def put(self, table: LaneTable, explainer: Explainer | None = None, span: float | None = None) -> str:
        """Add a table (lanes by pipeline, then rank), drawn under an axis of length `span`; return its hash."""
        known = self._digests.get(table)
        kept = None if known is None else self.get(known)
        if known is not None and kept is not None:
            if span != kept.span:
                self._kept.put(known, replace(kept, span=span))
            return known
        content = encode(table)
        digest = content_hash(content)
        self._kept.put(digest, CachedLanes(table, content, explainer, span))
        self._digests[table] = digest
        return digest

    def get(self, digest: object) -> CachedLanes | None:
        """Return the table of a hash, or of an address with the hash; None if it was never added or was evicted."""
        return self._kept.get(str(digest).removeprefix("lanes/").removesuffix(".bin"))


def _bytes(kept: CachedLanes) -> int:
    return len(kept.content) + TABLE_BYTES * len(kept.table)


def content_hash(content: bytes) -> str:
    """Return the name under which the browser fetches a content."""
    return hashlib.sha256(content).hexdigest()[:32]
