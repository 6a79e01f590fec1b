"""Trace: what really ran, and when. The executed counterpart of a Timeline, over all steps of a run.

While a run is live every worker process appends one line per iteration to its own `logs/k.r.trace.jsonl`
(`append_iteration`), and processes are killed at any byte, so a reader skips what is not a whole line. `merge` builds
the trace of a run directory; `write` and `read` keep it as Chrome trace JSON, which Perfetto opens too.

Lanes are processes, named by the position they started in; `role` is the position in the plan that a process played,
and the workers inside instructions (`@1.0`) are roles as well. Times are seconds since the start of the run on one
machine's `time.monotonic()`: traces of several machines are not aligned here.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np
import numpy.typing as npt

from recycle.errors import JobError, RecycleError, ScheduleError
from recycle.files import read_whole, write_whole
from recycle.ir import chrome
from recycle.ir.columns import Columns, Ints
from recycle.ir.graph import Floats
from recycle.ir.instruction import Instruction, Transfer, parse_instruction
from recycle.ir.schedule import Schedule, loop_placement
from recycle.shape import Shape, Worker

FORMAT, VERSION = "recycle-trace", 1
FILE_NAME = "trace.json"
LOG_SUFFIX = ".trace.jsonl"
MOST_BYTES = 2**32
"""Size of the largest trace or log that is read; a long run fills far more than a schedule."""
_Count = Annotated[int, msgspec.Meta(ge=-(2**31), lt=2**31)]


@dataclass(frozen=True, eq=False)
class Trace:
    """The instructions that the processes of a run executed, with their times.

    Attributes:
        shape: size of the job.
        columns: the instructions, a row each, grouped by process in the order of execution, over all steps.
        role: worker index in the plan that the process played, per row.
        generation, step: membership and iteration that the row belongs to. A repeated iteration has several
            generations; the last one is what counted.
        start, end: seconds since the start of the run, float64.
        events: the lines of `events.jsonl` (fault, detected, generation, recovered, rejoined, ...), in order.
    """

    shape: Shape
    columns: Columns
    role: Ints
    generation: Ints
    step: Ints
    start: Floats
    end: Floats
    events: tuple[Mapping[str, Any], ...] = ()

    def __len__(self) -> int:
        return len(self.columns)

    @property
    def process(self) -> Ints:
        """Worker index of the process, by the position it started in, per row."""
        return self.columns.worker

    @cached_property
    def processes(self) -> list[Worker]:
        """The processes that executed anything, by pipeline, then rank."""
        return [self.shape.worker_at(int(index)) for index in np.flatnonzero(np.diff(self.columns.offsets))]

    @cached_property
    def steps(self) -> list[int]:
        """The steps of which anything was executed, ascending."""
        return [int(step) for step in np.unique(self.step)]

    @cached_property
    def rerouted(self) -> npt.NDArray[np.bool_]:
        """Whether each row works on a micro-batch whose home is another pipeline than its role's."""
        return away_from(self.columns, self.role // self.shape.ranks)

    @cached_property
    def _executed(self) -> Schedule:
        return Schedule(self.shape, self.columns, loop_placement(self.shape))

    def instruction(self, row: int) -> Instruction:
        """The instruction of row `row`."""
        return self._executed.instruction(row)

    def generations_of(self, step: int) -> list[int]:
        """The generations that executed anything of `step`, ascending; the last is the one that counted."""
        return self._generations.get(step, [])

    @cached_property
    def _generations(self) -> dict[int, list[int]]:
        pairs = np.unique(np.stack([self.step, self.generation], axis=1), axis=0)
        found: dict[int, list[int]] = {}
        for step, generation in pairs.tolist():
            found.setdefault(step, []).append(generation)
        return found

    def period(self, first: int, last: int) -> float | None:
        """Median seconds from one of the steps `first` to `last` to the next, in the generations that counted.

        Between the first starts of a worker, over all workers: neighbouring stages may be in different steps. Of one
        step alone: from its first start to its last end. None when nothing of these steps was executed.
        """
        steps = np.array([step for step in self.steps if first <= step <= last], dtype=np.int64)
        counted = np.array([self.generations_of(step)[-1] for step in steps.tolist()], dtype=np.int64)
        if not len(steps):
            return None
        rows = np.flatnonzero((self.step >= first) & (self.step <= last))
        place = np.searchsorted(steps, self.step[rows])
        kept = self.generation[rows] == counted[place]
        rows, place = rows[kept], place[kept]
        if len(steps) == 1:
            return float(self.end[rows].max() - self.start[rows].min())
        begins = np.full((self.shape.worker_count, len(steps)), np.inf)
        np.minimum.at(begins, (self.process[rows], place), self.start[rows])
        both = np.isfinite(begins[:, 1:]) & np.isfinite(begins[:, :-1])
        return float(np.median(begins[:, 1:][both] - begins[:, :-1][both])) if both.any() else None

    def window(self, first: int, last: int, generation: int | None = None) -> Trace:
        """The rows of the steps `first` to `last` inclusive, of one generation only if it is given."""
        keep = (self.step >= first) & (self.step <= last)
        if generation is not None:
            keep &= self.generation == generation
        rows = np.flatnonzero(keep)
        counts = np.bincount(self.process[rows], minlength=self.shape.worker_count)
        return Trace(
            self.shape,
            self.columns.take(rows, np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)),
            self.role[rows],
            self.generation[rows],
            self.step[rows],
            self.start[rows],
            self.end[rows],
            self.events,
        )


