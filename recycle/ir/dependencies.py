"""The one rule of what an instruction needs: checker, simulator, lowering, planner, interpreter and viewer ask here.

What a kind needs and produces (an activation, an input gradient, a weight gradient of some stage and micro-batch) is in
its row of the table of kinds. `recycle.ir.values` reads the row of one instruction; `dependencies` reads the table for
a whole schedule at once and gives a graph over its rows.

A value that crosses a stage boundary between two workers goes by SEND and RECV: the send needs the producer, the
receive its send, the consumer the receive. In a compute-only schedule the consumer needs the producer directly.
Beyond data: REDUCE_GRAD needs every weight gradient of its stage (and of the stages tied to it) on all hosts; STEP
needs its REDUCE_GRAD, and with the barrier the commit, which is all of them; GATHER_PARAMS needs its stage's STEPs on
all hosts; any other stage-wide kind needs the one that it follows. REDUCE_BUCKET needs every weight gradient of its
bucket, on all hosts, and REDUCE_GRAD the buckets that were begun before it. Carried into the next iteration: what
begins a micro-batch's work at a stage (F, R) needs the stage's STEP and GATHER_PARAMS on that worker (barrier: all
STEPs), and the next STEP needs the commit.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property

import numpy as np
import numpy.typing as npt

from recycle.ir.columns import Rows, offsets_of
from recycle.ir.instruction import (
    CARRIERS,
    Compute,
    GatherParameters,
    Instruction,
    OptimizerStep,
    Receive,
    ReduceBucket,
    ReduceGradients,
    Send,
    Transfer,
    WeightPart,
)
from recycle.ir.kinds import KIND_CLASSES, Need, Origin, ValueKind, kinds_where
from recycle.ir.pieces import work
from recycle.ir.schedule import Schedule
from recycle.ir.values import Unmet, Why


class Cause(IntEnum):
    """Why one row waits for another."""

    DATA = 0
    """a value made or received on the same worker (in a compute-only schedule: on any worker)"""
    TRANSFER = 1
    """a receive waits for its send"""
    REDUCE = 2
    """all gradients of a stage, or all reduces of the commit"""
    STEP = 3
    """a step waits for its reduce, or for the commit"""
    ORDER = 4
    """the worker's own program order"""
    LANE = 5
    """one transfer at a time per directed pair of workers"""


@dataclass(frozen=True)
class Dependencies:
    """A graph over the rows of a schedule.

    Nodes 0 to rows-1 are the rows; the nodes after them are joins without duration: one per group of tied stages
    ("all gradients of the group are there"), then the commit ("all reduces are done"), then "all steps are done", then
    one per tied stage that some worker reduces beside another of its group ("all hosts have come to its reduce"), then
    one per bucket of a stage that REDUCE_BUCKET sums ("all gradients of the bucket are there"), then one per stage with
    a GATHER_PARAMS ("all hosts have stepped").

    Attributes:
        rows: number of schedule rows.
        nodes: rows plus joins.
        source, target: edges of one iteration.
        cause: `Cause` of each edge.
        carried_source, carried_target: edges from one iteration into the next.
        missing: needs that nothing meets, by row, then reason.
        sends: row of the send that each row receives from, -1 for other rows.
    """

    rows: int
    nodes: int
    source: Rows
    target: Rows
    cause: npt.NDArray[np.uint8]
    carried_source: Rows
    carried_target: Rows
    missing: Unmet
    sends: Rows

    @property
    def between_rows(self) -> Rows:
        """The edges of one iteration that lead from row to row."""
        return np.flatnonzero((self.source < self.rows) & (self.target < self.rows))

    @cached_property
    def into_joins(self) -> Rows:
        """The edges from rows to joins."""
        return np.flatnonzero((self.source < self.rows) & (self.target >= self.rows))

    @cached_property
    def out_of_joins(self) -> Rows:
        """The edges from joins to rows."""
        return np.flatnonzero((self.source >= self.rows) & (self.target < self.rows))


