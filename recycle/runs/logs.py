"""Trace logs of a run directory: executed instructions, appended during the run and readable at any time.

Every worker appends a line per iteration to `logs/k.r.trace.jsonl`; readers skip the partial line of a killed process.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec

from recycle.errors import JobError, RecycleError, ScheduleError
from recycle.files import read_whole, writing
from recycle.ir.formats import run_trace
from recycle.ir.instruction import Instruction
from recycle.ir.trace import Trace, TraceBuilder
from recycle.job.shape import Shape, Worker

TRACE, EVENTS, METRICS = "trace.json", "events.jsonl", "metrics.jsonl"
ADDRESS = "store"
"""Names of files in a run directory; `ADDRESS`, where to reach a run, is removed when the run ends."""
IMPORTED = "imported"
"""Kind of the event that states after which step a run with imported state begins."""
TRACE_LOG_SUFFIX = ".trace.jsonl"
MOST_MERGED_BYTES = 2**28
"""Maximum size of all logs to merge without gaps; `trace.json` takes six times as much."""
_PART_ROWS = 50_000
_MOST_LINE_BYTES = 2**28
_DIGEST = re.compile("[0-9a-f]{8,64}")


_Seconds = Annotated[float, msgspec.Meta(ge=-1e9, le=1e9)]
"""Seconds since the run's start, at most 30 years: pictures overflow on unbounded numbers."""


class LoggedIteration(msgspec.Struct, frozen=True):
    step: run_trace.Count
    generation: run_trace.Count
    role: str
    instructions: list[tuple[str, _Seconds, _Seconds]]
    evaluation: run_trace.Count | None = None


def plan_file(folder: Path, digest: object) -> Path:
    """Return the path of the plan with a content hash in a run's folder of plans.

    Raises:
        RecycleError: `digest` is not a hash; a path in its place could name a file elsewhere.
    """
    if not isinstance(digest, str) or not _DIGEST.fullmatch(digest):
        raise RecycleError(f"{folder}: {digest!r} is not the hash of a plan")
    return folder / f"{digest}.json"


def log_path(run_dir: str | Path, worker: Worker) -> Path:
    return Path(run_dir) / "logs" / f"{worker}{TRACE_LOG_SUFFIX}"


def append_iteration(
    path: str | Path,
    step: int,
    generation: int,
    role: Worker | str,
    instructions: Iterable[tuple[Instruction | str, float, float]],
    batch: int | None = None,
) -> int:
    """Append one executed iteration, or one evaluation batch, to a process's trace log as one line.

    Args:
        role: position in the plan that the process had.
        instructions: (instruction or its text, start, end) in execution order, in seconds since the run's start.
        batch: batch of the evaluation after the step; None for the iteration itself.

    Returns the number of bytes appended. Raises RecycleError if the file cannot be written.
    """
    rows = [[str(what), round(float(start), 9), round(float(end), 9)] for what, start, end in instructions]
    iteration = {"step": step, "generation": generation, "role": str(role), "instructions": rows}
    if batch is not None:
        iteration["evaluation"] = batch
    path, line = Path(path), msgspec.json.encode(iteration)
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab+") as stream:
            # A killed process may leave a line without a newline; its successor must not continue that line.
            if stream.seek(0, os.SEEK_END) and stream.seek(-1, os.SEEK_END) >= 0 and stream.read(1) != b"\n":
                line = b"\n" + line
            return stream.write(line + b"\n")


def read_logs(run_dir: str | Path, shape: Shape) -> Trace:
    """Read the trace of a run directory from `logs/*.trace.jsonl` and `events.jsonl`, also during the run.

    Raises:
        RecycleError: a complete line is invalid; the message names file and line.
    """
    builder = TraceBuilder(shape)
    for path in trace_logs(run_dir):
        for rows in _iterations(LineTail(path), shape):
            _add(builder, *rows)
    return builder.build(event for _, event in read_lines(Path(run_dir) / EVENTS))


def new_iterations(tail: LineTail, shape: Shape) -> Iterator[LoggedIteration]:
    """Iterate over the iterations of one trace log that were appended since the last call. Raises RecycleError."""
    return (iteration for *_, iteration in _iterations(tail, shape))


