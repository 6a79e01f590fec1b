"""A generation record as it is written to the store: what everybody's list would say, by its exceptions.

Nearly all positions are alive and play themselves, so a record states the grid that the live workers span, who is
missing in it, and who plays another role. The record of 2,048 workers has some hundred bytes, and grows with the dead.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from msgspec import Struct

from recycle.exec.protocol import Commit, Copy, Evaluated, GenerationRecord, StepMode, Verified
from recycle.shape import Worker


class LiveGrid(NamedTuple):
    """Pipelines and ranks that the live workers span."""

    pipelines: int
    ranks: int

    def workers(self) -> list[str]:
        """All positions, by pipeline, then rank."""
        return [f"{pipeline}.{rank}" for pipeline in range(self.pipelines) for rank in range(self.ranks)]


class PackedRecord(Struct, frozen=True, omit_defaults=True):
    """A `GenerationRecord`; what is not said here is said there.

    Attributes:
        grid: that the live workers span.
        missing: of its positions, those without a live worker.
        moved: process -> role, of those that play another position than their own.
    """

    generation: int
    grid: LiveGrid
    plan: str
    missing: list[str] = []
    moved: dict[str, str] = {}
    committed: int = -1
    commit: Commit | None = None
    joins: list[str] = []
    mode: StepMode = "barrier"
    periods: dict[StepMode, float] = {}
    evaluated: Evaluated | None = None
    copies: list[Copy] = []
    held: str = ""
    holds: str = ""
    verified: Verified | None = None
    candidate: Verified | None = None
    rounds: int = 0
    disputed: list[tuple[int, int, int]] = []
    behind: list[Copy] = []


def pack_record(record: GenerationRecord) -> PackedRecord:
    """The record, to be written."""
    grid, missing = _exceptions(tuple(record.live))
    return PackedRecord(
        record.generation,
        grid,
        record.plan,
        list(missing),
        {name: role for name, role in record.roles.items() if name != role},
        record.committed,
        record.commit,
        record.joins,
        record.mode,
        {mode: float(period) for mode, period in record.periods.items()},  # the same text again, when it is read back
        record.evaluated,
        record.copies,
        record.held,
        record.holds,
        record.verified,
        record.candidate,
        record.rounds,
        record.disputed,
        record.behind,
    )


@lru_cache(maxsize=4)
def _exceptions(live: tuple[str, ...]) -> tuple[LiveGrid, tuple[str, ...]]:
    """The grid that workers span, and who is missing in it."""
    workers = [Worker.parse(name) for name in live]
    pipelines = max((worker.pipeline for worker in workers), default=-1) + 1
    grid, there = LiveGrid(pipelines, max((worker.rank for worker in workers), default=-1) + 1), set(live)
    return grid, tuple(name for name in grid.workers() if name not in there)


def unpack_record(packed: PackedRecord) -> GenerationRecord:
    """What `pack_record` was given, with its workers in order."""
    missing = set(packed.missing)
    live = [name for name in packed.grid.workers() if name not in missing]
    return GenerationRecord(
        packed.generation,
        live,
        {name: packed.moved.get(name, name) for name in live} if packed.plan else {},
        packed.plan,
        packed.committed,
        packed.commit,
        packed.joins,
        packed.mode,
        packed.periods,
        packed.evaluated,
        packed.copies,
        packed.held,
        packed.holds,
        packed.verified,
        packed.candidate,
        packed.rounds,
        packed.disputed,
        packed.behind,
    )