def dependencies(schedule: Schedule) -> Dependencies:
    """The dependency graph of a schedule, lowered or compute-only. Never raises: what does not fit is in `missing`."""
    return _Builder(schedule).build()


@dataclass(frozen=True)
class Crossings:
    """What one worker makes and another needs, in a compute-only schedule; each value once per worker that needs it.

    Attributes:
        value: `ValueKind`.
        stage, micro_batch: what is handed over; the micro-batch as global id.
        producer: row that makes it; where several do, the first.
        consumer: row that needs it; where several of a worker do, the first.
    """

    value: Rows
    stage: Rows
    micro_batch: Rows
    producer: Rows
    consumer: Rows


def crossings(schedule: Schedule) -> Crossings:
    """What has to be transferred. Values that nobody makes are left out."""
    return _Builder(schedule).crossings()


class _Builder:
    """Collects edges kind by kind; each method reads the tables above for all rows of one kind."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule, self.shape, self.columns = schedule, schedule.shape, schedule.columns
        self.work = work(schedule)
        self.micro_batches = self.shape.global_micro_batches
        self.edges: list[tuple[Rows, Rows, Cause]] = []
        self.carried: list[tuple[Rows, Rows]] = []
        self.missing: list[list[Rows]] = []
        self.sends = np.full(len(self.columns), -1, dtype=np.int64)
        valid = np.flatnonzero(self.work.valid)
        kind = self.work.kind[valid]
        self._by_kind, self._kind_offsets = valid[np.argsort(kind, kind="stable")], offsets_of(kind, len(KIND_CLASSES))
        self.producer = {kind: self._producers(kind) for kind in ValueKind}

    def build(self) -> Dependencies:
        rows = len(self.columns)
        self.has_transfers = bool(self._rows(Transfer).size)
        for consumer in (cls for cls in KIND_CLASSES if issubclass(cls, Compute | Send)):
            for need in consumer.row.needs:
                self._consumers(consumer, need)
        for value, (send, receive) in CARRIERS.items():
            self._receivers(send, receive, value)
        nodes = self._stage_wide(rows)
        sources, targets, causes = zip(*self.edges, strict=True)
        source, target = np.concatenate(sources), np.concatenate(targets)
        cause = np.repeat(np.array(causes, dtype=np.uint8), [len(edges) for edges in sources])
        carried_source, carried_target = (np.concatenate(ends) for ends in zip(*self.carried, strict=True))
        missing = self._unmet()
        return Dependencies(rows, nodes, source, target, cause, carried_source, carried_target, missing, self.sends)

    def _unmet(self) -> Unmet:
        none = [np.empty(0, dtype=np.int64)] * 5
        unmet = Unmet(*(np.concatenate(parts) for parts in zip(none, *self.missing, strict=True)))
        return unmet.take(np.lexsort((unmet.why, unmet.row)))

    def crossings(self) -> Crossings:
        found: list[tuple[Rows, Rows, Rows]] = []
        for consumer in (cls for cls in KIND_CLASSES if issubclass(cls, Compute)):
            for value, offset, origin in consumer.row.needs:
                if origin == Origin.ANY_WORKER:
                    pieces, made_by = self._lookup(value, self._rows(consumer), offset)
                    away = self.work.worker[pieces] != self.work.worker[made_by]
                    found.append((pieces[away], made_by[away], np.full(int(away.sum()), value, dtype=np.int64)))
        pieces, made_by, value_of = (np.concatenate(part) for part in zip(*found, strict=True))
        stage, micro_batch = self.work.stage[made_by], self.work.micro_batch[made_by]
        key = (value_of * self.shape.stages + stage) * self.micro_batches + micro_batch
        key = key * self.shape.worker_count + self.work.worker[pieces]
        order = np.lexsort((pieces, key))
        first = order[np.diff(key[order], prepend=-1) != 0]
        row = self.work.row
        return Crossings(value_of[first], stage[first], micro_batch[first], row[made_by[first]], row[pieces[first]])

    def _rows(self, *classes: type[Instruction]) -> Rows:
        """Pieces of work (not rows) of these classes that lie inside the shape."""
        kinds = [cls.kind for cls in KIND_CLASSES if issubclass(cls, classes)]
        found = [self._by_kind[self._kind_offsets[kind] : self._kind_offsets[kind + 1]] for kind in kinds]
        found = [pieces for pieces in found if len(pieces)]
        return np.sort(np.concatenate(found)) if len(found) > 1 else found[0] if found else self._by_kind[:0]

    def _producers(self, value: ValueKind) -> Rows:
        """Piece that makes `value` of (stage, micro-batch), flat; -1 where none does; the first where several do."""
        table = np.full(self.shape.stages * self.micro_batches, -1, dtype=np.int64)
        pieces = self._rows(*kinds_where(lambda row: value in row.produces))[::-1]
        table[self.work.stage[pieces] * self.micro_batches + self.work.micro_batch[pieces]] = pieces
        return table

    def _lookup(self, value: ValueKind, pieces: Rows, offset: int) -> tuple[Rows, Rows]:
        """The pieces whose need exists at all, and who makes the value (-1: nobody, which is noted as missing)."""
        stage = self.work.stage[pieces] + offset
        exists = (stage >= 0) & (stage < self.shape.stages)
        pieces, stage = pieces[exists], stage[exists]
        made_by = self.producer[value][stage * self.micro_batches + self.work.micro_batch[pieces]]
        self._miss(pieces[made_by < 0], Why.NO_PRODUCER, value, offset)
        return pieces[made_by >= 0], made_by[made_by >= 0]

    def _miss(self, pieces: Rows, why: Why, value: ValueKind, offset: int) -> None:
        if not len(pieces):
            return
        alike = (np.full(len(pieces), number, dtype=np.int64) for number in (why, value))
        work = self.work
        self.missing.append([work.row[pieces], *alike, work.stage[pieces] + offset, work.micro_batch[pieces]])

    def _edge(self, source: Rows, target: Rows, cause: Cause) -> None:
        self.edges.append((source, target, cause))

    def _key(self, kind_pieces: Rows, worker: Rows, stage: Rows) -> Rows:
        return (worker * (self.shape.stages + 2) + stage + 1) * self.micro_batches + self.work.micro_batch[kind_pieces]

    def _consumers(self, consumer: type[Compute | Send], need: Need) -> None:
        """A need of a compute or send: met by the local producer, the local receive, or (compute-only) any producer."""
        row, worker = self.work.row, self.work.worker
        value, offset, origin = need
        pieces, made_by = self._lookup(value, self._rows(consumer), offset)
        local = worker[pieces] == worker[made_by]
        self._edge(row[made_by[local]], row[pieces[local]], Cause.DATA)
        pieces, made_by = pieces[~local], made_by[~local]
        if origin != Origin.ANY_WORKER:
            self._miss(pieces, Why.NOT_LOCAL, value, offset)
            return
        if not self.has_transfers:
            self._edge(row[made_by], row[pieces], Cause.DATA)
            return
        receive = CARRIERS[value][1]
        receives = self._rows(receive)
        received = find(
            self._key(receives, worker[receives], self.work.stage[receives] + receive.row.needs[0].offset),
            self._key(pieces, worker[pieces], self.work.stage[pieces] + offset),
        )
        there = received >= 0
        self._edge(row[np.where(there, np.append(receives, -1)[received], made_by)], row[pieces], Cause.DATA)
        self._miss(pieces[~there], Why.NOT_RECEIVED, value, offset)

    def _receivers(self, send: type[Send], receive: type[Receive], value: ValueKind) -> None:
        """The n-th receive of a value from a peer pairs with the peer's n-th send of that value to here."""
        row, worker, stage = self.work.row, self.work.worker, self.work.stage
        offset = receive.row.needs[0].offset
        sends, receives = self._rows(send), self._rows(receive)
        peer = self.columns.peer.astype(np.int64)
        lane = self.shape.worker_count
        send_keys = self._key(sends, worker[sends] * lane + peer[row[sends]], stage[sends])
        keys = self._key(receives, peer[row[receives]] * lane + worker[receives], stage[receives] + offset)
        most = len(sends) + len(receives) + 1
        sent, received, lone = _matched(sends, _numbered(send_keys, most), receives, _numbered(keys, most))
        self._edge(row[sent], row[received], Cause.TRANSFER)
        self.sends[row[received]] = row[sent]
        self._miss(lone, Why.NO_SEND, value, offset)

    def _stage_wide(self, rows: int) -> int:
        """REDUCE_GRAD, STEP, their joins, and what is carried into the next iteration; how many nodes there are."""
        row, worker, stage = self.work.row, self.work.worker, self.work.stage
        groups = tie_groups(self.shape.stages, self.schedule.ties) + rows
        commit, all_steps = int(groups.max()) + 1, int(groups.max()) + 2
        gradients = self._rows(*kinds_where(lambda row: ValueKind.WEIGHT_GRADIENT in row.produces))
        reduces, steps = self._rows(ReduceGradients), self._rows(OptimizerStep)
        begins = self._rows(*(cls for cls in KIND_CLASSES if issubclass(cls, Compute) and _begins_work(cls)))
        self._edge(row[gradients], groups[stage[gradients]], Cause.REDUCE)
        self._edge(groups[stage[reduces]], row[reduces], Cause.REDUCE)
        self._edge(row[reduces], np.full(len(reduces), commit), Cause.REDUCE)
        host = worker * self.shape.stages + stage
        apart = self._reduced_apart(groups, np.unique(host[reduces]))
        own = np.searchsorted(apart, stage[reduces])
        is_apart = np.isin(stage[reduces], apart)
        self._edge(all_steps + 1 + own[is_apart], row[reduces[is_apart]], Cause.REDUCE)
        for follower in KIND_CLASSES:
            if follower.row.follows is None:
                continue
            firsts, thens = self._rows(follower.row.follows), self._rows(follower)
            before, after, lone = _matched(firsts, host[firsts], thens, host[thens])
            self._edge(row[before], row[after], Cause.STEP)
            if len(lone):
                lone = row[lone]
                none = np.full(len(lone), -1, dtype=np.int64)
                self.missing.append([lone, np.full(len(lone), Why.NO_PREDECESSOR, dtype=np.int64), none, none, none])
        nodes = self._buckets(all_steps + 1 + len(apart), gradients, reduces)
        nodes = self._gathers(nodes, steps, begins)
        self._edge(row[steps], np.full(len(steps), all_steps), Cause.STEP)
        if self.schedule.optimizer == "barrier":
            self._edge(np.full(len(steps), commit), row[steps], Cause.STEP)
            self.carried.append((np.full(len(begins), all_steps), row[begins]))
        else:
            self.carried.append((np.full(len(steps), commit), row[steps]))
            before, after, _ = _matched(steps, host[steps], begins, host[begins])
            self.carried.append((row[before], row[after]))
        return nodes

    def _buckets(self, first: int, gradients: Rows, reduces: Rows) -> int:
        """The joins of buckets, from node `first` on; the number behind the last one.

        Of what adds to all buckets of a stage, each worker's last one stands for all: they are in its program's order.
        """
        row, stage, bucket = self.work.row, self.work.stage, self.work.bucket
        begins = self._rows(ReduceBucket)
        if not len(begins):
            return first
        stages, buckets = self.shape.stages, self.schedule.buckets
        host = self.work.worker * stages + stage
        summed, place = np.unique(stage[begins] * buckets + bucket[begins], return_inverse=True)
        joins = np.full(stages * buckets, -1, dtype=np.int64)
        joins[summed] = first + np.arange(len(summed))
        self._edge(joins[summed][place], row[begins], Cause.REDUCE)
        is_part = self.work.kind[gradients] == WeightPart.kind
        parts, wholes = gradients[is_part], gradients[~is_part]
        join = joins[stage[parts] * buckets + bucket[parts]]
        self._edge(row[parts[join >= 0]], join[join >= 0], Cause.REDUCE)
        last = wholes[np.lexsort((row[wholes], host[wholes]))]
        last = last[np.diff(host[last], append=-1) != 0]
        join = joins.reshape(stages, buckets)[stage[last]]
        of, number = np.nonzero(join >= 0)
        self._edge(row[last[of]], join[of, number], Cause.REDUCE)
        # Of several reduces of a stage on one worker, which is an error, the first one ends the sums.
        ends, begun, _ = _matched(reduces, host[reduces], begins, host[begins])
        self._edge(row[begun], row[ends], Cause.REDUCE)
        return first + len(summed)

    def _gathers(self, first: int, steps: Rows, begins: Rows) -> int:
        """The joins of gathers, from node `first` on, and what waits for a gather; the number behind the last join."""
        row, worker, stage = self.work.row, self.work.worker, self.work.stage
        gathers = self._rows(GatherParameters)
        if not len(gathers):
            return first
        gathered, place = np.unique(stage[gathers], return_inverse=True)
        self._edge(first + place, row[gathers], Cause.STEP)
        join = find(gathered, stage[steps])
        self._edge(row[steps[join >= 0]], first + join[join >= 0], Cause.STEP)
        host = worker * self.shape.stages + stage
        before, after, _ = _matched(gathers, host[gathers], begins, host[begins])
        self.carried.append((row[before], row[after]))
        return first + len(gathered)

    def _reduced_apart(self, groups: Rows, hosts: Rows) -> Rows:
        """The stages of which some worker reduces another tied stage too, ascending; `hosts` as worker * S + stage.

        Everywhere else a worker comes to the reduce of a stage when it comes to its group's.
        """
        worker, stage = np.divmod(hosts, self.shape.stages)
        _, place, count = np.unique(
            worker * (int(groups.max()) + 1) + groups[stage], return_inverse=True, return_counts=True
        )
        return np.unique(stage[count[place] > 1])


