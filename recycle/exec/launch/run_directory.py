"""The run directory: what a run leaves behind, written as it happens, a whole line at a time.

`job.toml` as resolved, `metrics.jsonl` (a line per committed step), `events.jsonl`, `plans/`, `logs/`, `checkpoints/`
(with the files that came with the weights that the run starts from),
`trace.json`; `profiles/` where times drifted so far that plans were asked for with others. A run that is resumed goes
on in its directory; what belongs to another shape is put aside in `earlier/`. The agents of a run on several nodes have
one directory, on a file system that they share, where `run` holds the run's identity and `key` the secret by which they
know each other.

**A disk that may be full.** What cannot be written is kept in memory and written as soon as there is room, so that a
full disk costs nothing but memory as long as it lasts, and a file never holds a line twice, out of order, or a part of
one that is continued by another. Where several processes add to one file nothing is kept, because the others go on
meanwhile.
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
from recycle.exec.checkpoint.resume import Earlier, holds_steps
from recycle.exec.launch.contact import LOCK, in_use
from recycle.exec.protocol import RunInfo
from recycle.files import read_whole, require_text, write_whole
from recycle.job import Job
from recycle.job.manifest import HUGGING_FACE, carried_files
from recycle.runs.logs import EVENTS, TRACE, read_lines

MOST_BYTES = 1 << 26
"""Most text that waits for room; beyond it the newest lines are dropped."""
LINE_BYTES = 1 << 20
"""More than the longest line of metrics, which lists the times of all workers."""


class LineLog:
    """Opens a log for appending.

    Args:
        shared: whether other processes add to it too. Else the end of a line that was cut off in it is removed.

    Raises:
        OSError: it cannot be opened.
    """

    def __init__(self, path: Path, shared: bool = False) -> None:
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
        self._shared = shared
        self._waiting = b""
        if not shared:
            os.ftruncate(self._descriptor, path.read_bytes().rfind(b"\n") + 1)

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Keep the other processes that share the log out."""
        if not self._shared:
            yield
            return
        fcntl.lockf(self._descriptor, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.lockf(self._descriptor, fcntl.LOCK_UN)

    def append(self, line: str) -> str | None:
        """Add a line; returns why it has to wait, if it has to."""
        text = line.encode() + b"\n"
        if len(self._waiting) + len(text) <= MOST_BYTES:
            self._waiting += text
        return self.flush()

    def flush(self) -> str | None:
        """Write what waits; returns why not all of it could be written."""
        while self._waiting:
            try:
                self._waiting = self._waiting[os.write(self._descriptor, self._waiting) :]
            except OSError as error:
                if self._shared:
                    self._waiting = b""
                return error.strerror
        return None

    def lines(self) -> list[bytes]:
        """All lines, written or waiting, each with its end."""
        return (os.pread(self._descriptor, self._size, 0) + self._waiting).splitlines(keepends=True)

    def last(self) -> bytes:
        """The last line that is written; empty when there is none."""
        end = os.pread(self._descriptor, LINE_BYTES, max(0, self._size - LINE_BYTES))
        return end.splitlines()[-1] if end else b""

    @property
    def _size(self) -> int:
        return os.fstat(self._descriptor).st_size

    def rewind(self, count: int) -> None:
        """Keep the first `count` lines only, written or waiting."""
        size, kept = self._size, b"".join(self.lines()[:count])
        os.ftruncate(self._descriptor, min(len(kept), size))
        self._waiting = kept[size:]

    def close(self) -> None:
        """Give the file back."""
        self.flush()
        os.close(self._descriptor)


LATEST = "latest"
"""The link in a folder `runs` that leads to the run which was started last in it."""


class RunDirectory:
    """Opens a fresh run directory, or one to go on in. One process at a time has it open, or the agents of one run.

    Args:
        path: made with its parents when missing.
        job: written to `job.toml`.
        earlier: what it holds of this run; everything behind the checkpoint is removed from `metrics.jsonl`.
        shared: what the agents of the run have agreed on; None for a run without agents.
        lock: descriptor that holds the directory's lock, to be closed with the directory; taken here when left out.

    Raises:
        JobError: the directory holds another run already, is in use, or cannot be written.

    Attributes:
        plans, profiles, logs, checkpoints: folders in it.
        started: monotonic seconds from which all times of the run count.
        warn: is called once, with what cannot be written while the run goes on.
        events: all lines so far, those that wait for room on the disk included; not kept by agents.
        resumes: the agents of the run go on from what the directory holds.
    """

    def __init__(
        self,
        path: str | Path,
        job: Job,
        earlier: Earlier | None = None,
        shared: RunInfo | None = None,
        lock: int | None = None,
    ) -> None:
        self.path = Path(path)
        names = "plans", "profiles", "logs", "checkpoints"
        self.plans, self.profiles, self.logs, self.checkpoints = (self.path / name for name in names)
        self.warn: Callable[[str], None] = lambda message: None
        self._warned, self._is_shared = False, shared is not None
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
                self._put_aside(earlier, job)
            for folder in (self.plans, self.logs):
                folder.mkdir(exist_ok=True)
            write_whole(self.path / "job.toml", job.to_toml())
            if job.model.weights is not None:
                self._keep_beside_weights(Path(job.model.weights))
            if shared is not None:
                write_whole(self.path / "run", f"{shared.identity}\n")
            else:
                (self.path / "run").unlink(missing_ok=True)  # of agents, whose run goes on without them
            self._point_latest_here()
            self._metrics = LineLog(self.path / "metrics.jsonl", self._is_shared)
            self._events = LineLog(self.path / "events.jsonl", self._is_shared)
            if earlier is not None:
                self._metrics.rewind(len(earlier.metrics))
        except OSError as error:
            raise JobError(f"{self.path}: cannot be written ({error.strerror})") from None

    def _require_unused(self, shared: RunInfo | None) -> None:
        if shared is None:
            if (self.path / "metrics.jsonl").exists():
                raise JobError(f"{self.path}: holds a run already; choose another --run directory or remove it")
        elif holds_steps(self.path) and self._identity() != shared.identity:
            raise JobError(
                f"{self.path}: holds another run than etcd; to go on with it, start all agents with --resume and"
                " an --id that etcd does not have, else choose another --run directory or remove it"
            )

    def _take(self, shared: RunInfo | None) -> int:
        descriptor = lock_directory(self.path, fcntl.LOCK_EX if shared is None else fcntl.LOCK_SH)
        if descriptor is None:
            raise in_use(self.path)
        return descriptor

    def _point_latest_here(self) -> None:
        """Make `runs/latest` lead to a run directory in a folder `runs`, unless a file or folder has that name."""
        latest = self.path.parent / LATEST
        if self.path.parent.name != "runs" or self.path == latest or (latest.exists() and not latest.is_symlink()):
            return
        scratch = latest.with_name(f".{LATEST}.{secrets.token_hex(4)}")
        with contextlib.suppress(OSError):  # a file system without links is no reason not to train
            scratch.symlink_to(self.path.name)
            os.replace(scratch, latest)

    def _keep_beside_weights(self, checkpoint: Path) -> None:
        """Keep what came with the weights that the run starts from, so that its checkpoints can be exported with it."""
        if (source := carried_files(checkpoint)) is None:
            return
        beside = self.checkpoints / HUGGING_FACE
        beside.mkdir(parents=True, exist_ok=True)
        for file in source.iterdir():
            write_whole(beside / file.name, read_whole(file, JobError))

    def _identity(self) -> str | None:
        with contextlib.suppress(OSError, UnicodeDecodeError):
            return (self.path / "run").read_text().strip()
        return None

    def _put_aside(self, earlier: Earlier, job: Job) -> None:
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

    def now(self) -> float:
        """Seconds since the run started; of a resumed one, those of its earlier parts included."""
        return time.monotonic() - self.started

    def metric(self, line: dict[str, Any]) -> bool:
        """Write a step's line of metrics unless another agent has written it; whether it had not."""
        with self._metrics.locked():
            last = self._metrics.last() if self._is_shared else b""
            if last and _step(last) >= line["step"]:
                return False
            self._write("metrics.jsonl", self._metrics, line)
        return True

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """All lines of metrics so far, those that wait for room on the disk included; read anew each time."""
        return [json.loads(line) for line in self._metrics.lines()]

    def has_metrics_of(self, step: int) -> bool:
        """Whether this step has its line of metrics."""
        with self._metrics.locked():
            return any(_step(line) == step for line in reversed(self._metrics.lines()))

    def event(self, kind: str, **details: Any) -> dict[str, Any]:
        """Write an event with the time it is now; returns it."""
        event = {"time": round(self.now(), 6), "kind": kind, **details}
        self._write("events.jsonl", self._events, event)
        if not self._is_shared:
            self.events.append(event)
        return event

    def rewind(self, step: int) -> None:
        """Training goes back to the state after `step`: forget the metrics of later steps."""
        with self._metrics.locked():
            kept = itertools.takewhile(lambda line: _step(line) <= step, self._metrics.lines())
            self._metrics.rewind(sum(1 for _ in kept))

    def _write(self, name: str, log: LineLog, line: dict[str, Any]) -> None:
        why = log.append(json.dumps(line))
        if why is not None and not self._warned:
            self._warned = True
            self.warn(f"{self.path / name}: cannot be written ({why}); its lines are kept until there is room")

    def close(self) -> None:
        """Close the files, and let others have the directory."""
        self._metrics.close()
        self._events.close()
        if self._lock is not None:
            os.close(self._lock)


def lock_directory(path: Path, kind: int) -> int | None:
    """Lock a run directory by `fcntl.LOCK_EX` or `LOCK_SH`; the descriptor that holds the lock, None if others do.

    Raises OSError.
    """
    # 0600, because whoever can open it can lock it, and keep a run from starting.
    descriptor = os.open(path / LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return descriptor


def has_ended(path: str | Path, job: Job, steps: int) -> bool:
    """Whether the directory holds a run of this job that has ended after its last step. Raises RecycleError."""
    path = Path(path)
    written = path / "job.toml"
    if not written.is_file() or read_whole(written, JobError) != job.to_toml().encode():
        return False
    return any(e.get("kind") == "finished" and e.get("step") == steps - 1 for _, e in read_lines(path / EVENTS))


class _Line(msgspec.Struct):
    step: int


def _step(line: bytes) -> int:
    return msgspec.json.decode(line, type=_Line).step
