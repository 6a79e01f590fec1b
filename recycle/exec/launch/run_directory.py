"""The run directory: the files of a run, written as it happens, one whole line at a time.

`job.toml` as resolved, `metrics.jsonl` (a line per committed step), `events.jsonl`, `plans/`, `logs/`, `checkpoints/`
(with the files that came with the initial weights), `trace.json`; `profiles/` if plans were made for drifted times. A
resumed run continues in its directory; files of another shape are moved to `earlier/`. Agents on several nodes share a
directory on a shared file system: `run` holds the run's identity, and `key` the secret that authenticates the agents.

**Full disks.** Lines that cannot be written are kept in memory and written once there is room. A file never holds a
line twice, out of order, or joined to part of another. An agent that no longer leads forgets the lines that wait.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import json
import os
import secrets
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from recycle.errors import JobError
from recycle.exec.checkpoint.resume import ResumePoint, holds_steps
from recycle.exec.launch.run_address import LOCK, in_use_error, require_unused
from recycle.exec.protocol import RunInfo
from recycle.files import read_whole, require_text, write_if_changed, write_whole
from recycle.job import Job
from recycle.job.manifest import HUGGING_FACE, carried_files
from recycle.runs.logs import EVENTS, TRACE, read_lines

MOST_BYTES = 1 << 26
"""Most bytes that wait for room; beyond, the newest lines are dropped."""
LINE_BYTES = 1 << 20
"""Upper bound for a metrics line, which lists the times of all workers."""


class LineLog:
    """A log opened for appending, with whole lines only. Raises OSError.

    Args:
        shared: other processes may append to it; use it in `locked`.
    """

    def __init__(self, path: Path, shared: bool = False) -> None:
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
        self._shared = shared
        self._waiting = b""
        if not shared:
            self._cut_last_line()

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Lock the log against other processes that share it, and remove what one that was killed wrote of a line."""
        if not self._shared:
            yield
            return
        fcntl.lockf(self._descriptor, fcntl.LOCK_EX)
        try:
            self._cut_last_line()
            yield
        finally:
            fcntl.lockf(self._descriptor, fcntl.LOCK_UN)

    def _cut_last_line(self) -> None:
        size = self._size
        if size and os.pread(self._descriptor, 1, size - 1) != b"\n":
            os.ftruncate(self._descriptor, os.pread(self._descriptor, size, 0).rfind(b"\n") + 1)

    def append(self, line: str) -> str | None:
        """Append a line; return the reason if the line has to wait."""
        text = line.encode() + b"\n"
        if len(self._waiting) + len(text) <= MOST_BYTES:
            self._waiting += text
        return self.flush()

    def flush(self) -> str | None:
        """Write the lines that wait; return the reason if some still have to wait."""
        while self._waiting:
            begin, end, written = self._size, self._waiting.index(b"\n") + 1, 0
            try:
                while written < end:
                    written += os.write(self._descriptor, self._waiting[written:end])
            except OSError as error:
                os.ftruncate(self._descriptor, begin)
                return error.strerror
            self._waiting = self._waiting[end:]
        return None

    def forget_waiting(self) -> None:
        self._waiting = b""

    @property
    def waiting(self) -> int:
        """Number of lines that are not in the file yet."""
        return self._waiting.count(b"\n")

    def lines(self) -> list[bytes]:
        """Return all lines, written or waiting, with their line ends."""
        return (os.pread(self._descriptor, self._size, 0) + self._waiting).splitlines(keepends=True)

    def last(self) -> bytes:
        end = os.pread(self._descriptor, LINE_BYTES, max(0, self._size - LINE_BYTES))
        return end.splitlines()[-1] if end else b""

    @property
    def _size(self) -> int:
        return os.fstat(self._descriptor).st_size

    def rewind(self, count: int) -> None:
        """Keep only the first `count` lines, written or waiting."""
        size, kept = self._size, b"".join(self.lines()[:count])
        os.ftruncate(self._descriptor, min(len(kept), size))
        self._waiting = kept[size:]

    def close(self) -> None:
        """Flush and close the file."""
        self.flush()
        os.close(self._descriptor)


SLOW_SECONDS = 1.0
"""Seconds to write a line, after which the disk is slow."""
LATEST = "latest"
"""A link in the folder `runs` to the run that started last."""