def _begins_work(cls: type[Instruction]) -> bool:
    """Whether a kind is the first of a micro-batch at its stage: it needs nothing that the stage made before."""
    return all(need.origin != Origin.STAGE for need in cls.row.needs)


def tie_groups(stages: int, ties: tuple[tuple[int, ...], ...]) -> Rows:
    """Group number of each stage, dense from 0; tied stages share one."""
    leader = list(range(stages))

    def first(stage: int) -> int:
        while leader[stage] != stage:
            leader[stage] = leader[leader[stage]]
            stage = leader[stage]
        return stage

    for tie in dict.fromkeys(ties):
        merged = [first(stage) for stage in tie if 0 <= stage < stages]
        lowest = min(merged, default=0)
        for stage in merged:
            leader[stage] = lowest
    return np.unique([first(stage) for stage in range(stages)], return_inverse=True)[1].astype(np.int64)


def find(keys: Rows, wanted: Rows) -> Rows:
    """For each wanted key its (first) place in `keys`, -1 where it is not there."""
    if not len(keys):
        return np.full(len(wanted), -1, dtype=np.int64)
    order = np.argsort(keys, kind="stable")
    place = np.minimum(np.searchsorted(keys[order], wanted, side="left"), len(keys) - 1)
    return np.where(keys[order[place]] == wanted, order[place], -1)


def _matched(first: Rows, first_keys: Rows, then: Rows, then_keys: Rows) -> tuple[Rows, Rows, Rows]:
    """(of `first` the one with the same key as each of `then` that has one, these of `then`, the others of `then`)."""
    found = find(first_keys, then_keys)
    there = found >= 0
    return first[found[there]], then[there], then[~there]


def _numbered(keys: Rows, most: int) -> Rows:
    """Keys made distinct by their occurrence: the n-th occurrence of a key becomes key * most + n."""
    order = np.argsort(keys, kind="stable")
    ordered = keys[order]
    begins = np.flatnonzero(np.concatenate([[True], ordered[1:] != ordered[:-1]])) if len(keys) else order
    sizes = np.diff(np.concatenate([begins, [len(keys)]]))
    numbered = np.empty_like(keys)
    numbered[order] = ordered * most + np.arange(len(keys)) - np.repeat(begins, sizes)
    return numbered
