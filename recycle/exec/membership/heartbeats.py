"""Reads all heartbeats of a run, every so often, in a thread: whoever coordinates goes on meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Collection, Sequence

from recycle.errors import RunError
from recycle.exec.membership.failure_detector import ReadHeartbeats
from recycle.exec.membership.messages import Heartbeat
from recycle.exec.membership.schema import EVERYBODY, HeartbeatKey
from recycle.exec.membership.store import Store


class HeartbeatReader:
    """The thread.

    Args:
        store: a client of its own.
        members: processes that may beat.
        seconds: between two readings.
    """

    def __init__(self, store: Store, members: Collection[str], seconds: float) -> None:
        self._store, self._members, self._seconds = store, members, seconds
        self._found: dict[str, Heartbeat] = {}
        self._readings = 0
        self._lost: RunError | None = None
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def _look(self) -> None:
        while True:
            try:
                self._found = self._store.answers(HeartbeatKey(EVERYBODY), self._members)
                self._readings += 1
            except RunError as error:
                self._lost = error
                return
            if self._closing.wait(self._seconds):
                return

    def reading(self) -> ReadHeartbeats:
        """For one failure detector: what gives the last heartbeats of processes, by their names; None for all when
        there was no reading since its last call. It raises RunError when the store is gone."""
        seen = 0

        def read(names: Sequence[str]) -> list[Heartbeat | None] | None:
            nonlocal seen
            if self._lost is not None:
                raise self._lost
            if (readings := self._readings) == seen:
                return None
            seen, found = readings, self._found
            return [found.get(name) for name in names]

        return read

    def close(self) -> None:
        """End the thread, unless it waits for a store that does not answer."""
        self._closing.set()
        self._thread.join(self._seconds)