def identity_of(path: Path) -> str | None:
    """Return the identity of the run that the agents of a directory agreed on; None without one."""
    with contextlib.suppress(OSError, UnicodeDecodeError):
        return (path / "run").read_text().strip()
    return None


class RunDirectory:
    """An open run directory, fresh or resumed. Only one process, or the agents of one run, can have it open.

    Args:
        earlier: the run's state in the directory; metrics after its checkpoint are removed.
        shared: what the agents of the run agreed on; None for a run without agents.
        lock: descriptor that holds the directory's lock, closed with the directory; None to take the lock here.

    Raises:
        JobError: the directory holds another run, is in use, or cannot be written.

    Attributes:
        started: monotonic seconds at the start of the run.
        warn: called once if a file cannot be written, and once if a line takes long.
        events: all events so far, also waiting ones; not kept for agents.
        resumes: the agents resume from the directory.
    """

    def __init__(
        self,
        path: str | Path,
        job: Job,
        earlier: ResumePoint | None = None,
        shared: RunInfo | None = None,
        lock: int | None = None,
    ) -> None:
        self.path = Path(path)
        names = "plans", "profiles", "logs", "checkpoints"
        self.plans, self.profiles, self.logs, self.checkpoints = (self.path / name for name in names)
        self.warn: Callable[[str], None] = lambda message: None
        self._warned = self._warned_of_slowness = False
        self._is_shared = shared is not None
        self.resumes = shared is not None and shared.resume
        require_text(self.path, JobError)
        ran = earlier.seconds if earlier is not None else time.time() - shared.started if shared is not None else 0.0
        self.started = time.monotonic() - ran
        self.events = list(earlier.events) if earlier is not None else []
        try:
            if earlier is None:
                self._require_unused(shared)
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = self._take(shared) if lock is None else lock
            if earlier is not None:
                self._archive_earlier(earlier, job)
            for folder in (self.plans, self.logs):
                folder.mkdir(exist_ok=True)
            write_if_changed(self.path / "job.toml", job.to_toml())
            if job.model.weights is not None:
                self._copy_carried_files(Path(job.model.weights))
            if shared is not None:
                write_if_changed(self.path / "run", f"{shared.identity}\n")
            else:
                (self.path / "run").unlink(missing_ok=True)  # a run of agents may continue without them
            self._point_latest_here()
            self._metrics = LineLog(self.path / "metrics.jsonl", self._is_shared)
            self._events = LineLog(self.path / "events.jsonl", self._is_shared)
            if earlier is not None:
                self._metrics.rewind(len(earlier.metrics))
        except OSError as error:
            raise JobError(f"{self.path}: cannot be written ({error.strerror})") from None

    def _require_unused(self, shared: RunInfo | None) -> None:
        if shared is None:
            require_unused(self.path)
            if (self.path / "metrics.jsonl").exists():
                raise JobError(f"{self.path}: holds a run already; choose another --run directory or remove it")
        elif holds_steps(self.path) and identity_of(self.path) != shared.identity:
            raise JobError(
                f"{self.path}: holds another run than etcd; to continue it, start all agents with --resume and"
                " an --id that etcd does not have, else choose another --run directory or remove it"
            )

    def _take(self, shared: RunInfo | None) -> int:
        descriptor = lock_directory(self.path, fcntl.LOCK_EX if shared is None else fcntl.LOCK_SH)
        if descriptor is None:
            raise in_use_error(self.path)
        return descriptor

    def _point_latest_here(self) -> None:
        latest = self.path.parent / LATEST
        if self.path.parent.name != "runs" or self.path == latest or (latest.exists() and not latest.is_symlink()):
            return
        scratch = latest.with_name(f".{LATEST}.{secrets.token_hex(4)}")
        with contextlib.suppress(OSError):  # a file system without links must not prevent training
            scratch.symlink_to(self.path.name)
            os.replace(scratch, latest)

    def _copy_carried_files(self, checkpoint: Path) -> None:
        if (source := carried_files(checkpoint)) is None:
            return
        target = self.checkpoints / HUGGING_FACE
        target.mkdir(parents=True, exist_ok=True)
        for file in source.iterdir():
            write_whole(target / file.name, read_whole(file, JobError))

    def adopt(self, shared: RunInfo) -> None:
        """Hold the run of `shared` instead."""
        self.started = time.monotonic() - (time.time() - shared.started)
        write_if_changed(self.path / "run", f"{shared.identity}\n")

    def _archive_earlier(self, earlier: ResumePoint, job: Job) -> None:
        """The merged trace is outdated; the logs stay, unless workers of another shape wrote them."""
        if earlier.shape == job.shape:
            with contextlib.suppress(FileNotFoundError):
                (self.path / TRACE).unlink()
            return
        aside = self.path / "earlier"
        aside.mkdir(exist_ok=True)
        aside = aside / str(len(list(aside.iterdir())))
        aside.mkdir()
        for name in ("logs", "job.toml", TRACE):
            with contextlib.suppress(FileNotFoundError):
                (self.path / name).rename(aside / name)

    def elapsed(self) -> float:
        """Seconds since the run started, including the earlier parts of a resumed run."""
        return time.monotonic() - self.started

    def metric(self, line: dict[str, Any]) -> bool:
        """Write a step's metrics line unless another agent has written it; return whether it was written."""
        with self._metrics.locked():
            last = self._metrics.last() if self._is_shared else b""
            if last and _step(last) >= line["step"]:
                return False
            self._write("metrics.jsonl", self._metrics, line)
        return True

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """All metrics lines so far, also waiting ones; read from the file each time."""
        return [json.loads(line) for line in self._metrics.lines()]

    def has_metrics_of(self, step: int) -> bool:
        with self._metrics.locked():
            return any(_step(line) == step for line in reversed(self._metrics.lines()))

    def event(self, kind: str, **details: Any) -> dict[str, Any]:
        event = {"time": round(self.elapsed(), 6), "kind": kind, **details}
        with self._events.locked():
            self._write("events.jsonl", self._events, event)
        if not self._is_shared:
            self.events.append(event)
        return event

    def rewind(self, step: int) -> None:
        """Remove the metrics of steps after `step`."""
        with self._metrics.locked():
            kept = itertools.takewhile(lambda line: _step(line) <= step, self._metrics.lines())
            self._metrics.rewind(sum(1 for _ in kept))

    def _write(self, name: str, log: LineLog, line: dict[str, Any]) -> None:
        began = time.monotonic()
        reason = log.append(json.dumps(line))
        seconds = time.monotonic() - began
        if reason is not None and not self._warned:
            self._warned = True
            self.warn(f"{self.path / name}: cannot be written ({reason}); its lines are kept until there is room")
        elif seconds > SLOW_SECONDS and not self._warned_of_slowness:
            self._warned_of_slowness = True
            self.warn(f"{self.path / name}: a line took {seconds:.1f} s to write; training waits for this disk")

    def warn_of_lost_lines(self) -> None:
        """Warn of the lines that still wait for room; call when the run has ended."""
        for name, log in (("metrics.jsonl", self._metrics), ("events.jsonl", self._events)):
            with log.locked():
                reason = log.flush()
            if reason is not None and log.waiting:
                self.warn(f"{self.path / name}: lacks the last {log.waiting} lines ({reason})")

    def forget_waiting(self) -> None:
        """Drop the lines that wait for room: from now on another agent may append."""
        for log in (self._metrics, self._events):
            log.forget_waiting()

    def close(self) -> None:
        """Close the files and release the lock."""
        self._metrics.close()
        self._events.close()
        if self._lock is not None:
            os.close(self._lock)


def lock_directory(path: Path, kind: int) -> int | None:
    """Lock a run directory (`fcntl.LOCK_EX` or `LOCK_SH`); return the descriptor, or None if locked. Raises OSError."""
    # 0600, because any user who can open the file can lock it, and keep a run from starting.
    descriptor = os.open(path / LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return descriptor


def has_ended(path: str | Path, job: Job, steps: int) -> bool:
    """Return whether the directory holds a run of this job that has ended after its last step. Raises RecycleError."""
    path = Path(path)
    written = path / "job.toml"
    if not written.is_file() or read_whole(written, JobError) != job.to_toml().encode():
        return False
    return any(e.get("kind") == "finished" and e.get("step") == steps - 1 for _, e in read_lines(path / EVENTS))


class _Line(msgspec.Struct):
    step: int


def _step(line: bytes) -> int:
    """The step of a metrics line; -1 if it is damaged."""
    try:
        return msgspec.json.decode(line, type=_Line).step
    except msgspec.MsgspecError:
        return -1
