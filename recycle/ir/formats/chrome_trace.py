"""Chrome Trace Event JSON: schedules as timelines for Perfetto and chrome://tracing (docs/reference/file-format.md).

Written files (format "recycle-timeline" in `otherData`) contain the schedule, lowered and simulated; one unit of the
profile is one second. Counters show the held activations, in bytes if the profile's `activation` is not 1 everywhere,
else in chunks. Readable are these files, traces of `recycle train` (`run_trace`) and of torch (`profiler_trace`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np

from recycle.errors import JobError, ScheduleError, errors_as
from recycle.files import read_whole
from recycle.ir import chrome, native
from recycle.ir.columns import MOST_INSTRUCTIONS, Rows, require_few
from recycle.ir.dependencies import Cause, dependencies
from recycle.ir.formats import nsight, profiler_trace, run_trace
from recycle.ir.formats.schedule_input import ScheduleInput, is_gzip, most_instructions, unpack
from recycle.ir.instruction import (
    CARRIERS,
    KIND_CLASSES,
    Forward,
    Instruction,
    OverlappedPair,
    Transfer,
    is_kind,
    parse_instruction,
)
from recycle.ir.lower import lower, lower_with_origin
from recycle.ir.memory import activation_changes
from recycle.ir.schedule import Schedule
from recycle.ir.simulate import Timeline, timeline_of
from recycle.ir.trace import away_from
from recycle.job.profile import Profile
from recycle.job.shape import Shape, Worker

FORMAT, VERSION = "recycle-timeline", 1
_NAMED_FOLDERS, _MOST_FOLDERS = 3, 100
"""Folders of traces named in the hint for a parent folder, and folders examined for it."""
_HEAD = ("shape", "optimizer", "failed", "placement", "ties", "metadata")
"""Keys of the native file that `otherData` copies."""
_WHERE_STATED = ("buckets", "gathers", "forward_only")


def recognises(content: bytes) -> bool:
    """Return whether a file is such JSON, an object or a bare list of events, or an export of Nsight Systems."""
    is_list = content.lstrip().startswith(b"[") and b'"ph"' in content
    return is_list or b'"traceEvents"' in content or nsight.recognises(content)


# Writing


def dumps(schedule: Schedule, profile: Profile | None = None) -> Iterator[str]:
    """Yield the text of the file in parts.

    Raises:
        ScheduleError: the schedule deadlocks, its metadata is not JSON, or a time is too long for nanoseconds.
    """
    profile = profile or Profile()
    if schedule.buckets > 1:
        schedule = lower(schedule)  # otherwise the parts of a W would share one position
    lowered, origin = lower_with_origin(schedule)
    timeline = timeline_of(lowered, profile)
    if timeline.makespan > chrome.MOST_SECONDS:
        raise ScheduleError(
            f"a makespan of {timeline.makespan:g} cannot be written to the nanosecond, one unit being one second:"
            f" use times that add up to at most {chrome.MOST_SECONDS:.0f}"
        )
    native_file = json.loads("".join(native.encode(schedule.native_head(), ())))
    other = {
        "format": FORMAT,
        "version": VERSION,
        "clock": "one unit of the profile is one second",
        "microseconds_per_unit": 1_000_000,
        "makespan": timeline.makespan,
        "period": timeline.period,
        **{key: native_file[key] for key in (*_HEAD, *_WHERE_STATED) if key in native_file},
        "instructions": np.diff(schedule.columns.offsets).tolist(),
        "profile": profile.to_json(),
    }
    return chrome.document(other, _events(schedule, timeline, origin))


def _events(schedule: Schedule, timeline: Timeline, origin: np.ndarray) -> Iterator[chrome.Event]:
    lowered, shape = timeline.schedule, timeline.schedule.shape
    c, offsets = lowered.columns, lowered.columns.offsets.tolist()
    pipeline = c.worker // shape.ranks
    rerouted = away_from(c, pipeline)
    start, end = chrome.nanoseconds(timeline.start), chrome.nanoseconds(timeline.end)
    track = chrome.track_of(c)
    transfers = _transfers(timeline.dependencies.sends).tolist()
    detours = _detours(lowered, rerouted, max(transfers, default=0))
    (unit, held), names = _held(timeline, start, end), lowered.words()
    categories = [re.sub("(?<!^)(?=[A-Z])", "_", cls.__name__).lower() for cls in KIND_CLASSES]
    position = np.where(origin < 0, -1, origin - schedule.columns.offsets[c.worker])
    first_stages = [min(stages, default=shape.stages) for stages in lowered.placement]
    by_stage = sorted(range(shape.worker_count), key=lambda w: (w // shape.ranks, first_stages[w]))
    for place, w in enumerate(by_stage):
        pid, worker = w + 1, shape.worker_at(w)
        text = str(worker)
        rows = slice(offsets[w], offsets[w + 1])
        tids, head = chrome.process_head(pid, _title(lowered, worker), place, track[rows], start[rows], end[rows])
        yield from head
        columns = (c.kind, c.stage, c.pipeline, c.index, rerouted, position, start, end)
        lists = (column[rows].tolist() for column in columns)
        for row, name, tid, kind, stage, home, index, away, at, begin, finish in zip(
            range(rows.start, rows.stop), names[rows], tids, *lists, strict=True
        ):
            arguments: dict[str, Any] = {"worker": text, "position": at if at >= 0 else None, "stage": stage}
            if home >= 0:
                arguments["home"], arguments["micro_batch"], arguments["rerouted"] = home, index, away
            yield chrome.slice_event(name, categories[kind], pid, tid, begin, finish, arguments)
            if flow := transfers[row]:
                yield chrome.flow_event(_END[kind][0], flow, _END[kind][1], "transfer", pid, tid, begin)
            for phase, flow in detours.get(row, ()):
                yield chrome.flow_event(phase, flow, "re-routed activation", "re-routed", pid, tid, begin)
        for moment, value in held(rows):
            yield chrome.counter_event("activations held", pid, moment, unit, value)


_END = {
    end.kind: (phase, value.name.lower().replace("_", " "))
    for value, ends in CARRIERS.items()
    for phase, end in zip("sf", ends, strict=True)
}
"""Kind of a transfer -> phase and name of its end of the arrow."""


def _title(schedule: Schedule, worker: Worker) -> str:
    stages = schedule.stages_of(worker)
    hosted = f"stage{'s' * (len(stages) > 1)} {' '.join(map(str, stages))}" if stages else "no stage"
    return f"worker {worker}, {'failed' if worker in schedule.failed else hosted}"


def _transfers(sends: Rows) -> Rows:
    receives = np.flatnonzero(sends >= 0)
    arrow = np.zeros(len(sends), dtype=np.int64)
    arrow[receives] = arrow[sends[receives]] = np.arange(1, len(receives) + 1)
    return arrow


def _detours(lowered: Schedule, rerouted: np.ndarray, last: int) -> dict[int, list[tuple[str, int]]]:
    """Return row -> (phase, number) of arrows between consecutive forwards, one re-routed; numbers follow `last`."""
    ends: dict[int, list[tuple[str, int]]] = {}
    if not rerouted.any():
        return ends
    compute = np.flatnonzero(~is_kind(lowered.columns.kind, Transfer))
    columns = lowered.columns.take(compute)
    graph = dependencies(replace(lowered, columns=columns))
    data = graph.cause == Cause.DATA
    source, target = graph.source[data], graph.target[data]
    forwards = is_kind(columns.kind, (Forward, OverlappedPair))
    onward = forwards[source] & forwards[target] & (columns.stage[source] + 1 == columns.stage[target])
    onward &= (columns.pipeline[source] == columns.pipeline[target]) & (columns.index[source] == columns.index[target])
    onward &= rerouted[compute[source]] | rerouted[compute[target]]
    pairs = zip(compute[source[onward]].tolist(), compute[target[onward]].tolist(), strict=True)
    for number, (produced, consumed) in enumerate(pairs, last + 1):
        ends.setdefault(produced, []).append(("s", number))
        ends.setdefault(consumed, []).append(("f", number))
    return ends


def _held(
    timeline: Timeline, start: chrome.Nanoseconds, end: chrome.Nanoseconds
) -> tuple[str, Callable[[slice], Iterator[tuple[int, float]]]]:
    weights = np.array(timeline.profile.per_stage("activation", timeline.schedule.shape.stages))
    added, freed = activation_changes(timeline.schedule, timeline.profile, in_bytes=True)

    def steps(rows: slice) -> Iterator[tuple[int, float]]:
        moments = np.concatenate([start[rows], end[rows]])
        change = np.concatenate([added[rows], -freed[rows]])
        moments, change = moments[change != 0], change[change != 0]
        distinct, place = np.unique(moments, return_inverse=True)
        total = np.round(np.cumsum(np.bincount(place, weights=change, minlength=len(distinct))), 6) + 0.0
        return zip(distinct.tolist(), total.tolist(), strict=True)

    return "bytes" if (weights != 1).any() else "chunks", steps


# Reading


def loads(content: bytes, name: str = "trace") -> Schedule:
    """Parse a schedule from any of the three kinds of files, zipped or not. Logs omissions; raises as `load_input`."""
    unpacked = unpack(content, name)
    return load_input(unpacked.text, name, unpacked.most).order()


def load_input(content: bytes, name: str, most: int = MOST_INSTRUCTIONS) -> ScheduleInput:
    """Parse one file of any of the three kinds, or an export of Nsight Systems; `name` begins every error message.

    Raises:
        ScheduleError: the file is of another kind, an event is incomplete (names it), or there are more than `most`
            instructions.
    """
    if nsight.recognises(content):
        content = nsight.chrome_events(content, name)
    other = {} if content.lstrip().startswith(b"[") else chrome.head(content, name).otherData
    return _READERS.get(bytes(other.get("format", b"")), profiler_trace.loads)(content, name, most)


def load_directory(path: Path) -> ScheduleInput:
    """Read a directory with one trace, or with one trace of torch's profiler per rank; raises as `load_input`."""
    files = _traces_in(path)
    if not files:
        folders = [folder for folder in _folders_in(path) if _traces_in(folder)]
        if folders:
            more = f" and {len(folders) - _NAMED_FOLDERS} more" if len(folders) > _NAMED_FOLDERS else ""
            named = ", ".join(map(str, folders[:_NAMED_FOLDERS]))
            raise ScheduleError(f"{path}: is a directory that contains no Chrome trace itself: give {named}{more}")
        raise ScheduleError(f"{path}: is a directory without any Chrome trace (.json or .json.gz with traceEvents)")
    if len(files) == 1:
        unpacked = unpack(read_whole(files[0], ScheduleError), str(files[0]))
        return load_input(unpacked.text, str(files[0]), unpacked.most)
    traces = ((str(file), unpack(read_whole(file, ScheduleError), str(file)).text) for file in files)
    size = sum(file.stat().st_size for file in files)
    return profiler_trace.load_ranks(traces, str(path), most_instructions(size))