def away_from(columns: Columns, pipeline: Ints) -> npt.NDArray[np.bool_]:
    """Whether each row works on a micro-batch (of a pair: either) whose home is not the `pipeline` of that row."""
    homes = (columns.pipeline, columns.pipeline2)
    return np.asarray(sum(((home >= 0) & (home != pipeline) for home in homes), np.zeros(len(columns), np.bool_)))


class _Iteration(msgspec.Struct, frozen=True):
    """One line of a process's trace log."""

    step: _Count
    generation: _Count
    role: str
    instructions: list[tuple[str, float, float]]


def log_path(run_dir: str | Path, worker: Worker) -> Path:
    """Where the process that started as `worker` keeps its trace."""
    return Path(run_dir) / "logs" / f"{worker}{LOG_SUFFIX}"


def append_iteration(
    path: str | Path,
    step: int,
    generation: int,
    role: Worker | str,
    instructions: Iterable[tuple[Instruction | str, float, float]],
) -> None:
    """Add one executed iteration to a process's trace log, as one line.

    Args:
        path: the log, see `log_path`; made with its folder when missing.
        role: the position in the plan that the process played.
        instructions: (instruction or its text, start, end) in the order of execution, seconds since the run's start.

    Raises:
        RecycleError: the file cannot be written.
    """
    rows = [[str(what), round(float(start), 9), round(float(end), 9)] for what, start, end in instructions]
    line = {"step": step, "generation": generation, "role": str(role), "instructions": rows}
    _append_line(Path(path), msgspec.json.encode(line))


def _append_line(path: Path, line: bytes) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab+") as stream:
            # A process killed in the middle of a line leaves no newline; its successor must not continue that line.
            if stream.seek(0, os.SEEK_END) and stream.seek(-1, os.SEEK_END) >= 0 and stream.read(1) != b"\n":
                line = b"\n" + line
            stream.write(line + b"\n")
    except OSError as error:
        raise RecycleError(f"{path}: cannot be written ({error.strerror})") from None


