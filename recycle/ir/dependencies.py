"""The dependency rule: `needs`, `inputs` and `produced` of an instruction, and `dependencies` of a schedule.

- A value from another worker passes through SEND and RECV; in a compute-only schedule directly.
- REDUCE_GRAD needs every weight gradient of its stage and of tied stages, on all hosts, and the buckets begun before.
- REDUCE_BUCKET needs every weight gradient of its bucket, on all hosts.
- STEP needs the REDUCE_GRAD of its stage; with the barrier optimizer, all REDUCE_GRADs (the commit).
- GATHER_PARAMS needs the STEPs of its stage on all hosts.
- Any other kind needs the instruction that it follows; WAIT_SEND needs the end of its SEND.
- I and B need the RELOAD of their stage and micro-batch, if the worker has one.

Carried into the next iteration: the first instruction of a micro-batch at a stage (F, R) needs the STEP and
GATHER_PARAMS of the stage on that worker (barrier: all STEPs), and the next STEP needs the commit.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from typing import NamedTuple

import numpy as np

from recycle.ir.columns import Flags, Rows, occurrences
from recycle.ir.instruction import (
    CARRIERS,
    Compute,
    GatherParameters,
    Instruction,
    OptimizerStep,
    OverlappedPair,
    Receive,
    ReduceBucket,
    ReduceGradients,
    Reload,
    Send,
    Transfer,
    WaitSend,
    WeightPart,
)
from recycle.ir.kinds import KIND_CLASSES, Codes, Need, Origin, ValueKind, makers_of
from recycle.ir.operations import operations_of
from recycle.ir.schedule import Schedule
from recycle.job.shape import MicroBatch


class Value(NamedTuple):
    """One value: the `kind` that `stage` computes for `micro_batch`."""

    kind: ValueKind
    stage: int
    micro_batch: MicroBatch


def needs(instruction: Instruction, stages: int) -> tuple[Value, ...]:
    """Return the values that one instruction waits for, in a model of `stages` stages."""
    if isinstance(instruction, OverlappedPair):
        return needs(instruction.forward, stages) + needs(instruction.backward, stages)
    if not isinstance(instruction, Compute | Transfer):
        return ()
    return tuple(filter(None, (_needed(instruction, need, stages) for need in instruction.row.needs)))


def inputs(instruction: Compute | Transfer, stages: int) -> tuple[Value | None, ...]:
    """Return the values passed to one instruction, in the order of its row; None beyond the ends of the model."""
    return tuple(_needed(instruction, need, stages) for need in instruction.row.needs if need.origin != Origin.STAGE)


def _needed(instruction: Compute | Transfer, need: Need, stages: int) -> Value | None:
    stage = instruction.stage + need.offset
    return Value(need.value, stage, instruction.micro_batch) if 0 <= stage < stages else None


def produced(instruction: Instruction) -> tuple[Value, ...]:
    """Return the values that one instruction produces."""
    if isinstance(instruction, OverlappedPair):
        return produced(instruction.forward) + produced(instruction.backward)
    if not isinstance(instruction, Compute):
        return ()
    return tuple(Value(kind, instruction.stage, instruction.micro_batch) for kind in instruction.row.produces)


class Why(IntEnum):
    """Why a need is unmet."""

    NO_PRODUCER = 0
    NOT_LOCAL = 1
    """the value is produced on another worker, but a send, W or B needs it on its own worker"""
    NOT_RECEIVED = 2
    """the value is produced on another worker and never received on this worker"""
    NO_SEND = 3
    """a receive whose peer never sends the value to this worker"""
    NO_PREDECESSOR = 4
    """a step without a reduce of its stage on the same worker, or another kind without its predecessor"""


@dataclass(frozen=True, eq=False)
class Unmet:
    """All unmet needs, as columns.

    Attributes:
        row, why: row with the need, and its `Why`.
        value: `ValueKind` of the missing value, -1 for NO_PREDECESSOR.
        stage, micro_batch: stage and global micro-batch id of the missing value.
    """

    row: Rows
    why: Rows
    value: Rows
    stage: Rows
    micro_batch: Rows

    def __len__(self) -> int:
        return len(self.row)

    def take(self, places: Rows | Flags) -> Unmet:
        """Return the entries at these indices."""
        return Unmet(*(column[places] for column in vars(self).values()))

    def with_reason(self, why: Why) -> Unmet:
        """Return the entries with this reason."""
        return self.take(self.why == why)


class Cause(IntEnum):
    """Why one row waits for another."""

    DATA = 0
    """a value produced or received on the same worker (in a compute-only schedule: on any worker)"""
    TRANSFER = 1
    REDUCE = 2
    """all gradients of a stage, or all reduces of the commit"""
    STEP = 3
    """a step waits for its reduce, or for the commit"""
    ORDER = 4
    LANE = 5
    """one transfer at a time per directed worker pair"""


@dataclass(frozen=True)
class Crossings:
    """Values that cross workers in a compute-only schedule, once per consuming worker.

    `producer` and `consumer` are the first rows that produce the value, and that need it on the consuming worker.
    """

    value: Rows
    stage: Rows
    micro_batch: Rows
    producer: Rows
    consumer: Rows


@dataclass(frozen=True)
class Dependencies:
    """The dependency graph over the rows of a schedule.

    Nodes 0 to rows-1 are the rows. The nodes after them are joins without duration, in this order:

    - all gradients are ready, per reduced group of tied stages
    - all reduces are done (the commit); all steps are done
    - all hosts arrived, per tied stage that some worker reduces apart from its group
    - all gradients of the bucket are ready, per stage and bucket of REDUCE_BUCKET
    - all hosts stepped, per stage with a GATHER_PARAMS

    Attributes:
        rows, nodes: number of schedule rows, and of rows and joins.
        source, target, cause: edges within one iteration, with their `Cause`.
        carried_source, carried_target: edges from one iteration into the next.
        missing: unmet needs, sorted by row, then reason.
        sends: row of the matching send of each receive, -1 for other rows.
        crossings: transfers that lowering must add; empty for lowered schedules.
    """

    rows: int
    nodes: int
    source: Rows
    target: Rows
    cause: Codes
    carried_source: Rows
    carried_target: Rows
    missing: Unmet
    sends: Rows
    crossings: Crossings

    @property
    def between_rows(self) -> Rows:
        """Indices of the edges from rows to rows."""
        return np.flatnonzero((self.source < self.rows) & (self.target < self.rows))

    @property
    def received(self) -> tuple[Rows, Rows]:
        """(receive, consumer) rows of each received value that is consumed."""
        edges = self.between_rows
        edges = edges[self.sends[self.source[edges]] >= 0]
        return self.source[edges], self.target[edges]

    @cached_property
    def into_joins(self) -> Rows:
        """Indices of the edges from rows to joins."""
        return np.flatnonzero((self.source < self.rows) & (self.target >= self.rows))

    @cached_property
    def out_of_joins(self) -> Rows:
        """Indices of the edges from joins to rows."""
        return np.flatnonzero((self.source >= self.rows) & (self.target < self.rows))


def dependencies(schedule: Schedule) -> Dependencies:
    """Build the dependency graph of a lowered or compute-only schedule. Never raises: unmet needs are in `missing`."""
    return _Builder(schedule).build()


class _Builder:
    def __init__(self, schedule: Schedule) -> None:
        self.schedule, self.shape, self.columns = schedule, schedule.shape, schedule.columns
        self.ops = operations_of(schedule)
        self.select = self.ops.select
        self.micro_batches = self.shape.global_micro_batches
        self.nodes = len(self.ops.row)
        self.edges: list[tuple[Rows, Rows, Cause]] = []
        self.carried: list[tuple[Rows, Rows]] = []
        self.missing: list[list[Rows]] = []
        self.crossing: list[tuple[Rows, Rows, Rows]] = []
        self.sends = np.full(len(self.columns), -1, dtype=np.int64)
        self.has_transfers = bool(self.select(Transfer).size)
        self.producer = {value: self.ops.first(self.select(*makers_of(value))) for value in ValueKind}

    def build(self) -> Dependencies:
        for cls in KIND_CLASSES:
            for need in cls.row.needs if issubclass(cls, Compute | Send) else ():
                self._consumers(cls, need)
        for value, (send, receive) in CARRIERS.items():
            self._receivers(send, receive, value)
        self._stage_wide()
        rows, joins = len(self.columns), self.nodes - len(self.ops.row)
        node = np.append(self.ops.row, rows + np.arange(joins))
        sources, targets, causes = zip(*self.edges, strict=True)
        cause = np.repeat(np.array(causes, dtype=np.uint8), [len(edges) for edges in sources])
        source, target = (node[np.concatenate(ends)] for ends in (sources, targets))
        carried_source, carried_target = (node[np.concatenate(ends)] for ends in zip(*self.carried, strict=True))
        edges = source, target, cause, carried_source, carried_target
        return Dependencies(rows, rows + joins, *edges, self._unmet(), self.sends, self._crossings())

    def _unmet(self) -> Unmet:
        none = [np.empty(0, dtype=np.int64)] * 5
        unmet = Unmet(*(np.concatenate(parts) for parts in zip(none, *self.missing, strict=True)))
        return unmet.take(np.lexsort((unmet.why, unmet.row)))

    def _crossings(self) -> Crossings:
        none = np.empty(0, dtype=np.int64)
        consumers, producer_op, value = (
            np.concatenate(part) for part in zip((none, none, none), *self.crossing, strict=True)
        )
        stage, micro_batch = self.ops.stage[producer_op], self.ops.micro_batch[producer_op]
        key = (value * self.ops.cells + self.ops.cell[producer_op]) * self.shape.worker_count
        key += self.ops.worker[consumers]
        order = np.lexsort((consumers, key))
        first = order[np.diff(key[order], prepend=-1) != 0]
        row = self.ops.row
        return Crossings(value[first], stage[first], micro_batch[first], row[producer_op[first]], row[consumers[first]])

    def _add_unmet(self, consumers: Rows, why: Why, value: int, offset: int) -> None:
        if len(consumers):
            constants = (np.full(len(consumers), number, dtype=np.int64) for number in (why, value))
            ops = self.ops
            self.missing.append(
                [ops.row[consumers], *constants, ops.stage[consumers] + offset, ops.micro_batch[consumers]]
            )

    def _edge(self, source: Rows, target: Rows, cause: Cause) -> None:
        self.edges.append((source, target, cause))

    def _key(self, ops: Rows, worker: Rows, offset: int) -> Rows:
        stage = self.ops.stage[ops] + offset
        return (worker * (self.shape.stages + 2) + stage + 1) * self.micro_batches + self.ops.micro_batch[ops]

    def _consumers(self, consumer: type[Instruction], need: Need) -> None:
        worker, (value, offset, origin) = self.ops.worker, need
        consumers = self.select(consumer)
        stage = self.ops.stage[consumers] + offset
        exists = (stage >= 0) & (stage < self.shape.stages)
        consumers = consumers[exists]
        producer_op = self.producer[value][self.ops.cell[consumers] + offset * self.micro_batches]
        self._add_unmet(consumers[producer_op < 0], Why.NO_PRODUCER, value, offset)
        consumers, producer_op = consumers[producer_op >= 0], producer_op[producer_op >= 0]
        local = worker[consumers] == worker[producer_op]
        self._edge(producer_op[local], consumers[local], Cause.DATA)
        consumers, producer_op = consumers[~local], producer_op[~local]
        if origin != Origin.ANY_WORKER:
            self._add_unmet(consumers, Why.NOT_LOCAL, value, offset)
            return
        if not self.has_transfers:
            self._edge(producer_op, consumers, Cause.DATA)
            self.crossing.append((consumers, producer_op, np.full(len(consumers), value, dtype=np.int64)))
            return
        receive = CARRIERS[value][1]
        receives = self.select(receive)
        received = find(
            self._key(receives, worker[receives], receive.row.needs[0].offset),
            self._key(consumers, worker[consumers], offset),
        )
        self._edge(np.where(received >= 0, np.append(receives, -1)[received], producer_op), consumers, Cause.DATA)
        self._add_unmet(consumers[received < 0], Why.NOT_RECEIVED, value, offset)

    def _receivers(self, send: type[Send], receive: type[Receive], value: ValueKind) -> None:
        row, worker, offset = self.ops.row, self.ops.worker, receive.row.needs[0].offset
        sends, receives = self.select(send), self.select(receive)
        peer, lane = self.columns.peer.astype(np.int64), self.shape.worker_count
        send_keys = self._key(sends, worker[sends] * lane + peer[row[sends]], 0)
        keys = self._key(receives, peer[row[receives]] * lane + worker[receives], offset)
        most = len(sends) + len(receives) + 1
        sent, received, unmatched = _matched(
            sends, send_keys * most + occurrences(send_keys), receives, keys * most + occurrences(keys)
        )
        self._edge(sent, received, Cause.TRANSFER)
        self.sends[row[received]] = row[sent]
        self._add_unmet(unmatched, Why.NO_SEND, value, offset)

    def _stage_wide(self) -> None:
        stage, shape = self.ops.stage, self.shape
        group, host = tie_groups(shape.stages, self.schedule.ties), self.ops.host
        gradients = self.select(*makers_of(ValueKind.WEIGHT_GRADIENT))
        reduces, steps = self.select(ReduceGradients), self.select(OptimizerStep)
        computes = [cls for cls in KIND_CLASSES if issubclass(cls, Compute)]
        begins = self.select(*(c for c in computes if all(need.origin != Origin.STAGE for need in c.row.needs)))
        self._join(gradients, group[stage[gradients]], reduces, group[stage[reduces]], Cause.REDUCE)
        commit, all_steps = self.nodes, self.nodes + 1
        self.nodes += 2
        self._edge(reduces, np.full(len(reduces), commit), Cause.REDUCE)
        apart = reduces[np.isin(stage[reduces], self._reduced_apart(group, np.unique(host[reduces])))]
        self._join(apart[:0], stage[:0], apart, stage[apart], Cause.REDUCE)  # the join waits for arrivals only
        key = host * (self.micro_batches + 1) + self.ops.micro_batch
        for follower in KIND_CLASSES:
            if follower.row.follows is None:
                continue
            predecessors, followers = self.select(follower.row.follows), self.select(follower)
            before, after, unmatched = _matched(predecessors, key[predecessors], followers, key[followers])
            cause = Cause.STEP
            if issubclass(follower, WaitSend):  # a value may be sent to several workers
                after, before, _ = _matched(followers, key[followers], predecessors, key[predecessors])
                cause = Cause.DATA
            self._edge(before, after, cause)
            self._add_unmet(unmatched, Why.NO_PREDECESSOR, -1, 0)
        reloads, backwards = self.select(Reload), self.select(*makers_of(ValueKind.INPUT_GRADIENT))
        self._edge(*_matched(reloads, key[reloads], backwards, key[backwards])[:2], Cause.DATA)
        self._buckets(host, gradients, reduces)
        gathers = self.select(GatherParameters)
        self._join(steps, stage[steps], gathers, stage[gathers], Cause.STEP)
        # The next iteration's first work at a stage waits for the first GATHER_PARAMS of the stage on its worker.
        self.carried.append(_matched(gathers, host[gathers], begins, host[begins])[:2])
        self._edge(steps, np.full(len(steps), all_steps), Cause.STEP)
        if self.schedule.optimizer == "barrier":
            self._edge(np.full(len(steps), commit), steps, Cause.STEP)
            self.carried.append((np.full(len(begins), all_steps), begins))
        else:
            self.carried.append((np.full(len(steps), commit), steps))
            self.carried.append(_matched(steps, host[steps], begins, host[begins])[:2])

    def _buckets(self, host: Rows, gradients: Rows, reduces: Rows) -> None:
        row, buckets, sums = self.ops.row, self.schedule.buckets, self.select(ReduceBucket)
        if not len(sums):
            return
        key = self.ops.stage * buckets + self.ops.bucket
        is_part = self.ops.kind[gradients] == WeightPart.kind
        parts, wholes = gradients[is_part], gradients[~is_part]
        last = wholes[np.lexsort((row[wholes], host[wholes]))]
        last = last[np.diff(host[last], append=-1) != 0]
        added = self.ops.stage[last, None] * buckets + np.arange(buckets)
        adds, keys = np.append(parts, np.repeat(last, buckets)), np.append(key[parts], added)
        self._join(adds, keys, sums, key[sums], Cause.REDUCE)
        # Several reduces of one stage on one worker are an error; the first one ends the sums.
        ends, begun, _ = _matched(reduces, host[reduces], sums, host[sums])
        self._edge(begun, ends, Cause.REDUCE)

    def _join(self, sources: Rows, source_keys: Rows, targets: Rows, target_keys: Rows, cause: Cause) -> None:
        keys, place = np.unique(target_keys, return_inverse=True)
        self._edge(self.nodes + place, targets, cause)
        join = find(keys, source_keys)
        self._edge(sources[join >= 0], self.nodes + join[join >= 0], cause)
        self.nodes += len(keys)

    def _reduced_apart(self, groups: Rows, hosts: Rows) -> Rows:
        """Return the stages for which some worker also reduces another tied stage; `hosts` is worker * S + stage."""
        worker, stage = np.divmod(hosts, self.shape.stages)
        _, place, count = np.unique(
            worker * (int(groups.max()) + 1) + groups[stage], return_inverse=True, return_counts=True
        )
        return np.unique(stage[count[place] > 1])


def tie_groups(stages: int, ties: tuple[tuple[int, ...], ...]) -> Rows:
    """Return the group number of each stage, dense from 0. Tied stages share a group."""
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
    """Return the first index in `keys` of each wanted key, -1 if absent."""
    if not len(keys) or not len(wanted):
        return np.full(len(wanted), -1, dtype=np.int64)
    order = np.argsort(keys, kind="stable")
    place = np.minimum(np.searchsorted(keys[order], wanted, side="left"), len(keys) - 1)
    return np.where(keys[order[place]] == wanted, order[place], -1)


def _matched(first: Rows, first_keys: Rows, then: Rows, then_keys: Rows) -> tuple[Rows, Rows, Rows]:
    index = find(first_keys, then_keys)
    is_matched = index >= 0
    return first[index[is_matched]], then[is_matched], then[~is_matched]
