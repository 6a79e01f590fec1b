"""What a run directory holds of the executed instructions: written while the run goes on, read by anyone.

Every worker process appends one line per iteration to its own `logs/k.r.trace.jsonl` (`append_iteration`). Processes
are killed at any byte, so a reader skips what is not a whole line. `merge_logs` writes the whole run's `trace.json`,
some iterations of one worker at a time; `load_trace` reads that file, or while there is none the logs.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from itertools import count
from pathlib import Path
from typing import Annotated, Any

import msgspec

from recycle.errors import JobError, RecycleError, ScheduleError
from recycle.files import read_whole
from recycle.ir.formats import run_trace
from recycle.ir.instruction import Instruction
from recycle.ir.trace import Trace, TraceBuilder
from recycle.job.shape import Shape, Worker

TRACE, EVENTS = "trace.json", "events.jsonl"
"""Names of a run directory's files."""
IMPORTED = "imported"
"""Kind of the event that says behind which step a run begins whose state was imported."""
TRACE_LOG_SUFFIX = ".trace.jsonl"
MOST_MERGED_BYTES = 2**28
"""Of all logs that are merged whole; as `trace.json` they have six times as many."""
_PART_ROWS = 50_000
_MOST_LINE_BYTES = 2**28
_DIGEST = re.compile("[0-9a-f]{8,64}")


_Seconds = Annotated[float, msgspec.Meta(ge=-1e9, le=1e9)]
"""Since the run's start, as far as the merged trace goes: 30 years. Numbers without bounds overflow in pictures."""


class LoggedIteration(msgspec.Struct, frozen=True):
    """One line of a process's trace log."""

    step: run_trace.Count
    generation: run_trace.Count
    role: str
    instructions: list[tuple[str, _Seconds, _Seconds]]
    evaluation: run_trace.Count | None = None


def plan_file(folder: Path, digest: object) -> Path:
    """Where the plan of this content hash lies in a run's folder of plans.

    Raises:
        RecycleError: it is not a hash. Whoever wrote the line that names it may mean a file elsewhere.
    """
    if not isinstance(digest, str) or not _DIGEST.fullmatch(digest):
        raise RecycleError(f"{folder}: {digest!r} is not the hash of a plan")
    return folder / f"{digest}.json"


def log_path(run_dir: str | Path, worker: Worker) -> Path:
    """Where the process that started as `worker` keeps its trace."""
    return Path(run_dir) / "logs" / f"{worker}{TRACE_LOG_SUFFIX}"


def append_iteration(
    path: str | Path,
    step: int,
    generation: int,
    role: Worker | str,
    instructions: Iterable[tuple[Instruction | str, float, float]],
    batch: int | None = None,
) -> int:
    """Add one executed iteration, or batch of an evaluation, to a process's trace log, as one line.

    Args:
        path: the log, see `log_path`; made with its folder when missing.
        role: the position in the plan that the process played.
        instructions: (instruction or its text, start, end) in the order of execution, seconds since the run's start.
        batch: of the evaluation that follows the step; None for the iteration itself.

    Returns:
        how many bytes were added.

    Raises:
        RecycleError: the file cannot be written.
    """
    rows = [[str(what), round(float(start), 9), round(float(end), 9)] for what, start, end in instructions]
    iteration = {"step": step, "generation": generation, "role": str(role), "instructions": rows}
    if batch is not None:
        iteration["evaluation"] = batch
    path, line = Path(path), msgspec.json.encode(iteration)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab+") as stream:
            # A process killed in the middle of a line leaves no newline; its successor must not continue that line.
            if stream.seek(0, os.SEEK_END) and stream.seek(-1, os.SEEK_END) >= 0 and stream.read(1) != b"\n":
                line = b"\n" + line
            return stream.write(line + b"\n")
    except OSError as error:
        raise RecycleError(f"{path}: cannot be written ({error.strerror})") from None


def read_logs(run_dir: str | Path, shape: Shape) -> Trace:
    """The trace of a run directory, from `logs/*.trace.jsonl` and `events.jsonl`; the run may still go on.

    Raises:
        RecycleError: a whole line does not say what it must; the message names file and line.
    """
    builder = TraceBuilder(shape)
    for path in _logs(run_dir):
        for rows in _iterations(path, shape):
            _add(builder, *rows)
    return builder.build(event for _, event in read_lines(Path(run_dir) / EVENTS))