def _traces_in(path: Path) -> list[Path]:
    files = [file for file in sorted(path.iterdir()) if file.name.endswith((".json", ".json.gz")) and file.is_file()]
    contents = ((file, read_whole(file, ScheduleError)) for file in files)
    return [file for file, content in contents if is_gzip(content) or recognises(content)]


def _folders_in(path: Path) -> list[Path]:
    below = (folder for pattern in ("*/", "*/*/") for folder in sorted(path.glob(pattern)) if not folder.is_symlink())
    return list(islice(below, _MOST_FOLDERS))


_Number = Annotated[int, msgspec.Meta(ge=0)]


class _Place(msgspec.Struct, frozen=True):
    worker: str
    position: _Number | None


class _Slice(msgspec.Struct, frozen=True, tag_field="ph", tag="X"):
    name: str
    ts: chrome.Moment
    dur: chrome.Duration
    args: _Place


class _Counter(msgspec.Struct, frozen=True, tag_field="ph", tag="C"):
    pass


class _FlowStart(msgspec.Struct, frozen=True, tag_field="ph", tag="s"):
    pass


class _FlowEnd(msgspec.Struct, frozen=True, tag_field="ph", tag="f"):
    pass


def _from_timeline(content: bytes, name: str, most: int = MOST_INSTRUCTIONS) -> ScheduleInput:
    other = chrome.head(content, name).otherData
    version: object = chrome.decode(bytes(other.get("version", b"null")), Any, f"{name}: otherData: version")
    if version != VERSION:
        raise ScheduleError(f"{name}: version {version!r} is not known; this recycle reads version {VERSION}")
    missing = [key for key in (*_HEAD, "instructions") if key not in other]
    if missing:
        raise ScheduleError(f"{name}: otherData: {missing[0]} is missing")
    head: dict[str, Any] = {"format": native.FORMAT, "version": native.VERSION, "programs": {}}
    head |= {key: other[key] for key in (*_HEAD, *_WHERE_STATED) if key in other}
    empty = Schedule.loads(msgspec.json.encode(head), f"{name}: otherData", most)
    counts = chrome.decode(bytes(other["instructions"]), list[_Number], f"{name}: otherData: instructions")
    programs = _placed(empty.shape, counts, content, name, most)
    with errors_as(ScheduleError, name):
        schedule = replace(empty, columns=Schedule.build(empty.shape, programs).columns)
        schedule.require_small(most)
    return ScheduleInput(name, schedule, _stated_profile(other, schedule.shape))


