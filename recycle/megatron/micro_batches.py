"""The data of a user's script for any micro-batch of any pipeline, in any order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from recycle.errors import RunError
from recycle.job.shape import MicroBatch

IteratorOf = Callable[[int], Any]
"""Pipeline -> iterator over its micro-batches, from the first of iteration `session.step` on, of one step or more; None
where the forward step reads no data."""


class MicroBatches:
    """The data of a chunk: what is read stays until its iteration is over, so any order and repetition is possible."""

    def __init__(self, iterator_of: IteratorOf, count: int) -> None:
        self._iterator_of, self._count, self._step = iterator_of, count, 0
        self._iterators: dict[int, tuple[Any, int]] = {}
        self._items: dict[tuple[int, int], Any] = {}

    def begin(self, step: int) -> None:
        self._step, first = step, step * self._count
        self._items = {key: item for key, item in self._items.items() if key[1] >= first}
        self._iterators = {k: entry for k, entry in self._iterators.items() if entry[1] >= first}

    def of(self, micro_batch: MicroBatch) -> Any:
        pipeline, position = micro_batch.pipeline, self._step * self._count + micro_batch.index
        while (pipeline, position) not in self._items:
            iterator, following = self._iterators.get(pipeline) or self._opened(pipeline)
            if iterator is None:
                return None
            try:
                item = next(iterator)
            except StopIteration:
                if following != self._step * self._count:
                    raise self._shortage(pipeline, following) from None
                iterator, following = self._opened(pipeline)  # it was for the earlier steps
                item = next(iterator, self)
                if item is self:
                    raise self._shortage(pipeline, following) from None
            self._items[pipeline, following] = item
            self._iterators[pipeline] = iterator, following + 1
        return iter((self._items[pipeline, position],))

    def _opened(self, pipeline: int) -> tuple[Any, int]:
        return self._iterator_of(pipeline), self._step * self._count

    def _shortage(self, pipeline: int, position: int) -> RunError:
        return RunError(
            f"data: the iterator of pipeline {pipeline} ends before micro-batch {position % self._count} of step"
            f" {self._step}; each step takes [shape] micro_batches = {self._count}"
        )
