"""Which communicators of a process share a stream of its device.

torch takes the stream of a communicator from a pool of 32 per device and priority, in turn, without regard to streams
in use. A receive that waits for its peer then stops all other communicators on its stream. Drawing from the pool tells
its place, so this class skips streams in use before the next communicator, and finds communicators that share one.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Collection, Hashable
from dataclasses import dataclass, field


@dataclass
class _Batch:
    """Communicators made at the same time, and the streams that they took, one each."""

    streams: list[Hashable] = field(default_factory=list)
    recorded: int = 0


class StreamPool:
    """The place of a pool, and the streams that communicators may have; from any thread.

    Args:
        draw: takes the next stream, and returns what identifies it.
    """

    def __init__(self, draw: Callable[[], Hashable]) -> None:
        self._draw, self._lock = draw, threading.Lock()
        self._ring = [draw()]
        while (stream := draw()) != self._ring[0]:
            self._ring.append(stream)
        self._place = 0
        self._batch = _Batch()
        self._batches: dict[object, _Batch] = {}

    def record(self, communicator: object) -> None:
        """Record a new communicator, and skip streams in use before the next, if there are others."""
        with self._lock:
            self._look()
            self._batch.recorded += 1
            self._batches[communicator] = self._batch
            self._skip()

    def keep_only(self, communicators: Collection[object]) -> None:
        """Forget all other communicators, which were aborted."""
        with self._lock:
            self._batches = {each: batch for each, batch in self._batches.items() if each in communicators}

    def is_exclusive(self, communicator: object) -> bool:
        """Whether no other communicator can have the same stream."""
        with self._lock:
            used = self._used()
            batch = self._batches.get(communicator)
            return batch is not None and all(used[stream] == 1 for stream in batch.streams)

    def _used(self) -> Counter[Hashable]:
        batches = {id(batch): batch for batch in (self._batch, *self._batches.values())}
        return Counter(stream for batch in batches.values() for stream in batch.streams)

    def _look(self) -> None:
        """Draw a stream, which tells the ones that were taken since the last time."""
        if self._batch.recorded >= len(self._batch.streams):
            self._batch = _Batch()
        before, self._place = self._place, self._ring.index(self._draw())
        for number in range((self._place - before - 1) % len(self._ring)):
            self._batch.streams.append(self._ring[(before + 1 + number) % len(self._ring)])

    def _skip(self) -> None:
        for _ in self._ring:
            if not self._used()[self._ring[(self._place + 1) % len(self._ring)]]:
                return
            self._look()
