"""The run directory: what a run leaves behind, written as it happens, a whole line at a time.

`job.toml` as resolved, `metrics.jsonl` (a line per committed step), `events.jsonl`, `plans/`, `logs/`, `trace.json`.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import time
from pathlib import Path
from typing import IO, Any

from recycle.errors import JobError
from recycle.files import write_whole
from recycle.job import Job

_TAIL_BYTES = 4096
"""More than the longest line of metrics."""


class RunDirectory:
    """Opens a fresh run directory, or that of a run which several processes write to.

    Args:
        path: made with its parents when missing.
        job: written to `job.toml`.
        run: identity of a run that several processes write to; None for a run of this process alone.
        started: seconds since the epoch when that run started.

    Raises:
        JobError: the directory holds another run already, or cannot be written.

    Attributes:
        started: monotonic seconds from which all times of the run count.
    """

    def __init__(self, path: str | Path, job: Job, run: str | None = None, started: float | None = None) -> None:
        self.path = Path(path)
        if (self.path / "metrics.jsonl").exists() and (run is None or self._identity() != run):
            raise JobError(f"{self.path}: holds a run already; choose another --run directory or remove it")
        self.started = time.monotonic() - (0.0 if started is None else time.time() - started)
        try:
            for folder in (self.path, self.plans, self.logs):
                folder.mkdir(parents=True, exist_ok=True)
            write_whole(self.path / "job.toml", job.to_toml())
            if run is not None:
                write_whole(self.path / "run", f"{run}\n")
            self._metrics: IO[str] = (self.path / "metrics.jsonl").open("a+", buffering=1)
            self._events: IO[str] = (self.path / "events.jsonl").open("a", buffering=1)
        except OSError as error:
            raise JobError(f"{self.path}: cannot be written ({error.strerror})") from None

    @property
    def plans(self) -> Path:
        return self.path / "plans"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    def now(self) -> float:
        """Seconds since the run started."""
        return time.monotonic() - self.started

    def metric(self, line: dict[str, Any]) -> bool:
        """Write a step's line, unless it is there; whether it was not. Who else writes is kept out meanwhile."""
        fcntl.lockf(self._metrics, fcntl.LOCK_EX)
        try:
            last = self.last_metric()
            if last is not None and last["step"] >= line["step"]:
                return False
            self._metrics.write(json.dumps(line) + "\n")
            self._metrics.flush()
            return True
        finally:
            fcntl.lockf(self._metrics, fcntl.LOCK_UN)

    def last_metric(self) -> dict[str, Any] | None:
        """The last line of metrics, None before the first."""
        size = self._metrics.seek(0, os.SEEK_END)
        self._metrics.seek(max(0, size - _TAIL_BYTES))
        lines = self._metrics.read().splitlines()
        last: dict[str, Any] | None = json.loads(lines[-1]) if lines else None
        return last

    def _identity(self) -> str | None:
        with contextlib.suppress(OSError, UnicodeDecodeError):
            return (self.path / "run").read_text().strip()
        return None

    def event(self, kind: str, **details: Any) -> dict[str, Any]:
        """Write an event with the time it is now; returns it."""
        event = {"time": round(self.now(), 6), "kind": kind, **details}
        self._events.write(json.dumps(event) + "\n")
        return event

    def close(self) -> None:
        self._metrics.close()
        self._events.close()