class LineTail:
    """A file of JSON lines that may grow; every call of `objects` continues after the last complete line.

    Attributes:
        path: the file; one that does not exist has no lines.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._end, self._number = 0, 0
        self._last = b""

    @property
    def is_replaced(self) -> bool:
        """Whether the file no longer has the last line that was read: it was shortened or replaced."""
        try:
            with self.path.open("rb") as stream:
                stream.seek(self._end - len(self._last))
                return stream.read(len(self._last)) != self._last
        except OSError:
            return bool(self._last)

    def objects(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yield (line number from 1, object), without lines that are not a JSON object.

        Raises:
            RecycleError: the file cannot be read.
        """
        if not self.path.exists():
            return
        if not self.path.is_file():
            raise RecycleError(f"{self.path}: cannot be read (not a regular file)")
        try:
            with self.path.open("rb") as stream:
                stream.seek(self._end)
                while line := stream.readline(_MOST_LINE_BYTES):
                    entry = decode_line(line)
                    if entry is None and not line.endswith(b"\n") and len(line) < _MOST_LINE_BYTES:
                        return
                    self._end, self._number, self._last = self._end + len(line), self._number + 1, line
                    if entry is not None:
                        yield self._number, entry
        except OSError as error:
            raise RecycleError(f"{self.path}: cannot be read ({error.strerror})") from None


_Logged = tuple[Path, Worker, int, "LoggedIteration"]


def trace_logs(run_dir: str | Path) -> list[Path]:
    return sorted((Path(run_dir) / "logs").glob(f"*{TRACE_LOG_SUFFIX}"))


def _iterations(tail: LineTail, shape: Shape) -> Iterator[_Logged]:
    path = tail.path
    process = shape.require(Worker.parse(path.name.removesuffix(TRACE_LOG_SUFFIX)), str(path))
    for number, entry in tail.objects():
        try:
            yield path, process, number, msgspec.convert(entry, LoggedIteration, strict=False)
        except msgspec.ValidationError as error:
            raise RecycleError(f"{path}: line {number}: {error}") from None


def _add(builder: TraceBuilder, path: Path, process: Worker, number: int, iteration: LoggedIteration) -> None:
    try:
        role = builder.shape.require(Worker.parse(iteration.role), "role")
        for text, start, end in iteration.instructions:
            builder.add(process, role, iteration.generation, iteration.step, text, start, end, iteration.evaluation)
    except (JobError, ScheduleError) as error:
        raise RecycleError(f"{path}: line {number}: {error}") from None


def read_lines(path: str | Path) -> list[tuple[int, dict[str, Any]]]:
    """Return (line number from 1, object) of the complete lines of a `.jsonl` file; [] if the file does not exist.

    Lines that are not a JSON object are skipped: they were cut short when their process was killed.
    """
    if not Path(path).exists():
        return []
    content = read_whole(path, RecycleError, run_trace.MOST_BYTES)
    decoded = ((number, decode_line(line)) for number, line in enumerate(content.split(b"\n"), start=1))
    return [(number, entry) for number, entry in decoded if entry is not None]


class _Event(msgspec.Struct):
    kind: str
    time: float
    step: int = 0
    generation: int = 0
    count: int = 0


_KEYS = {"generation": {"generation", "step"}, "checkpoint": {"step"}, "undone": {"step", "count"}}
"""Kind of event -> keys without which it says nothing."""


def is_event(entry: Mapping[str, Any]) -> bool:
    """Return whether an object of `events.jsonl` is an event; others were damaged."""
    try:
        event = msgspec.convert(entry, _Event)
    except msgspec.ValidationError:
        return False
    return _KEYS.get(event.kind, set()) <= entry.keys()


def decode_line(line: bytes) -> dict[str, Any] | None:
    """Return the JSON object of a line; None if it is not one."""
    try:
        return msgspec.json.decode(line, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def merge_logs(run_dir: str | Path, shape: Shape) -> int:
    """Write `trace.json` from the logs of a run that has ended, in little memory.

    Of logs larger than `MOST_MERGED_BYTES` together every n-th step is kept; return n. Raises RecycleError as
    `read_logs`.
    """
    logs = trace_logs(run_dir)
    every = max(1, -(-sum(path.stat().st_size for path in logs) // MOST_MERGED_BYTES))
    events = (event for _, event in read_lines(Path(run_dir) / EVENTS))
    run_trace.write_parts(_parts(logs, shape, every), shape, events, Path(run_dir) / TRACE)
    return every


def _parts(logs: Iterable[Path], shape: Shape, every: int) -> Iterator[Trace]:
    for path in logs:
        builder = TraceBuilder(shape)
        for rows in _iterations(LineTail(path), shape):
            if rows[3].step % every == 0:
                _add(builder, *rows)
            if len(builder.rows) >= _PART_ROWS:
                yield builder.build(())
                builder = TraceBuilder(shape)
        if builder.rows:
            yield builder.build(())


def load_trace(run_dir: str | Path, shape: Shape) -> Trace:
    """Read the trace of a run: `trace.json`, or the logs so far if it does not exist.

    Raises RecycleError if a file cannot be read, or is invalid.
    """
    merged = Path(run_dir) / TRACE
    return run_trace.read_trace(merged) if merged.exists() else read_logs(run_dir, shape)
