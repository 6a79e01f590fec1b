"""Gaps: what every worker waits for whenever it does nothing.

A gap lies before the instruction that ends it. It is cut where its cause changes, so that each moment has one; of the
causes that hold at a moment, the first of these counts:

- ORDER: a compute that stands later in the worker's program has all it needs and could run here: moved to this place,
  with the rest of the order as it is, it would keep to the memory limit.
- MEMORY: a forward (or overlapped pair) that stands later has all it needs, and moved here would exceed the limit.
- REDUCE: the gap ends with a reduce or a step, which waits for other workers: for their gradients, for their arrival
  at the reduce, or with the barrier for their reduces.
- TRANSFER: the value needed (or sent, where its arrival is awaited) is made; its transfer queues for its lane or is
  under way.
- INPUT: the value needed is not made yet.

After a worker's last instruction NOTHING_LEFT is the cause. The gaps and the instructions of a worker cover the
makespan without overlap, each beginning exactly where the one before ends. What needs what is asked of
`dependencies`. Limits: ORDER says that an instruction could have run, not that the iteration would end sooner.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from recycle.ir.columns import Columns, Flags, Floats, Rows
from recycle.ir.event_graph import Times
from recycle.ir.instruction import Beside, Compute, OverlappedPair, Send, StageWide, is_kind
from recycle.ir.kinds import kinds_where
from recycle.ir.memory import TOLERANCE, held_before, require_limits, static_bytes
from recycle.ir.schedule import Schedule
from recycle.job.shape import Worker


class GapCause(IntEnum):
    """Why a worker does nothing."""

    INPUT = 0
    """an activation or gradient that another worker has not made yet"""
    TRANSFER = 1
    """it is made, and not here yet"""
    REDUCE = 2
    """a reduce or a step waits for other workers"""
    MEMORY = 3
    """a forward could run but for the memory limit"""
    ORDER = 4
    """an instruction could run but for the program's order"""
    NOTHING_LEFT = 5
    """the program has ended"""


class Gap(NamedTuple):
    """One gap, or the part of one that has one cause.

    Attributes:
        worker: who waits.
        start, end: seconds.
        cause: why.
        row: the instruction that ends the gap; -1 after the last one.
        waits_for: the instruction that `row` waits for at `start`: on another worker the one that makes the value,
            then the send that brings it; the last gradient, arrival or reduce of a reduce or step. -1 after the last.
        ready: for ORDER and MEMORY the instruction that could run, the one that could first; else -1.
    """

    worker: Worker
    start: float
    end: float
    cause: GapCause
    row: int
    waits_for: int
    ready: int


@dataclass(frozen=True, eq=False)
class Gaps:
    """All gaps as columns, by worker, then time; failed workers have none. Iterating gives `Gap`s.

    Attributes:
        schedule: the lowered schedule whose rows `row`, `waits_for` and `ready` are.
        worker: worker index.
        start, end, cause, row, waits_for, ready: as in `Gap`.
    """

    schedule: Schedule
    worker: Rows
    start: Floats
    end: Floats
    cause: Rows
    row: Rows
    waits_for: Rows
    ready: Rows

    COLUMNS = ("worker", "start", "end", "cause", "row", "waits_for", "ready")

    def __len__(self) -> int:
        return len(self.worker)

    def __iter__(self) -> Iterator[Gap]:
        workers, causes = list(self.schedule.shape.workers()), list(GapCause)
        columns = [getattr(self, name).tolist() for name in self.COLUMNS]
        for worker, start, end, cause, row, waits_for, ready in zip(*columns, strict=True):
            yield Gap(workers[worker], start, end, causes[cause], row, waits_for, ready)

    @property
    def seconds(self) -> Floats:
        """Seconds lost, [worker index, cause]."""
        lost = np.zeros((self.schedule.shape.worker_count, len(GapCause)))
        np.add.at(lost, (self.worker, self.cause), self.end - self.start)
        return lost

    def longest(self, cause: GapCause | None, most: int) -> list[Gap]:
        """The `most` longest gaps with this cause, or of all but NOTHING_LEFT; longest first."""
        chosen = np.flatnonzero(self.cause != GapCause.NOTHING_LEFT if cause is None else self.cause == cause)
        return self.at(chosen[np.argsort((self.start - self.end)[chosen], kind="stable")[:most]])

    def at(self, places: Rows) -> list[Gap]:
        """The gaps at these places of the columns."""
        return list(Gaps(self.schedule, *(getattr(self, name)[places] for name in self.COLUMNS)))


