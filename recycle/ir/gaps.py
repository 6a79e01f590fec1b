"""Gaps: idle times of workers and their causes.

A gap ends at an instruction and is split where its cause changes. If several causes hold, the first of ORDER, MEMORY,
REDUCE, TRANSFER and INPUT counts (see `GapCause`). Limits: ORDER means that an instruction could run, not that the
iteration would end sooner.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

import numpy as np

from recycle.ir.columns import Columns, Flags, Floats, Rows
from recycle.ir.event_graph import Times
from recycle.ir.instruction import AsyncInstruction, Compute, HostCopy, OverlappedPair, Send, StageWide, is_kind
from recycle.ir.kinds import kinds_where
from recycle.ir.memory import TOLERANCE, held_before, require_limits, static_bytes
from recycle.ir.schedule import Schedule
from recycle.job.shape import Worker


class GapCause(IntEnum):
    """Why a worker is idle."""

    INPUT = 0
    """another worker has not computed an activation or gradient yet"""
    TRANSFER = 1
    """the value is computed, but queued for its lane or in transit"""
    REDUCE = 2
    """a reduce or step waits for gradients, arrivals or (barrier) reduces of other workers"""
    MEMORY = 3
    """a later forward (or overlapped pair) is ready, and would exceed the memory limit here"""
    ORDER = 4
    """a later compute is ready and could run here within the memory limit"""
    NOTHING_LEFT = 5


class Gap(NamedTuple):
    """One gap, or the part of a gap with one cause.

    Attributes:
        start, end: seconds.
        row: the instruction that ends the gap; -1 after the last instruction.
        waits_for: the instruction that `row` waits for at `start`: the producer on another worker, then the send; for a
            reduce or step, the last gradient, arrival or reduce; else -1.
        ready: for ORDER and MEMORY, the instruction that is ready first; else -1.
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
    """All gaps of live workers as columns, sorted by worker, then time. Iteration yields `Gap`s."""

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
        """Return the `most` longest gaps with this cause, longest first; None for all causes except NOTHING_LEFT."""
        chosen = np.flatnonzero(self.cause != GapCause.NOTHING_LEFT if cause is None else self.cause == cause)
        return self.at(chosen[np.argsort((self.start - self.end)[chosen], kind="stable")[:most]])

    def at(self, places: Rows) -> list[Gap]:
        """Return the gaps at these indices of the columns."""
        return list(Gaps(self.schedule, *(getattr(self, name)[places] for name in self.COLUMNS)))


def find_gaps(times: Times, limits: Sequence[float] | None = None, byte_limit: float | None = None) -> Gaps:
    """Find the gaps of a timeline, O(n log n) in the number of instructions. Raises as `memory.require_limits`.

    Args:
        limits: activations (in chunks) that the worker of each rank may hold; None for no limit.
        byte_limit: bytes that any worker may hold, including the static bytes of its stages; None for no limit.
    """
    schedule, c = times.schedule, times.schedule.columns
    if limits is not None:
        require_limits(limits, schedule.shape.ranks)
    tolerance = times.makespan * TOLERANCE
    row, start = _gaps_before_rows(times)
    end = times.start[row]
    computed, producer, carrier = _needed(times, row, end)
    ready = _ready(times)
    fits, exceeds = _could_run(c, row, ready, _memories(times, limits, byte_limit))
    ordered = _clip(np.append(ready, np.inf)[fits], start, end, tolerance)
    limited = _clip(np.append(ready, np.inf)[exceeds], start, ordered, tolerance)
    input_until = _clip(computed, start, limited, tolerance)
    waiting = np.where(is_kind(c.kind, StageWide)[row], GapCause.REDUCE, GapCause.INPUT)
    none = np.full(len(row), -1, dtype=np.int64)
    pieces = [
        (start, input_until, waiting, none),
        (input_until, limited, np.full(len(row), GapCause.TRANSFER), none),
        (limited, ordered, np.full(len(row), GapCause.MEMORY), exceeds),
        (ordered, end, np.full(len(row), GapCause.ORDER), fits),
    ]
    tables = [
        (
            c.worker[row].astype(np.int64),
            begin,
            stop,
            cause,
            row,
            np.where(begin < computed, producer, carrier),
            ready_row,
        )
        for begin, stop, cause, ready_row in pieces
    ]
    columns = [np.concatenate(column) for column in zip(*tables, _nothing_left(times), strict=True)]
    kept = np.flatnonzero(columns[2] > columns[1])
    kept = kept[np.lexsort((columns[1][kept], columns[0][kept]))]
    return Gaps(schedule, *(column[kept] for column in columns))


def _is_live(schedule: Schedule) -> Flags:
    return np.array([worker not in schedule.failed for worker in schedule.shape.workers()], dtype=np.bool_)


def _gaps_before_rows(times: Times) -> tuple[Rows, Floats]:
    c = times.schedule.columns
    rows = np.flatnonzero(~is_kind(c.kind, AsyncInstruction) & _is_live(times.schedule)[c.worker])
    idle = np.zeros(len(rows))
    same = c.worker[rows[1:]] == c.worker[rows[:-1]]
    idle[1:][same] = times.end[rows[:-1][same]]
    waits = times.start[rows] > idle
    return rows[waits], idle[waits]


def _nothing_left(times: Times) -> tuple[Rows | Floats, ...]:
    schedule, c = times.schedule, times.schedule.columns
    rows = np.flatnonzero(~is_kind(c.kind, AsyncInstruction))
    idle = np.zeros(schedule.shape.worker_count)
    np.maximum.at(idle, c.worker[rows], times.end[rows])
    workers = np.flatnonzero(_is_live(schedule))
    none = np.full(len(workers), -1, dtype=np.int64)
    over, cause = np.full(len(workers), times.makespan), np.full(len(workers), GapCause.NOTHING_LEFT)
    return workers, idle[workers], over, cause, none, none, none