def read_iterations(run_dir: str | Path, shape: Shape) -> Iterator[LoggedIteration]:
    """Every iteration, or batch of an evaluation, that a process has logged, process by process, in little memory.

    Raises:
        RecycleError: a whole line does not say what it must; the message names file and line.
    """
    for path in _logs(run_dir):
        for _, _, _, iteration in _iterations(path, shape):
            yield iteration


_Logged = tuple[Path, Worker, int, "LoggedIteration"]


def _logs(run_dir: str | Path) -> list[Path]:
    return sorted((Path(run_dir) / "logs").glob(f"*{TRACE_LOG_SUFFIX}"))


def _iterations(path: Path, shape: Shape) -> Iterator[_Logged]:
    """(log, process, number of the line, what it says) of each whole line of a log, one after the other."""
    process = shape.require(Worker.parse(path.name.removesuffix(TRACE_LOG_SUFFIX)), str(path))
    if not path.is_file():
        raise RecycleError(f"{path}: cannot be read (not a regular file)")
    try:
        with path.open("rb") as stream:
            for number in count(1):
                line = stream.readline(_MOST_LINE_BYTES)
                if not line:
                    return
                try:
                    said = msgspec.json.decode(line, type=dict[str, Any])
                except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                    continue
                try:
                    yield path, process, number, msgspec.convert(said, LoggedIteration, strict=False)
                except msgspec.ValidationError as error:
                    raise RecycleError(f"{path}: line {number}: {error}") from None
    except OSError as error:
        raise RecycleError(f"{path}: cannot be read ({error.strerror})") from None


def _add(builder: TraceBuilder, path: Path, process: Worker, number: int, iteration: LoggedIteration) -> None:
    try:
        role = builder.shape.require(Worker.parse(iteration.role), "role")
        for text, start, end in iteration.instructions:
            builder.add(process, role, iteration.generation, iteration.step, text, start, end, iteration.evaluation)
    except (JobError, ScheduleError) as error:
        raise RecycleError(f"{path}: line {number}: {error}") from None


def read_lines(path: str | Path) -> list[tuple[int, dict[str, Any]]]:
    """(line number from 1, object) of the whole lines of a `.jsonl` file; none when there is no such file.

    A line that is not a JSON object is skipped: it was cut short when its process was killed.
    """
    if not Path(path).exists():
        return []
    content = read_whole(path, RecycleError, run_trace.MOST_BYTES)
    lines = []
    for number, line in enumerate(content.split(b"\n"), start=1):
        try:
            lines.append((number, msgspec.json.decode(line, type=dict[str, Any])))
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            continue
    return lines


def merge_logs(run_dir: str | Path, shape: Shape, most_bytes: int = MOST_MERGED_BYTES) -> int:
    """Write `trace.json` from the logs of a run that has ended, in little memory.

    Args:
        most_bytes: of all logs together; of larger ones every so many iterations are taken, those of a step that the
            number divides.

    Returns:
        that number; 1 when all are.

    Raises:
        RecycleError: as `read_logs` does.
    """
    logs = _logs(run_dir)
    every = max(1, -(-sum(path.stat().st_size for path in logs) // most_bytes))
    events = (event for _, event in read_lines(Path(run_dir) / EVENTS))
    run_trace.write_parts(_parts(logs, shape, every), shape, events, Path(run_dir) / TRACE)
    return every


def _parts(logs: Iterable[Path], shape: Shape, every: int) -> Iterator[Trace]:
    """The logs, process by process, in traces of about `_PART_ROWS` instructions."""
    for path in logs:
        builder = TraceBuilder(shape)
        for rows in _iterations(path, shape):
            if rows[3].step % every == 0:
                _add(builder, *rows)
            if len(builder.rows) >= _PART_ROWS:
                yield builder.build(())
                builder = TraceBuilder(shape)
        if builder.rows:
            yield builder.build(())


def load_trace(run_dir: str | Path, shape: Shape) -> Trace:
    """The trace of a run: its `trace.json`, or while there is none what its logs hold so far.

    Raises:
        RecycleError: a file cannot be read, or says what no run writes.
    """
    merged = Path(run_dir) / TRACE
    return run_trace.read_trace(merged) if merged.exists() else read_logs(run_dir, shape)