def _stated_profile(other: Mapping[str, msgspec.Raw], shape: Shape) -> Profile | None:
    """Return the profile of a timeline; None if it does not fit the shape, since the order is complete without it."""
    try:
        profile = Profile.from_bytes(bytes(other.get("profile", b"null")), "profile")
        profile.require(shape)
    except JobError:
        return None
    return profile


def _placed(shape: Shape, counts: list[int], content: bytes, name: str, most: int) -> dict[Worker, list[Instruction]]:
    events = chrome.decode(
        content, chrome.Events[_Slice | chrome.Title | _Counter | _FlowStart | _FlowEnd], name
    ).traceEvents
    require_few(sum(isinstance(event, _Slice) for event in events), f"{name}: ", most)
    if len(counts) != shape.worker_count or max(counts) > len(events):
        raise ScheduleError(
            f"{name}: otherData: instructions must list the number of instructions of each of the"
            f" {shape.worker_count} workers, at most the number of events ({len(events)})"
        )
    placed: list[dict[int, Instruction]] = [{} for _ in counts]
    for number, event in enumerate(events):
        if not isinstance(event, _Slice) or event.args.position is None:
            continue
        try:
            worker, position = shape.require(Worker.parse(event.args.worker), "worker"), event.args.position
            w = shape.worker_index(worker)
            program = placed[w]
            if position >= counts[w]:
                raise ScheduleError(f"position {position} of worker {worker}, which has {counts[w]} instructions")
            if position in program:
                raise ScheduleError(f"position {position} of worker {worker} occurs twice")
            program[position] = parse_instruction(event.name, shape.pipelines == 1)
        except (JobError, ScheduleError) as error:
            raise ScheduleError(f"{name}: traceEvents[{number}]: {error}") from None
    for worker, count, program in zip(shape.workers(), counts, placed, strict=True):
        if (absent := next((position for position in range(count) if position not in program), None)) is not None:
            raise ScheduleError(
                f"{name}: no event for position {absent} of worker {worker}, which has {count} instructions"
            )
    return {
        worker: [program[position] for position in range(len(program))]
        for worker, program in zip(shape.workers(), placed, strict=True)
    }


_READERS = {
    f'"{FORMAT}"'.encode(): _from_timeline,
    f'"{run_trace.FORMAT}"'.encode(): lambda content, name, _: run_trace.load_input(content, name),
}
