"""Batches made before they are asked for, by a thread, so that reading and cutting them takes no time of a forward.

Which batches come is known: those of the worker's program, in its order, and then the same ones of the next iteration.
For a GPU they lie in pinned memory, from which they are copied while it computes.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor

from recycle.exec.data.batches import Batch, Batches

DEPTH = 2
"""Batches that are made ahead: one is asked for while the next is being made."""
BatchKey = tuple[int, int]
"""Iteration and global id of a micro-batch."""


class BatchesAhead:
    """Batches of one stage, made ahead.

    Args:
        batches: that make them; asked from the thread and, for what was not expected, from the caller's.
        pinned: whether they are copied to a GPU.
    """

    def __init__(self, batches: Batches, pinned: bool) -> None:
        self._batches, self._pinned = batches, pinned
        self._expected: deque[BatchKey] = deque()
        self._made: dict[BatchKey, Future[Batch]] = {}
        self._thread: ThreadPoolExecutor | None = None

    def expect(self, keys: Iterable[BatchKey]) -> None:
        """From now on batches are asked for in this order; what was expected before is forgotten."""
        self._expected = deque(keys)
        wanted = set(self._expected)
        for key in self._made.keys() - wanted:
            self._made.pop(key).cancel()
        self._begin_next()

    def batch(self, iteration: int, micro_batch: int) -> Batch:
        """As `Batches.batch` gives it. Raises RunError as it does."""
        key = iteration, micro_batch
        made = self._made.pop(key, None)
        with contextlib.suppress(ValueError):
            self._expected.remove(key)
        self._begin_next()
        return self._make(key) if made is None else made.result()

    def _begin_next(self) -> None:
        for key in list(self._expected)[:DEPTH]:
            if key not in self._made:
                self._thread = self._thread or ThreadPoolExecutor(1)
                self._made[key] = self._thread.submit(self._make, key)

    def _make(self, key: BatchKey) -> Batch:
        batch = self._batches.batch(*key)
        return {name: part.pin_memory() for name, part in batch.items()} if self._pinned else batch
