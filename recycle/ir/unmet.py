"""Needs that nothing in a schedule meets, and why."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from recycle.ir.columns import Rows
from recycle.ir.kinds import ValueKind
from recycle.ir.values import Value
from recycle.shape import MicroBatch


class Why(IntEnum):
    """What is wrong with a need that nothing meets."""

    NO_PRODUCER = 0
    """no instruction makes the value"""
    NOT_LOCAL = 1
    """the value is made on another worker, but a send, W or B needs it on its own"""
    NOT_RECEIVED = 2
    """the value is made on another worker and never received on this one"""
    NO_SEND = 3
    """a receive whose peer never sends this value here"""
    NO_PREDECESSOR = 4
    """a step without a reduce of its stage on the same worker, or another kind without the one that it follows"""


class Missing(NamedTuple):
    """A need that nothing meets: of row `row`, for value `value` (None for NO_PREDECESSOR)."""

    row: int
    why: Why
    value: Value | None


@dataclass(frozen=True, eq=False)
class Unmet:
    """All needs that nothing meets, as columns, because a broken file may have millions: iterating makes `Missing`.

    Attributes:
        per_pipeline: m, the micro-batches of a pipeline.
        row, why: as in `Missing`.
        value: `ValueKind` of what is missing, -1 where `Missing.value` is None.
        stage, micro_batch: who would make it; the micro-batch as global id.
    """

    per_pipeline: int
    row: Rows
    why: Rows
    value: Rows
    stage: Rows
    micro_batch: Rows

    def __len__(self) -> int:
        return len(self.row)

    def __iter__(self) -> Iterator[Missing]:
        return map(self.at, range(len(self)))

    def at(self, place: int) -> Missing:
        """The entry in one place."""
        value = None
        if self.value[place] >= 0:
            micro_batch = MicroBatch(*divmod(int(self.micro_batch[place]), self.per_pipeline))
            value = Value(ValueKind(int(self.value[place])), int(self.stage[place]), micro_batch)
        return Missing(int(self.row[place]), Why(int(self.why[place])), value)

    def take(self, places: Rows | npt.NDArray[np.bool_]) -> Unmet:
        """The entries in these places."""
        columns = (column[places] for column in (self.row, self.why, self.value, self.stage, self.micro_batch))
        return Unmet(self.per_pipeline, *columns)

    def with_reason(self, why: Why) -> Unmet:
        """The entries with this reason."""
        return self.take(self.why == why)
