"""Observers of a run while it goes on: a progress display, a test."""

from __future__ import annotations

from typing import Any


class Observer:
    """Is called while a run goes on. This one does nothing."""

    def waiting(self, what: str) -> None:
        """The run waits for `what`."""

    def committed(self, line: dict[str, Any]) -> None:
        """A step was committed; `line` is its metrics line."""

    def event(self, event: dict[str, Any]) -> None:
        """An event was written; `event` is its line in events.jsonl."""
