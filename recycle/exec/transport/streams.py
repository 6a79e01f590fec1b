"""Which communicators of a process share a stream of its device.

torch takes the stream of a communicator from a pool of 32 per device and priority, in turn, without regard to streams
in use. A receive that waits for its peer then stops all other communicators on its stream. Drawing from the pool tells
its place, so this class skips streams in use before the next communicator, and finds communicators that share one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Hashable


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
        self._place, self._latest = 0, frozenset[Hashable]()
        self._streams: dict[object, frozenset[Hashable]] = {}

    def prepare(self) -> None:
        """Skip streams in use, if there are others."""
        with self._lock:
            self._skip()

    def record(self, communicator: object) -> None:
        """Record a new communicator. Of several new ones at a time each may have any of their streams."""
        with self._lock:
            self._latest = self._taken() or self._latest
            self._streams[communicator] = self._latest
            self._skip()

    def keep_only(self, communicators: Collection[object]) -> None:
        """Forget all other communicators, which were aborted."""
        with self._lock:
            self._streams = {each: streams for each, streams in self._streams.items() if each in communicators}

    def is_exclusive(self, communicator: object) -> bool:
        """Whether no other communicator can have the same stream."""
        with self._lock:
            own = self._streams.get(communicator, frozenset())
            others = (streams for other, streams in self._streams.items() if other is not communicator)
            return bool(own) and all(own.isdisjoint(streams) for streams in others)

    def _taken(self) -> frozenset[Hashable]:
        before, self._place = self._place, self._ring.index(self._draw())
        count = (self._place - before - 1) % len(self._ring)
        return frozenset(self._ring[(before + 1 + number) % len(self._ring)] for number in range(count))

    def _skip(self) -> None:
        used = frozenset[Hashable]().union(*self._streams.values())
        for _ in self._ring:
            if self._ring[(self._place + 1) % len(self._ring)] not in used:
                return
            self._latest = self._taken() or self._latest
