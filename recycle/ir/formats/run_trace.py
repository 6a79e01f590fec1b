"""The trace file of a run, `trace.json` (Chrome trace JSON, readable by Perfetto), and the schedule that it implies.

The schedule has the programs of the last complete step, in role names: pairs ran as F then B; workers without
instructions count as failed; a worker hosts the stages it worked for, or its first live peer's; the optimizer is
assumed to be "staggered". Rows of evaluations have the batch number as argument `evaluation`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np

from recycle.errors import JobError, RecycleError, ScheduleError, errors_as
from recycle.files import decoded, read_whole, write_whole
from recycle.ir import chrome
from recycle.ir.formats.schedule_input import ScheduleInput
from recycle.ir.instruction import Forward
from recycle.ir.native import words
from recycle.ir.trace import Trace, TraceBuilder, away_from, executed_schedule
from recycle.job.shape import Shape, Worker

FORMAT, VERSION = "recycle-trace", 1
MOST_BYTES = 2**32
"""Maximum size of a trace or log; larger than for schedules, because runs are long."""
_MOST_FACTS = 2**20
Count = Annotated[int, msgspec.Meta(ge=-(2**31), lt=2**31)]


def write_parts(parts: Iterable[Trace], shape: Shape, events: Iterable[Mapping[str, Any]], path: str | Path) -> None:
    """Write parts of a trace, one held at a time, as Chrome trace JSON: `pid` is worker index + 1, `cat` the track."""
    other = {"format": FORMAT, "version": VERSION, "shape": shape.to_json(), "clock": "seconds since run start"}
    write_whole(path, chrome.document(other, chain(_slices(parts), map(_instant, events))))


def _slices(parts: Iterable[Trace]) -> Iterator[chrome.Event]:
    named: set[tuple[int, int]] = set()
    for part in parts:
        yield from _slices_of(part, named)
        if part.evaluations is not None:
            yield from _slices_of(part.evaluations, named)


def _slices_of(trace: Trace, named: set[tuple[int, int]]) -> Iterator[chrome.Event]:
    c, track = trace.columns, chrome.track_of(trace.columns)
    start, end = chrome.nanoseconds(trace.start), chrome.nanoseconds(trace.end)
    names, workers = words(trace.shape, c), list(map(str, trace.shape.workers()))
    rerouted = away_from(c, trace.role // trace.shape.ranks)
    for w in np.flatnonzero(np.diff(c.offsets)).tolist():
        rows = slice(int(c.offsets[w]), int(c.offsets[w + 1]))
        tids, head = chrome.process_head(w + 1, f"worker {workers[w]}", w, track[rows], start[rows], end[rows])
        yield from (event for event in head if (event["pid"], event["tid"]) not in named)
        named |= {(event["pid"], event["tid"]) for event in head}
        columns = (track, trace.role, trace.step, trace.generation, trace.batch, c.pipeline, rerouted, start, end)
        lists = (column[rows].tolist() for column in columns)
        for name, tid, lane, role, step, generation, batch, home, away, begin, finish in zip(
            names[rows], tids, *lists, strict=True
        ):
            arguments = {"instruction": name, "worker": workers[w], "role": workers[role]}
            arguments |= {"step": step, "generation": generation}
            if batch >= 0:
                arguments["evaluation"] = batch
            if home >= 0:
                arguments |= {"home": home, "rerouted": away}
            yield chrome.slice_event(name, chrome.TRACKS[lane], w + 1, tid, begin, finish, arguments)


def _instant(event: Mapping[str, Any]) -> chrome.Event:
    seconds = event.get("time")
    moment = round(seconds * 1e9) if isinstance(seconds, int | float) else 0
    return chrome.instant_event(str(event.get("kind", "event")), "event", moment, dict(event))


class _Arguments(msgspec.Struct, frozen=True):
    instruction: str
    worker: str
    role: str
    step: Count
    generation: Count
    evaluation: Count | None = None


class _Slice(msgspec.Struct, frozen=True, tag_field="ph", tag="X"):
    ts: chrome.Moment
    dur: chrome.Duration
    args: _Arguments


class _Instant(msgspec.Struct, frozen=True, tag_field="ph", tag="i"):
    args: msgspec.Raw = msgspec.Raw(b"{}")


class _Other(msgspec.Struct, frozen=True):
    format: str
    version: int
    shape: dict[str, int | list[int]]


def read_trace(path: str | Path) -> Trace:
    """Read a file of `write_parts`, with times exact to the nanosecond. Raises RecycleError for unreadable files."""
    return parse_trace(read_whole(path, RecycleError, MOST_BYTES), str(path))


def parse_trace(content: bytes, name: str) -> Trace:
    """Parse a trace as `read_trace`; `name` begins every error message. Raises ScheduleError."""
    try:
        other = msgspec.json.decode(msgspec.json.encode(chrome.head(content, name).otherData), type=_Other)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ScheduleError(f"{name}: is not a trace that recycle wrote: otherData: {error}") from None
    if (other.format, other.version) != (FORMAT, VERSION):
        raise ScheduleError(f'{name}: otherData must say "format": "{FORMAT}", "version": {VERSION}')
    try:
        shape = Shape.from_json(other.shape)
    except (TypeError, JobError) as error:
        raise ScheduleError(f"{name}: otherData.shape: {error}") from None
    builder, events = TraceBuilder(shape), []
    file = chrome.decode(content, chrome.Events[_Slice | _Instant | chrome.Title], name)
    for place, event in enumerate(file.traceEvents):
        if isinstance(event, _Instant):
            events.append(_facts(event.args, f"{name}: traceEvents[{place}]: args"))
        if not isinstance(event, _Slice):
            continue
        try:
            process = shape.require(Worker.parse(event.args.worker), "worker")
            role = shape.require(Worker.parse(event.args.role), "role")
            first = round(event.ts * 1000)
            last = first + round(event.dur * 1000)
            text, generation, step = event.args.instruction, event.args.generation, event.args.step
            builder.add(process, role, generation, step, text, first / 1e9, last / 1e9, event.args.evaluation)
        except (JobError, ScheduleError) as error:
            raise ScheduleError(f"{name}: traceEvents[{place}]: {error}") from None
    with errors_as(ScheduleError, name):
        return builder.build(events)


def _facts(args: msgspec.Raw, where: str) -> dict[str, Any]:
    if (size := len(memoryview(args))) > _MOST_FACTS:
        raise ScheduleError(f"{where}: {size:,} bytes, at most {_MOST_FACTS:,}")
    with errors_as(ScheduleError, where):
        facts: dict[str, Any] = decoded(args, dict[str, Any], ScheduleError)
    return facts


def load_input(content: bytes, name: str) -> ScheduleInput:
    """Parse a trace and the schedule of its last complete step; `name` begins every error message.

    Raises ScheduleError if the file is not such a trace, or has no complete step.
    """
    executed = parse_trace(content, name)
    shape = executed.shape
    for step in reversed(executed.steps):
        ran = executed.window(step, step, executed.generations_of(step)[-1])
        if _is_whole(ran):
            break
    else:
        raise ScheduleError(
            f"{name}: no step is complete: in a complete step every stage runs the forwards of all"
            f" {shape.global_micro_batches} micro-batches"
        )
    generation = int(ran.generation[0])
    others = f" {len(executed.steps) - 1} other step(s) and" if len(executed.steps) > 1 else ""
    schedule, _ = executed_schedule(ran)
    return ScheduleInput(
        name,
        schedule.with_metadata(executed={"step": step, "generation": generation}),
        trace=executed,
        step=step,
        generation=generation,
        warnings=(f"kept step {step} of generation {generation}, in role names; left out{others} all events",),
    )


def _is_whole(ran: Trace) -> bool:
    c, shape = ran.columns, ran.shape
    forwards = c.kind == Forward.kind
    cells = np.unique(np.stack([c.stage[forwards], c.pipeline[forwards], c.index[forwards]]), axis=1)
    return bool(cells.shape[1] == shape.stages * shape.global_micro_batches)