def merge(run_dir: str | Path, shape: Shape) -> Trace:
    """The trace of a run directory, from `logs/*.trace.jsonl` and `events.jsonl`.

    Works on a live run. Lines that are not whole JSON are skipped: their process was killed, or is writing.

    Raises:
        RecycleError: a whole line does not say what it must; the message names file and line.
    """
    run_dir = Path(run_dir)
    builder = _Builder(shape)
    for path in sorted((run_dir / "logs").glob(f"*{LOG_SUFFIX}")):
        try:
            process = shape.require(Worker.parse(path.name.removesuffix(LOG_SUFFIX)), str(path))
        except JobError as error:
            raise RecycleError(str(error)) from None
        for number, line in read_lines(path):
            try:
                iteration = msgspec.convert(line, _Iteration, strict=False)
                role = shape.require(Worker.parse(iteration.role), "role")
                for text, start, end in iteration.instructions:
                    builder.add(process, role, iteration.generation, iteration.step, text, start, end)
            except (msgspec.ValidationError, JobError, ScheduleError) as error:
                raise RecycleError(f"{path}: line {number}: {error}") from None
    return builder.build(event for _, event in read_lines(run_dir / "events.jsonl"))


def read_lines(path: str | Path) -> list[tuple[int, dict[str, Any]]]:
    """(line number from 1, object) of the whole lines of a `.jsonl` file; none when there is no such file.

    A line that is not a JSON object is skipped: it was cut short when its process was killed.
    """
    if not Path(path).exists():
        return []
    content = read_whole(path, RecycleError, MOST_BYTES)
    lines = []
    for number, line in enumerate(content.split(b"\n"), start=1):
        try:
            lines.append((number, msgspec.json.decode(line, type=dict[str, Any])))
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            continue
    return lines


class _Builder:
    """Collects rows in any order of processes and turns them into the columns of a Trace."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self.codes: dict[str, int] = {}
        self.vocabulary: list[Instruction] = []
        self.rows: list[tuple[int, int, int, int, int]] = []
        self.times: list[tuple[float, float]] = []

    def add(
        self, process: Worker, role: Worker, generation: int, step: int, text: str, start: float, end: float
    ) -> None:
        """Add one executed instruction. Raises ScheduleError when `text` is none, JobError at a peer out of shape."""
        code = self.codes.get(text)
        if code is None:
            instruction = parse_instruction(text, self.shape.pipelines == 1)
            if isinstance(instruction, Transfer):
                self.shape.require(instruction.peer, text)
            code = self.codes[text] = len(self.vocabulary)
            self.vocabulary.append(instruction)
        index = self.shape.worker_index
        self.rows.append((index(process), index(role), generation, step, code))
        self.times.append((start, end))

    def build(self, events: Iterable[Mapping[str, Any]]) -> Trace:
        # Each text is parsed once; the rows then are copies of the rows of one program that holds every text once.
        parsed = Schedule.build(self.shape, {Worker(0, 0): self.vocabulary}).columns
        rows = np.array(self.rows, dtype=np.int64).reshape(-1, 5)
        times = np.array(self.times, dtype=np.float64).reshape(-1, 2)
        order = np.argsort(rows[:, 0], kind="stable")
        rows, times = rows[order], times[order]
        counts = np.bincount(rows[:, 0], minlength=self.shape.worker_count)
        offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
        role, generation, step = (rows[:, i].astype(np.int32) for i in (1, 2, 3))
        start, end = times[:, 0].copy(), times[:, 1].copy()
        return Trace(self.shape, parsed.take(rows[:, 4], offsets), role, generation, step, start, end, tuple(events))


def write(trace: Trace, path: str | Path) -> None:
    """Write Chrome trace JSON (see recycle.ir.chrome): `pid` is the worker's index + 1, `cat` the track."""
    shape = {name: getattr(trace.shape, name) for name in trace.shape.__slots__}
    other = {"format": FORMAT, "version": VERSION, "shape": shape, "clock": "seconds since run start"}
    write_whole(path, chrome.document(other, _chrome_events(trace)))