def find_gaps(times: Times, limits: Sequence[float] | None = None, byte_limit: float | None = None) -> Gaps:
    """The gaps of a timeline, O(n log n) in its instructions.

    Args:
        limits: activations (in chunks) that the worker of each rank may hold, one number per rank.
        byte_limit: bytes that any worker may hold, static bytes of its stages included.
            Without either, memory holds nothing back.

    Raises:
        JobError: as `memory.require_limits`.
    """
    schedule, c = times.schedule, times.schedule.columns
    if limits is not None:
        require_limits(limits, schedule.shape.ranks)
    tolerance = times.makespan * TOLERANCE
    row, start = _gaps_before_rows(times)
    end = times.start[row]
    made, producer, carrier = _needed(times, row, end)
    ready = _ready(times)
    fits, exceeds = _could_run(c, row, ready, _memories(times, limits, byte_limit))
    ordered = _cut(np.append(ready, np.inf)[fits], start, end, tolerance)
    limited = _cut(np.append(ready, np.inf)[exceeds], start, ordered, tolerance)
    there = _cut(made, start, limited, tolerance)
    waiting = np.where(is_kind(c.kind, StageWide)[row], GapCause.REDUCE, GapCause.INPUT)
    none = np.full(len(row), -1, dtype=np.int64)
    pieces = [
        (start, there, waiting, none),
        (there, limited, np.full(len(row), GapCause.TRANSFER), none),
        (limited, ordered, np.full(len(row), GapCause.MEMORY), exceeds),
        (ordered, end, np.full(len(row), GapCause.ORDER), fits),
    ]
    tables = [
        (c.worker[row].astype(np.int64), begin, stop, cause, row, np.where(begin < made, producer, carrier), could)
        for begin, stop, cause, could in pieces
    ]
    columns = [np.concatenate(column) for column in zip(*tables, _nothing_left(times), strict=True)]
    kept = np.flatnonzero(columns[2] > columns[1])
    kept = kept[np.lexsort((columns[1][kept], columns[0][kept]))]
    return Gaps(schedule, *(column[kept] for column in columns))


def _is_live(schedule: Schedule) -> Flags:
    return np.array([worker not in schedule.failed for worker in schedule.shape.workers()], dtype=np.bool_)


def _gaps_before_rows(times: Times) -> tuple[Rows, Floats]:
    """(row, when its worker became idle) of each row that its idle worker has to wait for."""
    c = times.schedule.columns
    rows = np.flatnonzero(~is_kind(c.kind, Beside) & _is_live(times.schedule)[c.worker])
    idle = np.zeros(len(rows))
    same = c.worker[rows[1:]] == c.worker[rows[:-1]]
    idle[1:][same] = times.end[rows[:-1][same]]
    waits = times.start[rows] > idle
    return rows[waits], idle[waits]


def _nothing_left(times: Times) -> tuple[npt.NDArray[np.int64] | Floats, ...]:
    """The gap of each live worker after its last instruction, as columns of `Gaps`."""
    schedule, c = times.schedule, times.schedule.columns
    rows = np.flatnonzero(~is_kind(c.kind, Beside))
    idle = np.zeros(schedule.shape.worker_count)
    np.maximum.at(idle, c.worker[rows], times.end[rows])
    workers = np.flatnonzero(_is_live(schedule))
    none = np.full(len(workers), -1, dtype=np.int64)
    over, cause = np.full(len(workers), times.makespan), np.full(len(workers), GapCause.NOTHING_LEFT)
    return workers, idle[workers], over, cause, none, none, none


def _needed(times: Times, row: Rows, end: Floats) -> tuple[Floats, Rows, Rows]:
    """(when made, row that makes it, row that brings it) of what each gap's row waited for last.

    What needs no bringing (a reduce, a step, a value without a transfer) is made when the gap ends.
    """
    graph = times.dependencies
    node = times.last[row]
    node = np.where(node >= graph.rows, times.last[node], node)  # through the join of a reduce or of the commit
    producer_of = np.full(graph.nodes, -1, dtype=np.int64)
    producer_of[graph.target] = graph.source  # of a send, the only thing it needs
    send = np.where(is_kind(times.schedule.columns.kind[node], Send), node, graph.sends[node])
    producer = np.where(send >= 0, producer_of[send], -1)
    brought = producer >= 0
    made = np.where(brought, times.end[producer], end)
    return made, np.where(brought, producer, node), np.where(send >= 0, send, node)


def _ready(times: Times) -> Floats:
    """When all that a compute needs is there; infinite for rows that are no compute."""
    graph = times.dependencies
    computes = is_kind(times.schedule.columns.kind, (Compute, OverlappedPair))
    ready = np.where(computes, 0.0, np.inf)
    edges = graph.between_rows
    edges = edges[computes[graph.target[edges]]]
    np.maximum.at(ready, graph.target[edges], times.end[graph.source[edges]])
    return ready


def _cut(moment: Floats, low: Floats, high: Floats, tolerance: float) -> Floats:
    """`moment` within [low, high], and on the bound that it nearly touches."""
    cut = np.clip(moment, low, high)
    is_high = high - cut < tolerance
    return np.where(is_high, high, np.where(cut - low < tolerance, low, cut))


