"""A run directory that the agents of several nodes write to, on a file system that they share."""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import json
import os
import time
from pathlib import Path
from typing import Any

from recycle.errors import JobError
from recycle.exec.launch.run_directory import RunDirectory
from recycle.files import write_whole
from recycle.job import Job

_TAIL_BYTES = 1 << 20
"""More than the longest line of metrics, which lists the times of all workers."""


class SharedRunDirectory(RunDirectory):
    """Opens the directory of a run: fresh, or one that another agent of the same run has opened.

    Args:
        path: made with its parents when missing.
        job: written to `job.toml`.
        run: identity of the run.
        started: seconds since the epoch when it started.

    Raises:
        JobError: the directory holds another run, or cannot be written.
    """

    def __init__(self, path: str | Path, job: Job, run: str, started: float) -> None:
        self.path = Path(path)
        self.warn = lambda message: None
        self._warned = False
        if (self.path / "metrics.jsonl").exists() and self._identity() != run:
            raise JobError(f"{self.path}: holds another run; choose another --run directory or remove it")
        self.started = time.monotonic() - (time.time() - started)
        try:
            for folder in (self.path, self.plans, self.logs):
                folder.mkdir(parents=True, exist_ok=True)
            write_whole(self.path / "job.toml", job.to_toml())
            write_whole(self.path / "run", f"{run}\n")
            flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
            self._files = {name: os.open(self.path / f"{name}.jsonl", flags, 0o644) for name in ("metrics", "events")}
        except OSError as error:
            raise JobError(f"{self.path}: cannot be written ({error.strerror})") from None

    def metric(self, line: dict[str, Any]) -> bool:
        """Write a step's line unless it is there; whether it was not. A lock keeps other agents out meanwhile."""
        metrics = self._files["metrics"]
        fcntl.lockf(metrics, fcntl.LOCK_EX)
        try:
            if self._last_step() >= line["step"]:
                return False
            self._append("metrics", line)
            return True
        finally:
            fcntl.lockf(metrics, fcntl.LOCK_UN)

    def rewind(self, step: int) -> None:
        """Training goes back to the state after `step`: forget the metrics of later steps."""
        metrics = self._files["metrics"]
        fcntl.lockf(metrics, fcntl.LOCK_EX)
        try:
            with (self.path / "metrics.jsonl").open("rb") as lines:
                # Within the block, because closing any descriptor of a file gives up the locks on all of them.
                kept = itertools.takewhile(lambda line: json.loads(line)["step"] <= step, lines)
                os.ftruncate(metrics, sum(map(len, kept)))
        finally:
            fcntl.lockf(metrics, fcntl.LOCK_UN)

    def event(self, kind: str, **details: Any) -> dict[str, Any]:
        event = {"time": round(self.now(), 6), "kind": kind, **details}
        self._append("events", event)
        return event

    def _append(self, name: str, line: dict[str, Any]) -> None:
        try:
            os.write(self._files[name], json.dumps(line).encode() + b"\n")
        except OSError as error:
            self._warn_of(f"{name}.jsonl", error.strerror)

    def _last_step(self) -> int:
        metrics = self._files["metrics"]
        size = os.fstat(metrics).st_size
        lines = os.pread(metrics, _TAIL_BYTES, max(0, size - _TAIL_BYTES)).splitlines()
        return int(json.loads(lines[-1])["step"]) if lines else -1

    def _identity(self) -> str | None:
        with contextlib.suppress(OSError, UnicodeDecodeError):
            return (self.path / "run").read_text().strip()
        return None

    def close(self) -> None:
        """Close the files."""
        for descriptor in self._files.values():
            os.close(descriptor)
