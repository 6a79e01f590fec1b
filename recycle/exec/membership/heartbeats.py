"""Reads all heartbeats of a run, every so often, in a thread: whoever coordinates goes on meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from recycle.errors import RunError
from recycle.exec.leader.detector import Beats, beats_of
from recycle.exec.membership.schema import EVERYBODY, HeartbeatKey
from recycle.exec.membership.store import Store

ReadHeartbeats = Callable[[], Beats | None]
"""Gives the last heartbeats of all processes, in the order of their names in a job; None when there was no reading
since its last call. Raises RunError when the store is gone."""


def read_heartbeats(store: Store, members: Sequence[str]) -> Beats:
    """The last heartbeat of each of these processes."""
    return beats_of(store.answers(HeartbeatKey(EVERYBODY), members), members)


class HeartbeatReader:
    """The thread.

    Args:
        store: a client of its own.
        members: all processes of the job.
        seconds: between two readings.
    """

    def __init__(self, store: Store, members: Sequence[str], seconds: float) -> None:
        self._store, self._members, self._seconds = store, members, seconds
        self._found: Beats | None = None
        self._readings = 0
        self._lost: RunError | None = None
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def _look(self) -> None:
        while True:
            try:
                self._found = read_heartbeats(self._store, self._members)
                self._readings += 1
            except RunError as error:
                self._lost = error
                return
            if self._closing.wait(self._seconds):
                return

    def reading(self) -> ReadHeartbeats:
        """For one failure detector, which gets each reading once."""
        seen = 0

        def read() -> Beats | None:
            nonlocal seen
            if self._lost is not None:
                raise self._lost
            if (readings := self._readings) == seen:
                return None
            seen = readings
            return self._found

        return read

    def close(self) -> None:
        """End the thread, unless it waits for a store that does not answer."""
        self._closing.set()
        self._thread.join(self._seconds)
