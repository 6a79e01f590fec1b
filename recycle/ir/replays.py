"""Placement of replays: into the gaps of a schedule, spread over several iterations.

In `rounds` iterations every micro-batch of every stage is replayed once, by another live host of the stage than the
host that ran it; the peers of a host alternate. A replay goes into the first gap that starts after its inputs are ready
and has room for an activation, else after the worker's compute. One lowered schedule holds the replays of all
iterations, and an iteration runs it without the others.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from typing import Literal, NamedTuple

import numpy as np

from recycle.ir.columns import Flags, Floats, Rows, occurrences
from recycle.ir.compiled import COMPILE_FROM
from recycle.ir.dependencies import dependencies, find
from recycle.ir.event_graph import event_graph, load_compiled
from recycle.ir.instruction import Forward, Instruction, ReduceGradients, Replay, Transfer
from recycle.ir.kinds import AsyncInstruction, is_kind, makers_of
from recycle.ir.lower import insert, lower, lowered_graph, with_first_micro_batches
from recycle.ir.memory import TOLERANCE, held_before
from recycle.ir.operations import operations_of
from recycle.ir.schedule import Schedule
from recycle.ir.simulate import time_graph
from recycle.job.cut import profile_of_cut
from recycle.job.profile import Profile
from recycle.job.shape import MicroBatch, Worker

EVERY_ITERATION = -1
"""Round of replays that run in every iteration."""
_FEW_EVENTS = 5 * COMPILE_FROM
"""Number of timed rows up to which plain Python is faster than loading compiled loops."""
MOST_ROUNDS = 1_000_000


class ReplayTarget(NamedTuple):
    """The target of a replay: the work of a stage on a micro-batch."""

    stage: int
    micro_batch: MicroBatch


Checked = ReplayTarget  # previous name


class ReplaySlots(NamedTuple):
    """Replays and their rounds, as columns, sorted by worker and round; `micro_batch` is the global id.

    A replay runs in iterations equal to `round` modulo the number of rounds; in every iteration for `EVERY_ITERATION`.
    """

    worker: Rows
    stage: Rows
    micro_batch: Rows
    round: Rows

    def take(self, places: Rows | Flags) -> ReplaySlots:
        """Return the entries at these indices."""
        return ReplaySlots(*(column[places] for column in self))


IterationKey = tuple[int, int]
NO_SLOTS = ReplaySlots(*np.empty((4, 0), dtype=np.int64))


@dataclass(frozen=True, eq=False)
class Rotation:
    """A schedule with replays that rotate over iterations.

    `whole` is lowered and has the replays of all rounds, `slots`. A full rotation takes `rounds` iterations; 0 for
    none. `micro_batches` returns how many micro-batches of each pipeline an iteration has, if not all.
    """

    whole: Schedule
    rounds: int
    slots: ReplaySlots = NO_SLOTS
    micro_batches: Callable[[int], int] | None = None
    _programs: dict[tuple[Worker, IterationKey], tuple[Instruction, ...]] = field(default_factory=dict, repr=False)
    _targets: dict[IterationKey, frozenset[ReplayTarget]] = field(default_factory=dict, repr=False)

    def key_of(self, iteration: int) -> IterationKey:
        """Return round and micro-batches of an iteration, on which its programs depend."""
        count = self.whole.shape.micro_batches if self.micro_batches is None else self.micro_batches(iteration)
        return self.round_of(iteration), count

    def round_of(self, iteration: int) -> int:
        """Return the round of an iteration; `EVERY_ITERATION` if the iteration has no rotating replays."""
        number = iteration % self.rounds if self.rounds else EVERY_ITERATION
        return number if number in self._used else EVERY_ITERATION

    @cached_property
    def _used(self) -> frozenset[int]:
        return frozenset(self.slots.round.tolist())

    @cached_property
    def slot_of_rows(self) -> Rows:
        """The index in `slots` of the only replay that needs each row of `whole`; -1 for rows that always run."""
        slot_of_rows = np.full(len(self.whole.columns), -1, dtype=np.int64)
        if not len(self.slots.worker):
            return slot_of_rows
        ops, (worker, stage, micro_batch, _) = operations_of(self.whole), self.slots
        replays = ops.select(Replay)
        worker_cell = worker * ops.cells + stage * ops.shape.global_micro_batches + micro_batch
        slot_of_rows[ops.row[replays]] = find(worker_cell, ops.worker_cell[replays])
        graph = dependencies(self.whole)
        receives, consumers = graph.received
        lowest = np.full(len(slot_of_rows), len(self.slots.worker))  # of the consumers of each receive
        np.minimum.at(lowest, receives, slot_of_rows[consumers])
        slot_of_rows[receives] = slot_of_rows[graph.sends[receives]] = lowest[receives]
        return slot_of_rows

    def keeping(self, is_kept: Flags) -> Rotation:
        """Return the rotation with only the slots flagged in `is_kept`."""
        rows = np.flatnonzero(np.append(is_kept, True)[self.slot_of_rows])
        whole = replace(self.whole, columns=self.whole.columns.take(rows))
        return Rotation(whole, self.rounds if is_kept.any() else 0, self.slots.take(is_kept))

    def room(self) -> list[list[int]]:
        """Return the stages that have replays, for each round."""
        return [np.unique(self.slots.stage[self.slots.round == number]).tolist() for number in range(self.rounds)]

    def _runs(self, iteration: int) -> Flags:
        rounds_of_rows = np.append(self.slots.round, EVERY_ITERATION)[self.slot_of_rows]
        return np.isin(rounds_of_rows, (EVERY_ITERATION, self.round_of(iteration)))

    def schedule(self, iteration: int) -> Schedule:
        """Return the lowered schedule of an iteration."""
        whole = replace(self.whole, columns=self.whole.columns.take(np.flatnonzero(self._runs(iteration))))
        count = self.key_of(iteration)[1]
        return whole if count == whole.shape.micro_batches else with_first_micro_batches(whole, count)

    def program(self, worker: Worker, iteration: int) -> tuple[Instruction, ...]:
        """Return the program of `worker` in an iteration; the same object for all iterations of a key."""
        key = worker, self.key_of(iteration)
        if key not in self._programs:
            self._programs[key] = self.schedule(iteration).program(worker)
        return self._programs[key]

    def checked(self, iteration: int) -> frozenset[ReplayTarget]:
        """Return the replay targets of an iteration."""
        key = self.key_of(iteration)
        if key not in self._targets:
            c = self.whole.columns
            rows = np.flatnonzero((c.kind == Replay.kind) & self._runs(iteration) & (c.index < key[1]))
            numbers = (column[rows].tolist() for column in (c.stage, c.pipeline, c.index))
            self._targets[key] = frozenset(
                ReplayTarget(stage, MicroBatch(pipeline, index))
                for stage, pipeline, index in zip(*numbers, strict=True)
            )
        return self._targets[key]


def with_replays(
    schedule: Schedule,
    every: int | Literal["gaps"] = 1,
    profile: Profile | None = None,
    disputed: Collection[ReplayTarget] = (),
    room: Sequence[Collection[int]] | None = None,
) -> Rotation:
    """Add rotating replays of all work to a schedule.

    Args:
        schedule: a valid schedule; transfers of a lowered schedule are regenerated.
        every: iterations of a full rotation; 0 for no replays. "gaps": one replay per worker and iteration, and only
            replays that do not lengthen the period.
        profile: durations that determine the gaps; uniform if None.
        disputed: targets that all other hosts also replay in every iteration.
        room: for "gaps", the result of `Rotation.room`; computed if None or for another number of rounds.
    """
    profile = profile or Profile.uniform()
    base = _without_transfers(schedule)
    ran, shape = _hosts_of_forwards(base), base.shape
    slots, rounds = _assigned_to_peers(base, ran, every) if every else (NO_SLOTS, 0)
    rotation = _rotation(base, profile, rounds, slots)
    if every == "gaps" and room is not None and len(room) in (0, rounds):
        placed = zip(slots.stage.tolist(), slots.round.tolist(), strict=True)
        rotation = rotation.keeping(np.array([bool(room) and s in room[number] for s, number in placed], bool))
    elif every == "gaps" and len(slots.worker):
        rotation = rotation.keeping(_fitting_slots(rotation, profile))
    if not disputed:
        return rotation
    is_disputed = np.zeros_like(ran, dtype=np.bool_)
    for stage, (pipeline, index) in disputed:
        is_disputed[stage, pipeline * shape.micro_batches + index] = True
    slots = rotation.slots.take(~is_disputed[rotation.slots.stage, rotation.slots.micro_batch])
    more = [
        (shape.worker_index(peer), stage, micro_batch, EVERY_ITERATION)
        for stage, micro_batch in np.argwhere(is_disputed & (ran >= 0)).tolist()
        for peer in base.hosts(stage)
        if shape.worker_index(peer) != ran[stage, micro_batch]
    ]
    added = np.array(more, dtype=np.int64).reshape(-1, 4).T
    return _rotation(base, profile, rotation.rounds, ReplaySlots(*np.concatenate([np.array(slots), added], axis=1)))


def _rotation(base: Schedule, profile: Profile, rounds: int, slots: ReplaySlots) -> Rotation:
    by_worker = slots.take(np.lexsort((slots.round, slots.worker)))
    return Rotation(lower(_inserted(base, profile, by_worker)), rounds, by_worker)


def _without_transfers(schedule: Schedule) -> Schedule:
    c = schedule.columns
    kept = np.flatnonzero(~is_kind(c.kind, Transfer))
    if len(kept) == len(c):
        return schedule
    return replace(schedule, columns=c.take(kept))


def _fitting_slots(rotation: Rotation, profile: Profile) -> Flags:
    """Return which slots stay when replays that lengthen the period are dropped.

    Stages are tried from last to first, because hosts of late stages wait longest for their first input. A round that
    is still too long drops its lowest stages.
    """
    stage, number = rotation.slots.stage, rotation.slots.round
    if len(rotation.whole.columns) * (rotation.rounds + rotation.whole.shape.stages) > _FEW_EVENTS:
        load_compiled()

    def period(is_kept: Flags) -> float:
        return time_graph(event_graph(rotation.keeping(is_kept).whole), profile).period

    is_kept: Flags = np.zeros(len(stage), dtype=np.bool_)
    longest = period(is_kept) * (1 + TOLERANCE)

    def fit(one_round: int, stages: Sequence[int]) -> bool:
        candidates = (number == one_round) & np.isin(stage, stages)
        return not candidates.any() or period(candidates) <= longest

    room: list[int] = []
    for last in reversed(range(rotation.whole.shape.stages)):
        own_rounds = number[stage == last]
        if len(own_rounds) and fit(int(own_rounds.min()), [*room, last]):
            room.append(last)
    for one_round in range(rotation.rounds):
        stages = sorted({*room} & {*stage[number == one_round].tolist()})
        while not fit(one_round, stages):
            del stages[0]
        is_kept |= (number == one_round) & np.isin(stage, stages)
    return is_kept


def _hosts_of_forwards(schedule: Schedule) -> Rows:
    ops, shape = operations_of(schedule), schedule.shape
    first = ops.first(ops.select(Forward))
    return np.where(first >= 0, ops.worker[first], -1).reshape(shape.stages, -1)


def _assigned_to_peers(schedule: Schedule, ran: Rows, every: int | Literal["gaps"]) -> tuple[ReplaySlots, int]:
    """Return (replays of each worker, number of rounds); the peers of a host alternate over its micro-batches."""
    stage, micro_batch = np.nonzero(ran >= 0)
    host = ran[stage, micro_batch]
    place, peer = occurrences(stage * schedule.shape.worker_count + host), np.full(len(host), -1, dtype=np.int64)
    for s in range(schedule.shape.stages):
        of_stage, hosts = stage == s, np.array(list(map(schedule.shape.worker_index, schedule.hosts(s))))
        if len(hosts) > 1:
            after = np.searchsorted(hosts, host[of_stage]) + 1 + place[of_stage] % (len(hosts) - 1)
            peer[of_stage] = hosts[after % len(hosts)]
    order = np.lexsort((micro_batch, stage, place, peer))
    order = order[peer[order] >= 0]
    count = np.bincount(peer[order], minlength=1)
    rounds = int(count.max()) if every == "gaps" else every
    rounds_of_slots = occurrences(peer[order]) * rounds // count[peer[order]]
    return ReplaySlots(peer[order], stage[order], micro_batch[order], rounds_of_slots), rounds


def _inserted(schedule: Schedule, profile: Profile, slots: ReplaySlots) -> Schedule:
    if not len(slots.worker):
        return schedule
    before = _places(schedule, profile_of_cut(profile, schedule.shape), slots)
    by_place = np.lexsort((before, slots.worker))
    worker, stage, micro_batch, _ = slots.take(by_place)
    pipeline, index = np.divmod(micro_batch, schedule.shape.micro_batches)
    added = {"kind": np.full(len(stage), Replay.kind), "stage": stage, "pipeline": pipeline, "index": index}
    return insert(schedule, worker, before[by_place], added)[0]


def given_times(schedule: Schedule, profile: Profile) -> tuple[Floats, Floats, Rows]:
    graph = lowered_graph(schedule)
    timeline, origin, rows = time_graph(graph, profile), graph.origin, graph.dependencies.rows
    assert origin is not None
    rank = np.argsort(graph.order)  # of each node
    place = np.argsort(np.lexsort((rank[:rows], timeline.start)))
    given, count = np.flatnonzero(origin >= 0), len(schedule.columns)
    start, end, order = np.full(count, np.inf), np.zeros(count), np.zeros(count, dtype=np.int64)
    np.minimum.at(start, origin[given], timeline.start[given])
    np.maximum.at(end, origin[given], timeline.end[given])
    np.maximum.at(order, origin[given], place[given])
    return start, end, order


def _places(schedule: Schedule, profile: Profile, slots: ReplaySlots) -> Rows:
    shape, c = schedule.shape, schedule.columns
    starts, ends, order = given_times(schedule, profile)
    is_async, reduces = is_kind(c.kind, AsyncInstruction), c.kind == ReduceGradients.kind
    busy_until = np.where(is_async, 0.0, ends)
    # Count activations, and their bytes: per stage, held before each row, and the peak of each worker.
    weights = np.array([shape.stage_sizes, profile.per_stage("activation", shape.stages)])
    measures = [held_before(schedule, profile, in_bytes=in_bytes) for in_bytes in (False, True)]
    held, peak = np.array([before for _, _, before in measures]), np.zeros((len(measures), shape.worker_count))
    for most, (added, _, before) in zip(peak, measures, strict=True):
        np.maximum.at(most, c.worker, before + added)

    @cache
    def candidates(w: int, stage: int) -> tuple[Rows, Floats, int]:
        """Return (rows before which a replay may go, idle time before each, fallback row after all compute)."""
        program = slice(*c.offsets[w : w + 2].tolist())
        holds = held[:, program].T + weights[:, stage] <= peak[:, w] * (1 + TOLERANCE)
        until = np.append(np.flatnonzero(reduces[program] & (c.stage[program] == stage)), program.stop - program.start)[
            0
        ]
        at = np.flatnonzero((holds.all(axis=1) & ~is_async[program])[:until])
        idle = np.append(0.0, np.maximum.accumulate(busy_until[program]))
        return program.start + at, idle[at], int(program.start + until)

    speed = np.array([profile.speed_of(worker) for worker in shape.workers()])
    seconds = np.sum([profile.per_stage(name, shape.stages) for name in Replay.row.seconds], axis=0)
    ready, last_input = _ready(schedule, profile, slots, ends, order)
    places, taken = np.empty(len(slots.worker), dtype=np.int64), dict[tuple[int, int], dict[int, float]]()
    columns = (slots.worker, slots.stage, slots.round, ready, last_input, seconds[slots.stage] * speed[slots.worker])
    for place, (w, s, round_number, available, after, needed) in enumerate(
        zip(*(column.tolist() for column in columns), strict=True)
    ):
        rows, idle, last = candidates(w, s)
        begins = np.maximum(idle, available)
        free = taken.setdefault((w, round_number), {})
        for row, since in free.items():
            begins[rows == row] = max(since, available)
        fitting = np.flatnonzero((starts[rows] - begins >= needed * (1 - TOLERANCE)) & (order[rows] > after))
        places[place] = last
        if len(fitting):
            places[place] = row = int(rows[fitting[0]])
            free[row] = float(begins[fitting[0]]) + needed
    return places


def _ready(schedule: Schedule, profile: Profile, slots: ReplaySlots, ends: Floats, order: Rows) -> tuple[Floats, Rows]:
    """Return (when all inputs of each replay are ready, place in the order of the last producer)."""
    ops, shape = operations_of(schedule), schedule.shape
    ready, last_input = np.zeros(len(slots.worker)), np.full(len(slots.worker), -1, dtype=np.int64)
    for need in Replay.row.needs:
        makers = ops.first(ops.select(*makers_of(need.value))).reshape(shape.stages, -1)
        producer_stage = slots.stage + need.offset
        exists = np.flatnonzero((producer_stage >= 0) & (producer_stage < shape.stages))
        makers_found = makers[producer_stage[exists], slots.micro_batch[exists]]
        exists, maker = exists[makers_found >= 0], ops.row[makers_found[makers_found >= 0]]
        sender, receiver, boundary = (
            schedule.columns.worker[maker],
            slots.worker[exists],
            producer_stage[exists] - max(need.offset, 0),
        )
        seconds = profile.transfer_seconds(shape, sender, receiver, boundary)
        ready[exists] = np.maximum(ready[exists], ends[maker] + np.where(sender == receiver, 0.0, seconds))
        last_input[exists] = np.maximum(last_input[exists], order[maker])
    return ready, last_input