def _chrome_events(trace: Trace) -> Iterator[chrome.Event]:
    track = chrome.track_of(trace.columns)
    start, end = chrome.nanoseconds(trace.start), chrome.nanoseconds(trace.end)
    for w in np.flatnonzero(np.diff(trace.columns.offsets)).tolist():
        pid, worker = w + 1, trace.shape.worker_at(w)
        rows = slice(int(trace.columns.offsets[w]), int(trace.columns.offsets[w + 1]))
        tids, titles = chrome.thread_ids(track[rows], start[rows], end[rows])
        yield from chrome.process(pid, f"worker {worker}", w)
        yield from chrome.threads(pid, titles)
        for row, tid in enumerate(tids.tolist(), rows.start):
            home = int(trace.columns.pipeline[row])
            name, category = str(trace.instruction(row)), chrome.TRACKS[track[row]]
            arguments: dict[str, Any] = {
                "instruction": name,
                "worker": str(worker),
                "role": str(trace.shape.worker_at(trace.role[row])),
                "step": int(trace.step[row]),
                "generation": int(trace.generation[row]),
            }
            if home >= 0:
                arguments |= {"home": home, "rerouted": bool(trace.rerouted[row])}
            yield chrome.slice_event(name, category, pid, tid, int(start[row]), int(end[row]), arguments)
    for event in trace.events:
        seconds = event.get("time")
        moment = round(seconds * 1e9) if isinstance(seconds, int | float) else 0
        yield chrome.instant_event(str(event.get("kind", "event")), "event", moment, dict(event))


class _Arguments(msgspec.Struct, frozen=True):
    instruction: str
    worker: str
    role: str
    step: _Count
    generation: _Count


class _Slice(msgspec.Struct, frozen=True, tag_field="ph", tag="X"):
    ts: chrome.Moment
    dur: chrome.Duration
    args: _Arguments


class _Instant(msgspec.Struct, frozen=True, tag_field="ph", tag="i"):
    args: dict[str, Any] = {}


class _Title(msgspec.Struct, frozen=True, tag_field="ph", tag="M"):
    pass


class _Other(msgspec.Struct, frozen=True):
    format: str
    version: int
    shape: dict[str, int]


class _ChromeFile(msgspec.Struct, frozen=True):
    traceEvents: list[_Slice | _Instant | _Title]


def read(path: str | Path) -> Trace:
    """Read what `write` wrote; instructions, steps, generations, workers and events exactly, times to the nanosecond.

    Raises:
        RecycleError: the file cannot be read, is not a trace of recycle, or an event of it is not whole.
    """
    return loads(read_whole(path, RecycleError, MOST_BYTES), str(path))


def loads(content: bytes, name: str) -> Trace:
    """The trace in a file's content, as `read` says; `name` begins every error message. Raises ScheduleError."""
    try:
        other = msgspec.convert(chrome.decode(content, chrome.Head, name).otherData, _Other)
    except msgspec.ValidationError as error:
        raise ScheduleError(f"{name}: is not a trace that recycle wrote: otherData: {error}") from None
    if (other.format, other.version) != (FORMAT, VERSION):
        raise ScheduleError(f'{name}: otherData must say "format": "{FORMAT}", "version": {VERSION}')
    try:
        shape = Shape(**other.shape)
    except (TypeError, JobError) as error:
        raise ScheduleError(f"{name}: otherData.shape: {error}") from None
    builder, events = _Builder(shape), []
    for place, event in enumerate(chrome.decode(content, _ChromeFile, name).traceEvents):
        if isinstance(event, _Instant):
            events.append(event.args)
        if not isinstance(event, _Slice):
            continue
        try:
            process = shape.require(Worker.parse(event.args.worker), "worker")
            role = shape.require(Worker.parse(event.args.role), "role")
            first = round(event.ts * 1000)
            last = first + round(event.dur * 1000)
            text, generation, step = event.args.instruction, event.args.generation, event.args.step
            builder.add(process, role, generation, step, text, first / 1e9, last / 1e9)
        except (JobError, ScheduleError) as error:
            raise ScheduleError(f"{name}: traceEvents[{place}]: {error}") from None
    try:
        return builder.build(events)
    except ScheduleError as error:
        raise ScheduleError(f"{name}: {error}") from None


def load(run_dir: str | Path, shape: Shape) -> Trace:
    """The trace of a run: its `trace.json`, or while the run is live what its logs hold so far."""
    merged = Path(run_dir) / FILE_NAME
    return read(merged) if merged.exists() else merge(run_dir, shape)
