"""The run directory: what a run leaves behind, written as it happens, a whole line at a time.

`job.toml` as resolved, `metrics.jsonl` (a line per committed step), `events.jsonl`, `plans/`, `logs/`, `trace.json`;
`profiles/` where times drifted so far that plans were asked for with others.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import IO, Any

from recycle.errors import JobError
from recycle.job import Job


class RunDirectory:
    """Opens a fresh run directory.

    Args:
        path: made with its parents when missing.
        job: written to `job.toml`.

    Raises:
        JobError: the directory holds a run already, or cannot be written.

    Attributes:
        started: monotonic seconds from which all times of the run count.
    """

    def __init__(self, path: str | Path, job: Job) -> None:
        self.path = Path(path)
        if (self.path / "metrics.jsonl").exists():
            raise JobError(f"{self.path}: holds a run already; choose another --run directory or remove it")
        self.started = time.monotonic()
        try:
            for folder in (self.path, self.plans, self.logs):
                folder.mkdir(parents=True, exist_ok=True)
            (self.path / "job.toml").write_text(job.to_toml())
            self._metrics: IO[str] = (self.path / "metrics.jsonl").open("a", buffering=1)
            self._events: IO[str] = (self.path / "events.jsonl").open("a", buffering=1)
        except OSError as error:
            raise JobError(f"{self.path}: cannot be written ({error.strerror})") from None

    @property
    def plans(self) -> Path:
        return self.path / "plans"

    @property
    def profiles(self) -> Path:
        return self.path / "profiles"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    def now(self) -> float:
        """Seconds since the run started."""
        return time.monotonic() - self.started

    def metric(self, line: dict[str, Any]) -> None:
        self._metrics.write(json.dumps(line) + "\n")

    def event(self, kind: str, **details: Any) -> dict[str, Any]:
        """Write an event with the time it is now; returns it."""
        event = {"time": round(self.now(), 6), "kind": kind, **details}
        self._events.write(json.dumps(event) + "\n")
        return event

    def close(self) -> None:
        self._metrics.close()
        self._events.close()
