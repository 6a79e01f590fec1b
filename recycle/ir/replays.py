"""Placement of replays: into the gaps of a schedule, spread over several iterations.

In `rounds` iterations every micro-batch of every stage is replayed once, by another live host of the stage than the
host that ran it; the peers of a host alternate. All workers replay in the same iterations, because an iteration takes
as long as its slowest worker.

A replay goes into the first gap that starts after its inputs are ready and has room for an activation. Without such a
gap it goes after the worker's compute, before the reduce of the stage. One topological order then places all inputs of
a replay before the replay, and only its own worker waits for it. So replays can be added to and removed from a valid
schedule: one lowered schedule holds the replays of all iterations, and an iteration runs that schedule without the
others. Both ends of a transfer are removed together, so lanes keep their order.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from typing import Literal, NamedTuple

import numpy as np

from recycle.ir.columns import Flags, Floats, Ints, Rows, occurrences
from recycle.ir.compiled import COMPILE_FROM
from recycle.ir.dependencies import dependencies, find
from recycle.ir.event_graph import event_graph, load_compiled
from recycle.ir.instruction import CARRIERS, Forward, Instruction, ReduceGradients, Replay, StageWide, Transfer
from recycle.ir.kinds import Beside, is_kind, makers_of
from recycle.ir.lower import insert, lower, lower_with_origin
from recycle.ir.memory import TOLERANCE, held_before
from recycle.ir.pieces import work
from recycle.ir.schedule import Schedule
from recycle.ir.simulate import time_graph
from recycle.job.cut import profile_of_cut
from recycle.job.profile import Profile
from recycle.job.shape import MicroBatch, Worker

ALWAYS = -1
"""Round of replays that run in every iteration."""
_FEW_EVENTS = 5 * COMPILE_FROM
"""Number of timed rows up to which plain Python is faster than loading compiled loops."""
MOST_ROUNDS = 1_000_000
"""Maximum number of rounds."""


class Checked(NamedTuple):
    """The target of a replay: the work of a stage on a micro-batch."""

    stage: int
    micro_batch: MicroBatch


class Turns(NamedTuple):
    """Replays and their rounds, as columns, sorted by worker and round; `micro_batch` is the global id.

    A replay runs in iterations equal to `round` modulo the number of rounds; in every iteration for `ALWAYS`.
    """

    worker: Rows
    stage: Rows
    micro_batch: Rows
    round: Rows

    def take(self, places: Rows | Flags) -> Turns:
        """Return the entries at these indices."""
        return Turns(*(column[places] for column in self))


NO_TURNS = Turns(*np.empty((4, 0), dtype=np.int64))


@dataclass(frozen=True, eq=False)
class Rotation:
    """A schedule with replays that rotate over iterations.

    `whole` is lowered and has the replays of all rounds, `turns`. A full rotation takes `rounds` iterations; 0 for
    none.
    """

    whole: Schedule
    rounds: int
    turns: Turns = NO_TURNS
    _programs: dict[tuple[Worker, int], tuple[Instruction, ...]] = field(default_factory=dict, repr=False)
    _checked: dict[int, frozenset[Checked]] = field(default_factory=dict, repr=False)

    def round_of(self, iteration: int) -> int:
        """Return the round of an iteration; `ALWAYS` if the iteration has no rotating replays."""
        number = iteration % self.rounds if self.rounds else ALWAYS
        return number if number in self._used else ALWAYS

    @cached_property
    def _used(self) -> frozenset[int]:
        return frozenset(self.turns.round.tolist())

    @cached_property
    def _rounds_of_rows(self) -> Rows:
        return np.append(self.turns.round, ALWAYS)[self.turn_of_rows]

    @cached_property
    def turn_of_rows(self) -> Rows:
        """The index in `turns` of the only replay that needs each row of `whole`; -1 for rows that always run."""
        c, shape = self.whole.columns, self.whole.shape
        found = np.full(len(c), -1, dtype=np.int64)
        worker, stage, micro_batch, _ = self.turns
        if not len(worker):
            return found

        def key(receiver: Rows | Ints, value: Rows | int, made_by: Rows | Ints, of: Rows) -> Rows:
            within = (receiver.astype(np.int64) * len(CARRIERS) + value) * (shape.stages + 2) + made_by + 1
            return within * shape.global_micro_batches + of

        at = np.flatnonzero(c.kind == Replay.kind)
        of_rows = c.pipeline.astype(np.int64) * shape.micro_batches + c.index
        found[at] = find(key(worker, 0, stage, micro_batch), key(c.worker[at], 0, c.stage[at], of_rows[at]))
        # A transfer belongs to one turn if no row that always runs on the receiver needs the value.
        kept = np.flatnonzero(~is_kind(c.kind, (Transfer, StageWide)) & (found < 0))
        base = replace(self.whole, columns=c.take(kept))
        needed = dependencies(base).crossings
        always = key(base.columns.worker[needed.consumer], needed.value, needed.stage, needed.micro_batch)
        needs = [key(worker, need.value, stage + need.offset, micro_batch) for need in Replay.row.needs]
        wanted, turn = np.concatenate(needs), np.tile(np.arange(len(worker)), len(needs))
        alone = ~np.isin(wanted, always)
        wanted, turn = wanted[alone], np.append(turn[alone], -1)
        for value, ends in CARRIERS.items():
            for end in ends:
                rows = np.flatnonzero(c.kind == end.kind)
                receiver = (c.peer if end is ends[0] else c.worker)[rows]
                made_by = c.stage[rows].astype(np.int64) + end.row.needs[0].offset
                found[rows] = turn[find(wanted, key(receiver, value, made_by, of_rows[rows]))]
        return found

    def keeping(self, stays: Flags) -> Rotation:
        """Return the rotation with only the turns flagged in `stays`."""
        kept = np.flatnonzero(np.append(stays, True)[self.turn_of_rows])
        c = self.whole.columns
        return Rotation(
            replace(self.whole, columns=c.take(kept)), self.rounds if stays.any() else 0, self.turns.take(stays)
        )

    def room(self) -> list[list[int]]:
        """Return the stages that have replays, for each round."""
        return [np.unique(self.turns.stage[self.turns.round == number]).tolist() for number in range(self.rounds)]

    def _runs(self, iteration: int) -> Flags:
        return np.isin(self._rounds_of_rows, (ALWAYS, self.round_of(iteration)))

    def schedule(self, iteration: int) -> Schedule:
        """Return the lowered schedule of an iteration."""
        return replace(self.whole, columns=self.whole.columns.take(np.flatnonzero(self._runs(iteration))))

    def program(self, worker: Worker, iteration: int) -> tuple[Instruction, ...]:
        """Return the program of `worker` in an iteration; the same object for all iterations of a round."""
        key = worker, self.round_of(iteration)
        if key not in self._programs:
            self._programs[key] = self.schedule(iteration).program(worker)
        return self._programs[key]

    def checked(self, iteration: int) -> frozenset[Checked]:
        """Return the replay targets of an iteration."""
        number = self.round_of(iteration)
        if number not in self._checked:
            c = self.whole.columns
            rows = np.flatnonzero((c.kind == Replay.kind) & self._runs(iteration))
            numbers = (column[rows].tolist() for column in (c.stage, c.pipeline, c.index))
            self._checked[number] = frozenset(
                Checked(stage, MicroBatch(pipeline, index)) for stage, pipeline, index in zip(*numbers, strict=True)
            )
        return self._checked[number]


def with_replays(
    schedule: Schedule,
    every: int | Literal["gaps"] = 1,
    profile: Profile | None = None,
    disputed: Collection[Checked] = (),
    room: Sequence[Collection[int]] | None = None,
) -> Rotation:
    """Add rotating replays of all work to a schedule.

    Args:
        schedule: a valid schedule; transfers of a lowered schedule are regenerated.
        every: iterations of a full rotation; 0 for no replays. "gaps": one replay per worker and iteration, and only
            replays that do not lengthen the period; stages without room are not replayed.
        profile: durations that determine the gaps; uniform if None.
        disputed: targets that all other hosts also replay in every iteration.
        room: for "gaps", the stages of each round whose replays do not lengthen the period; empty for no replays.
            Computed if None or if its length is not the number of rounds.
    """
    profile = profile or Profile.uniform()
    base = _without_transfers(schedule)
    ran, shape = _who_ran(base), base.shape
    turns, rounds = _assigned_to_peers(base, ran, every) if every else (NO_TURNS, 0)
    rotation = _rotation(base, profile, rounds, turns)
    if every == "gaps" and room is not None and len(room) in (0, rounds):
        placed = zip(turns.stage.tolist(), turns.round.tolist(), strict=True)
        rotation = rotation.keeping(np.array([bool(room) and s in room[number] for s, number in placed], bool))
    elif every == "gaps" and len(turns.worker):
        rotation = rotation.keeping(_that_fit(rotation.whole, rotation.turn_of_rows, turns, profile))
    if not disputed:
        return rotation
    is_disputed = np.zeros_like(ran, dtype=np.bool_)
    for stage, (pipeline, index) in disputed:
        is_disputed[stage, pipeline * shape.micro_batches + index] = True
    turns = rotation.turns.take(~is_disputed[rotation.turns.stage, rotation.turns.micro_batch])
    more = [
        (shape.worker_index(peer), stage, micro_batch, ALWAYS)
        for stage, micro_batch in np.argwhere(is_disputed & (ran >= 0)).tolist()
        for peer in base.hosts(stage)
        if shape.worker_index(peer) != ran[stage, micro_batch]
    ]
    added = np.array(more, dtype=np.int64).reshape(-1, 4).T
    return _rotation(base, profile, rotation.rounds, Turns(*np.concatenate([np.array(turns), added], axis=1)))


def _rotation(base: Schedule, profile: Profile, rounds: int, turns: Turns) -> Rotation:
    by_worker = turns.take(np.lexsort((turns.round, turns.worker)))
    return Rotation(lower(_inserted(base, profile, by_worker)), rounds, by_worker)


def _without_transfers(schedule: Schedule) -> Schedule:
    c = schedule.columns
    kept = np.flatnonzero(~is_kind(c.kind, Transfer))
    if len(kept) == len(c):
        return schedule
    return replace(schedule, columns=c.take(kept))


def _that_fit(whole: Schedule, of_rows: Rows, turns: Turns, profile: Profile) -> Flags:
    """Return which turns stay when replays that lengthen the period are dropped.

    Stages are tried from last to first, because hosts of late stages wait longest for their first input. A round that
    is still too long drops its lowest stages. `of_rows` is the only turn that needs each row of `whole`, -1 for none.
    """
    stage, number = turns.stage, turns.round
    rounds = np.unique(number[number != ALWAYS]).tolist()
    if len(whole.columns) * (len(rounds) + whole.shape.stages) > _FEW_EVENTS:
        load_compiled()

    def period(stays: Flags) -> float:
        kept = np.flatnonzero(np.append(stays, True)[of_rows])
        return time_graph(event_graph(replace(whole, columns=whole.columns.take(kept))), profile).period

    stays: Flags = number == ALWAYS
    longest = period(stays) * (1 + TOLERANCE)

    def fit(of: int, stages: Sequence[int]) -> bool:
        turns_of = (number == of) & np.isin(stage, stages)
        return not turns_of.any() or period(turns_of | (number == ALWAYS)) <= longest

    room: list[int] = []
    for one in reversed(range(whole.shape.stages)):
        of = number[(stage == one) & (number != ALWAYS)]
        if len(of) and fit(int(of.min()), [*room, one]):
            room.append(one)
    for of in rounds:
        stages = sorted({*room} & {*stage[number == of].tolist()})
        while not fit(of, stages):
            del stages[0]
        stays |= (number == of) & np.isin(stage, stages)
    return stays


def _who_ran(schedule: Schedule) -> Rows:
    pieces, shape = work(schedule), schedule.shape
    first = pieces.first(shape, pieces.of(Forward))
    return np.where(first >= 0, pieces.worker[first], -1).reshape(shape.stages, -1)


def _assigned_to_peers(schedule: Schedule, ran: Rows, every: int | Literal["gaps"]) -> tuple[Turns, int]:
    """Return (replays of each worker, number of rounds); the peers of a host alternate over its micro-batches."""
    stage, micro_batch = np.nonzero(ran >= 0)
    host = ran[stage, micro_batch]
    place, peer = occurrences(stage * schedule.shape.worker_count + host), np.full(len(host), -1, dtype=np.int64)
    for s in range(schedule.shape.stages):
        mine, hosts = stage == s, np.array(list(map(schedule.shape.worker_index, schedule.hosts(s))))
        if len(hosts) > 1:
            after = np.searchsorted(hosts, host[mine]) + 1 + place[mine] % (len(hosts) - 1)
            peer[mine] = hosts[after % len(hosts)]
    order = np.lexsort((micro_batch, stage, place, peer))
    order = order[peer[order] >= 0]
    count = np.bincount(peer[order], minlength=1)
    rounds = int(count.max()) if every == "gaps" else every
    turn = occurrences(peer[order]) * rounds // count[peer[order]]
    return Turns(peer[order], stage[order], micro_batch[order], turn), rounds


def _inserted(schedule: Schedule, profile: Profile, turns: Turns) -> Schedule:
    if not len(turns.worker):
        return schedule
    before = _places(schedule, profile_of_cut(profile, schedule.shape), turns)
    by_place = np.lexsort((before, turns.worker))
    worker, stage, micro_batch, _ = turns.take(by_place)
    pipeline, index = np.divmod(micro_batch, schedule.shape.micro_batches)
    added = {"kind": np.full(len(stage), Replay.kind), "stage": stage, "pipeline": pipeline, "index": index}
    return insert(schedule, worker, before[by_place], added)[0]


def _times_without(schedule: Schedule, profile: Profile) -> tuple[Floats, Floats, Rows]:
    """Return (start, end, place in a topological order) of each row, without replays."""
    lowered, origin = lower_with_origin(schedule)
    graph = event_graph(lowered)
    timeline = time_graph(graph, profile)
    rows = len(lowered.columns)
    rank = np.zeros(graph.dependencies.nodes, dtype=np.int64)
    rank[graph.order] = np.arange(len(graph.order))
    place = np.empty(rows, dtype=np.int64)
    place[np.lexsort((rank[:rows], timeline.start))] = np.arange(rows)
    given, count = np.flatnonzero(origin >= 0), len(schedule.columns)
    start, end, order = np.full(count, np.inf), np.zeros(count), np.zeros(count, dtype=np.int64)
    np.minimum.at(start, origin[given], timeline.start[given])
    np.maximum.at(end, origin[given], timeline.end[given])
    np.maximum.at(order, origin[given], place[given])
    return start, end, order


def _places(schedule: Schedule, profile: Profile, turns: Turns) -> Rows:
    shape, c = schedule.shape, schedule.columns
    starts, ends, order = _times_without(schedule, profile)
    beside, reduces = is_kind(c.kind, Beside), c.kind == ReduceGradients.kind
    busy_until = np.where(beside, 0.0, ends)
    # Count activations, and their bytes: per stage, held before each row, and the peak of each worker.
    weights = np.array([shape.stage_sizes, profile.per_stage("activation", shape.stages)])
    measures = [held_before(schedule, profile, in_bytes=in_bytes) for in_bytes in (False, True)]
    held, peak = np.array([before for _, _, before in measures]), np.zeros((len(measures), shape.worker_count))
    for most, (added, _, before) in zip(peak, measures, strict=True):
        np.maximum.at(most, c.worker, before + added)

    @cache
    def candidates(w: int, stage: int) -> tuple[Rows, Floats, int]:
        """Return (rows before which a replay may go, idle time before each, fallback row after all compute)."""
        mine = slice(*c.offsets[w : w + 2].tolist())
        holds = held[:, mine].T + weights[:, stage] <= peak[:, w] * (1 + TOLERANCE)
        until = np.append(np.flatnonzero(reduces[mine] & (c.stage[mine] == stage)), mine.stop - mine.start)[0]
        at = np.flatnonzero((holds.all(axis=1) & ~beside[mine])[:until])
        idle = np.append(0.0, np.maximum.accumulate(busy_until[mine]))
        return mine.start + at, idle[at], int(mine.start + until)

    speed = np.array([profile.speed_of(worker) for worker in shape.workers()])
    seconds = np.sum([profile.per_stage(name, shape.stages) for name in Replay.row.seconds], axis=0)
    ready, behind = _ready(schedule, profile, turns, ends, order)
    found, taken = np.empty(len(turns.worker), dtype=np.int64), dict[tuple[int, int], dict[int, float]]()
    columns = (turns.worker, turns.stage, turns.round, ready, behind, seconds[turns.stage] * speed[turns.worker])
    for place, (w, s, of, available, after, needed) in enumerate(
        zip(*(column.tolist() for column in columns), strict=True)
    ):
        rows, idle, last = candidates(w, s)
        begins = np.maximum(idle, available)
        free = taken.setdefault((w, of), {})
        for row, since in free.items():
            begins[rows == row] = max(since, available)
        fitting = np.flatnonzero((starts[rows] - begins >= needed * (1 - TOLERANCE)) & (order[rows] > after))
        found[place] = last
        if len(fitting):
            found[place] = row = int(rows[fitting[0]])
            free[row] = float(begins[fitting[0]]) + needed
    return found


def _ready(schedule: Schedule, profile: Profile, turns: Turns, ends: Floats, order: Rows) -> tuple[Floats, Rows]:
    """Return (when all inputs of each replay are ready, place in the order of the last producer)."""
    pieces, shape = work(schedule), schedule.shape
    ready, behind = np.zeros(len(turns.worker)), np.full(len(turns.worker), -1, dtype=np.int64)
    for need in Replay.row.needs:
        makers = pieces.first(shape, pieces.of(*makers_of(need.value))).reshape(shape.stages, -1)
        of = turns.stage + need.offset
        there = np.flatnonzero((of >= 0) & (of < shape.stages))
        made = makers[of[there], turns.micro_batch[there]]
        there, maker = there[made >= 0], pieces.row[made[made >= 0]]
        sender, receiver, boundary = (
            schedule.columns.worker[maker],
            turns.worker[there],
            of[there] - max(need.offset, 0),
        )
        way = profile.transfer_seconds(shape, sender, receiver, boundary)
        ready[there] = np.maximum(ready[there], ends[maker] + np.where(sender == receiver, 0.0, way))
        behind[there] = np.maximum(behind[there], order[maker])
    return ready, behind