def _needed(times: Times, row: Rows, end: Floats) -> tuple[Floats, Rows, Rows]:
    graph = times.dependencies
    node = times.last[row]
    node = np.where(node >= graph.rows, times.last[node], node)  # through the join of a reduce or of the commit
    producer_of = np.full(graph.nodes, -1, dtype=np.int64)
    producer_of[graph.target] = graph.source  # exact for sends, which have one dependency
    send = np.where(is_kind(times.schedule.columns.kind[node], Send), node, graph.sends[node])
    producer = np.where(send >= 0, producer_of[send], -1)
    is_received = producer >= 0
    computed = np.where(is_received, times.end[producer], end)
    is_copied = _are_copies(times, node)
    computed[is_copied] = times.start[node[is_copied]]
    return computed, np.where(is_received, producer, node), np.where(send >= 0, send, node)


def _ready(times: Times) -> Floats:
    graph = times.dependencies
    kind = times.schedule.columns.kind
    computes = is_kind(kind, (Compute, OverlappedPair)) & ~is_kind(kind, AsyncInstruction)
    ready = np.where(computes, 0.0, np.inf)
    edges = graph.between_rows
    edges = edges[computes[graph.target[edges]]]
    np.maximum.at(ready, graph.target[edges], times.end[graph.source[edges]])
    waits = np.flatnonzero(computes & _are_copies(times, times.last[: len(kind)]))  # for memory that an OFFLOAD frees
    ready[waits] = times.start[waits]
    return ready


def _are_copies(times: Times, node: Rows) -> Flags:
    kind = times.schedule.columns.kind
    inside = (node >= 0) & (node < len(kind))
    return inside & is_kind(kind[np.where(inside, node, 0)], HostCopy)


def _clip(moment: Floats, low: Floats, high: Floats, tolerance: float) -> Floats:
    cut = np.clip(moment, low, high)
    is_high = high - cut < tolerance
    return np.where(is_high, high, np.where(cut - low < tolerance, low, cut))


class _Memory(NamedTuple):
    """One measure of memory: added at start, kept at end and held during each row, and the limit of each worker."""

    added: Floats
    kept: Floats
    during: Floats
    limit: Floats


def _memories(times: Times, limits: Sequence[float] | None, byte_limit: float | None) -> list[_Memory]:
    schedule, profile = times.schedule, times.profile
    of_workers: list[tuple[Floats, bool]] = []
    if limits is not None:
        of_workers.append((np.tile(np.array(limits, dtype=float), schedule.shape.pipelines) + TOLERANCE, False))
    if byte_limit is not None:
        of_workers.append((byte_limit * (1 + TOLERANCE) - np.array(static_bytes(schedule, profile)), True))
    memories = []
    for limit, in_bytes in of_workers:
        added, freed, before = held_before(schedule, profile, in_bytes=in_bytes)
        memories.append(_Memory(added, added - freed, before + added, limit))
    return memories


def _could_run(c: Columns, row: Rows, ready: Floats, memories: list[_Memory]) -> tuple[Rows, Rows]:
    """Return, per gap, the later compute that is ready first among those that fit, and among others; -1 for none."""
    by_time = np.argsort(ready, kind="stable")
    rank = np.empty(len(ready), dtype=np.int64)
    rank[by_time] = np.arange(len(ready))
    none = len(ready)
    grows = is_kind(c.kind, kinds_where(lambda row: row.holds)) & bool(memories)
    others = np.where(np.isfinite(ready) & ~grows, rank, none)
    fits = _range_min(others, row, c.offsets[c.worker[row] + 1], none)
    exceeds = np.full(len(row), none, dtype=np.int64)
    begins = np.searchsorted(c.worker[row], np.arange(len(c.offsets)))
    for w in np.flatnonzero(np.diff(begins)).tolist() if memories else ():
        span = slice(begins[w], begins[w + 1])
        for members in _alike(c, np.arange(c.offsets[w], c.offsets[w + 1])[grows[c.offsets[w] : c.offsets[w + 1]]]):
            begin = np.searchsorted(members, row[span])
            until = np.searchsorted(members, _fits_from(c, memories, w, int(members[0]), row[span]), side="right")
            fits[span] = np.minimum(fits[span], _range_min(rank[members], begin, until, none))
            over = _range_min(rank[members], until, np.full(len(until), len(members)), none)
            exceeds[span] = np.minimum(exceeds[span], over)
    decode = np.append(by_time, -1)
    return decode[fits], decode[exceeds]


def _alike(c: Columns, rows: Rows) -> list[Rows]:
    stages = int(max(c.stage[rows].max(initial=0), c.stage2[rows].max(initial=0))) + 2
    key = (c.kind[rows].astype(np.int64) * stages + c.stage[rows]) * stages + c.stage2[rows] + 1
    return [rows[key == group] for group in np.unique(key)]


def _fits_from(c: Columns, memories: list[_Memory], w: int, member: int, row: Rows) -> Rows:
    """Return the last row from which an instruction like `member` fits if moved into the gap before each `row`.

    What it keeps must also fit in addition to every instruction that it is moved past.
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
    least = np.minimum.reduceat(np.append(values, empty), np.stack([begin, end], axis=1).ravel())[::2]
    return np.where(begin < end, least, empty)