class _Memory(NamedTuple):
    """One measure of memory: per row what it adds at its start, keeps at its end, and what its worker holds while it
    runs; per worker the limit."""

    added: Floats
    kept: Floats
    during: Floats
    limit: Floats

    @classmethod
    def of(cls, times: Times, limit: Floats, *, in_bytes: bool) -> _Memory:
        added, freed, before = held_before(times.schedule, times.profile, in_bytes=in_bytes)
        return cls(added, added - freed, before + added, limit)


def _memories(times: Times, limits: Sequence[float] | None, byte_limit: float | None) -> list[_Memory]:
    schedule, profile, shape = times.schedule, times.profile, times.schedule.shape
    memories = []
    if limits is not None:
        per_worker = np.tile(np.array(limits, dtype=float), shape.pipelines)
        memories.append(_Memory.of(times, per_worker + TOLERANCE, in_bytes=False))
    if byte_limit is not None:
        free = byte_limit * (1 + TOLERANCE) - np.array(static_bytes(schedule, profile))
        memories.append(_Memory.of(times, free, in_bytes=True))
    return memories


def _could_run(c: Columns, row: Rows, ready: Floats, memories: list[_Memory]) -> tuple[Rows, Rows]:
    """For the gap before each `row`, of the computes from there on: the one that is ready first of those that fit the
    memory, and of those that would exceed it; -1 where there is none. (`row` itself is ready at the gap's end only.)"""
    by_time = np.argsort(ready, kind="stable")
    rank = np.empty(len(ready), dtype=np.int64)
    rank[by_time] = np.arange(len(ready))
    nobody = len(ready)
    grows = is_kind(c.kind, kinds_where(lambda row: row.holds)) & bool(memories)
    others = np.where(np.isfinite(ready) & ~grows, rank, nobody)
    fits = _range_min(others, row, c.offsets[c.worker[row] + 1], nobody)
    exceeds = np.full(len(row), nobody, dtype=np.int64)
    begins = np.searchsorted(c.worker[row], np.arange(len(c.offsets)))
    for w in np.flatnonzero(np.diff(begins)).tolist() if memories else ():
        mine = slice(begins[w], begins[w + 1])
        for members in _alike(c, np.arange(c.offsets[w], c.offsets[w + 1])[grows[c.offsets[w] : c.offsets[w + 1]]]):
            begin = np.searchsorted(members, row[mine])
            until = np.searchsorted(members, _fits_from(c, memories, w, int(members[0]), row[mine]), side="right")
            fits[mine] = np.minimum(fits[mine], _range_min(rank[members], begin, until, nobody))
            over = _range_min(rank[members], until, np.full(len(until), len(members)), nobody)
            exceeds[mine] = np.minimum(exceeds[mine], over)
    decode = np.append(by_time, -1)
    return decode[fits], decode[exceeds]


def _alike(c: Columns, rows: Rows) -> list[Rows]:
    """The rows grouped by kind and stages, which decide what an instruction adds to memory and keeps there."""
    stages = int(max(c.stage[rows].max(initial=0), c.stage2[rows].max(initial=0))) + 2
    key = (c.kind[rows].astype(np.int64) * stages + c.stage[rows]) * stages + c.stage2[rows] + 1
    return [rows[key == one] for one in np.unique(key)]


def _fits_from(c: Columns, memories: list[_Memory], w: int, member: int, row: Rows) -> Rows:
    """The last row from which an instruction like `member` fits when moved into the gap before each `row`.

    It must fit there, and what it keeps must fit beside every instruction that it is moved past.
    """
    first, end = int(c.offsets[w]), int(c.offsets[w + 1])
    last = np.full(len(row), end, dtype=np.int64)
    for memory in memories:
        limit = memory.limit[w]
        blocking = first + np.flatnonzero(memory.during[first:end] + memory.kept[member] > limit)
        blocking = np.append(blocking, end)
        last = np.minimum(last, blocking[np.searchsorted(blocking, row)])
        held = memory.during[row] - memory.added[row]
        last = np.where(held + memory.added[member] > limit, row - 1, last)
    return last


def _range_min(values: Rows, begin: Rows, end: Rows, empty: int) -> Rows:
    """Least of `values[begin:end]` for each pair, `empty` where that is empty; doubles its windows log2(n) times."""
    least = np.full(len(begin), empty, dtype=np.int64)
    length, span, table = end - begin, 1, values
    while True:
        chosen = (length >= span) & (length < 2 * span)
        least[chosen] = np.minimum(table[begin[chosen]], table[end[chosen] - span])
        if 2 * span > len(values):
            return least
        table = np.minimum(table[:-span], table[span:])
        span *= 2
