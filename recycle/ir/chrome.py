"""Reading and writing of Chrome's Trace Event JSON, the format of Perfetto and chrome://tracing.

Events: M names and sorts processes and threads, X is a slice, C a counter, s and f the ends of a flow (an arrow), i an
instant (Trace Event Format document of the Chromium project). Times are whole nanoseconds.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import Annotated, Any, Generic, TypeVar

import msgspec
import numpy as np

from recycle.errors import ScheduleError, errors_as
from recycle.files import decoded
from recycle.ir.columns import Columns, Floats, Rows
from recycle.ir.instruction import Offload, Receive, Reload, Send, is_kind

Nanoseconds = Rows
Event = dict[str, Any]
T = TypeVar("T")

TRACKS = ("compute", "send", "recv", "offload", "reload")
MOST_HEAD_BYTES = 2**25
"""Maximum bytes of everything but the events. In memory, small values take many times their text."""
MOST_SECONDS = 2.0**53 / 1e9
"""Largest time (104 days) for which a double counts every nanosecond."""

Moment = Annotated[float, msgspec.Meta(ge=-1e15, le=1e15)]
Duration = Annotated[float, msgspec.Meta(ge=0, le=1e15)]
"""`ts` and `dur` as read, in microseconds."""


# Writing


def document(other: Mapping[str, Any], events: Iterable[Event]) -> Iterator[str]:
    """Yield the text of a file in parts of a few thousand events; `other` is `otherData`, JSON values."""
    encode = msgspec.json.Encoder().encode
    yield f'{{"displayTimeUnit":"ms","otherData":{encode(other).decode()},"traceEvents":[\n'
    remaining = iter(events)
    separator = b""
    while batch := [encode(event) for event in islice(remaining, 4096)]:
        yield (separator + b",\n".join(batch)).decode()
        separator = b",\n"
    yield "\n]}\n"


def nanoseconds(seconds: Floats) -> Nanoseconds:
    """Round to whole nanoseconds."""
    return np.rint(seconds * 1e9).astype(np.int64)


def microseconds(nanoseconds: int) -> int | float:
    """Convert to the microseconds of `ts` and `dur`."""
    return nanoseconds / 1000 if nanoseconds % 1000 else nanoseconds // 1000


def slice_event(
    name: str, category: str, pid: int, tid: int, start: int, end: int, arguments: Mapping[str, Any]
) -> Event:
    """Return a slice from `start` to `end`, in nanoseconds."""
    return {
        "ph": "X",
        "name": name,
        "cat": category,
        "pid": pid,
        "tid": tid,
        "ts": microseconds(start),
        "dur": microseconds(end - start),
        "args": arguments,
    }


def flow_event(phase: str, flow: int, name: str, category: str, pid: int, tid: int, start: int) -> Event:
    """Return one end of an arrow, "s" or "f", to be written directly after the slice at `start` (nanoseconds)."""
    ends: Event = {"bp": "e"} if phase == "f" else {}
    where = {"pid": pid, "tid": tid, "ts": microseconds(start)}
    return {"ph": phase, "id": flow, "name": name, "cat": category, **where, **ends}


def counter_event(name: str, pid: int, moment: int, series: str, value: float) -> Event:
    """Return a new value of a process's counter, at a time in nanoseconds."""
    return {"ph": "C", "name": name, "pid": pid, "ts": microseconds(moment), "args": {series: value}}


def instant_event(name: str, category: str, moment: int, arguments: Mapping[str, Any]) -> Event:
    """Return an instant of the whole run, at a time in nanoseconds."""
    return {
        "ph": "i",
        "s": "g",
        "name": name,
        "cat": category,
        "pid": 1,
        "tid": 0,
        "ts": microseconds(moment),
        "args": arguments,
    }


def track_of(columns: Columns) -> Rows:
    """Return the index into TRACKS of each row."""
    return np.select([is_kind(columns.kind, cls) for cls in (Send, Receive, Offload, Reload)], [1, 2, 3, 4], 0)


def process_head(
    pid: int, name: str, sort_index: int, track: Rows, start: Nanoseconds, end: Nanoseconds
) -> tuple[list[int], list[Event]]:
    """Return (thread of each slice of one process, events that name and sort the process and its threads).

    Overlapping slices get separate threads, since viewers drop slices that overlap without nesting.
    """
    places = np.zeros(len(track), dtype=np.int64)
    for lane in range(len(TRACKS)):
        rows = np.flatnonzero(track == lane)
        places[rows] = _separate(start[rows], end[rows])
    stride = max(100, int(places.max(initial=0)) + 1)
    tids = stride * track + places + 1
    events = _named("process", pid, 0, name, sort_index)
    for tid in np.unique(tids).tolist():
        lane, place = divmod(tid - 1, stride)
        events += _named("thread", pid, tid, f"{TRACKS[lane]} {place + 1}" if place else TRACKS[lane], tid)
    return tids.tolist(), events


def _named(scope: str, pid: int, tid: int, name: str, sort_index: int) -> list[Event]:
    where = {"pid": pid, "tid": tid}
    return [
        {"ph": "M", "name": f"{scope}_name", **where, "args": {"name": name}},
        {"ph": "M", "name": f"{scope}_sort_index", **where, "args": {"sort_index": sort_index}},
    ]


def _separate(start: Nanoseconds, end: Nanoseconds) -> Rows:
    places = np.zeros(len(start), dtype=np.int64)
    order = np.lexsort((end, start))
    if (start[order[1:]] >= end[order[:-1]]).all():
        return places
    begins, ends = start.tolist(), end.tolist()
    running: list[tuple[int, int]] = []
    free: list[int] = []
    for slice_ in order.tolist():
        while running and running[0][0] <= begins[slice_]:
            heapq.heappush(free, heapq.heappop(running)[1])
        places[slice_] = heapq.heappop(free) if free else len(running)
        heapq.heappush(running, (ends[slice_], int(places[slice_])))
    return places


# Reading


class Title(msgspec.Struct, frozen=True, tag_field="ph", tag="M"):
    """An event that names or sorts a process or thread; its content is ignored."""


class Events(msgspec.Struct, Generic[T], frozen=True):
    """The events of a file, each as `T`."""

    traceEvents: list[T]


class Head(msgspec.Struct, frozen=True):
    """Everything in a file except the events."""

    traceEvents: msgspec.Raw
    otherData: dict[str, msgspec.Raw] = {}
    distributedInfo: dict[str, Any] = {}
    baseTimeNanoseconds: int = 0


class _Unread(msgspec.Struct, frozen=True):
    otherData: msgspec.Raw = msgspec.Raw()
    distributedInfo: msgspec.Raw = msgspec.Raw()


def head(content: bytes, name: str) -> Head:
    """Decode everything but the events. Raises ScheduleError that begins with `name`, also for oversized content."""
    for key, value in msgspec.structs.asdict(decode(content, _Unread, name)).items():
        if (size := len(memoryview(value))) > MOST_HEAD_BYTES:
            raise ScheduleError(f"{name}: {key}: {size:,} bytes, at most {MOST_HEAD_BYTES:,}")
    return decode(content, Head, name)


def decode(content: bytes, kind: type[T], name: str) -> T:
    """Decode the file as `kind`, a msgspec type. Raises ScheduleError that begins with `name` and names the event."""
    with errors_as(ScheduleError, name):
        return decoded(content, kind, ScheduleError)
