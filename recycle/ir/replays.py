"""Where replays go: into the gaps of a schedule, spread over several iterations until each micro-batch had its turn.

Every micro-batch of every stage is replayed once in `rounds` iterations, by another live host of the stage than the one
that ran it; those of one host are dealt out to its peers in turn. All workers do theirs in the same iterations, because
an iteration takes as long as its slowest worker.

A replay goes into the first gap of its worker, in the timeline of the schedule without it, that begins behind all that
it needs, holds it, and has room for an activation. Where there is none it goes behind the worker's computing, before
the stage is reduced, where it lengthens the iteration by what no later gap takes up. Either way all that it needs comes
before it in one order that respects every dependency, and nobody waits for it but its own worker. So replays can be
added to a valid schedule, and taken out again, in any number: one lowered schedule holds those of all iterations, and
what runs in one of them is that schedule without the others. Both ends of a transfer leave together, so lanes keep
their order.

Limits: "gaps" times the schedule once per stage and once per round, which takes seconds for hundreds of workers.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, NamedTuple

import numpy as np

from recycle.cut import profile_of_cut
from recycle.ir.columns import Floats, Rows, offsets_of
from recycle.ir.dependencies import crossings
from recycle.ir.instruction import (
    CARRIERS,
    Backward,
    BackwardInput,
    Beside,
    Forward,
    Instruction,
    ReduceGradients,
    StageWide,
    Transfer,
    is_kind,
)
from recycle.ir.kinds import ValueKind
from recycle.ir.lower import insert, lower, lower_with_origin
from recycle.ir.memory import TOLERANCE, activation_changes
from recycle.ir.pieces import work
from recycle.ir.replay import Replay
from recycle.ir.schedule import Schedule
from recycle.ir.simulate import event_graph, time_graph, timeline_of
from recycle.profile import Profile
from recycle.shape import MicroBatch, Worker

MOST_ROUNDS = 1_000_000
"""Iterations in which all have their turn, at most."""
ALWAYS = -1
"""The round of what runs in every iteration."""


class Checked(NamedTuple):
    """What a replay checks: a stage's work on a micro-batch."""

    stage: int
    micro_batch: MicroBatch


class Turn(NamedTuple):
    """A replay and when it has its turn: in the iterations whose number leaves `round` when divided by the rounds."""

    checked: Checked
    worker: Worker
    round: int


@dataclass(frozen=True, eq=False)
class Rotation:
    """A schedule with replays that take turns.

    Attributes:
        whole: lowered, with the replays of all rounds: what is checked, and whose lanes are formed.
        rounds: iterations until all had their turn; 0 where nothing is replayed in turn.
        turns: all replays that were added, by worker.
    """

    whole: Schedule
    rounds: int
    turns: tuple[Turn, ...]

    def round_of(self, iteration: int) -> int:
        """The round of an iteration; `ALWAYS` of all in which nothing has its turn."""
        number = iteration % self.rounds if self.rounds else ALWAYS
        return number if number in self._used else ALWAYS

    @cached_property
    def _used(self) -> frozenset[int]:
        return frozenset(turn.round for turn in self.turns)

    @cached_property
    def _rounds_of_rows(self) -> Rows:
        """Row of `whole` -> the only round in which it runs, or `ALWAYS`."""
        schedule = self.whole
        c, shape = schedule.columns, schedule.shape
        found = np.full(len(c), ALWAYS, dtype=np.int64)
        of = {(shape.worker_index(turn.worker), turn.checked): turn.round for turn in self.turns}
        replays = np.flatnonzero(c.kind == Replay.kind)
        for row, key in zip(replays.tolist(), _named(schedule, replays), strict=True):
            found[row] = of.get(key, ALWAYS)
        only = self._brought_for(found)
        for value, ends in CARRIERS.items():
            for end in ends:
                rows = np.flatnonzero(c.kind == end.kind)
                is_send = end is ends[0]
                makers = c.stage[rows] + end.row.needs[0].offset
                receivers = (c.peer if is_send else c.worker)[rows]
                for row, maker, receiver, pipeline, index in zip(
                    *(column.tolist() for column in (rows, makers, receivers, c.pipeline[rows], c.index[rows])),
                    strict=True,
                ):
                    found[row] = only.get((value, maker, MicroBatch(pipeline, index), receiver), ALWAYS)
        return found

    def _brought_for(self, rounds_of_rows: Rows) -> dict[tuple[ValueKind, int, MicroBatch, int], int]:
        """(value, stage that makes it, micro-batch, receiver) of transfers that serve the replays of one round alone ->
        that round."""
        schedule = self.whole
        c = schedule.columns
        computes = ~is_kind(c.kind, (Transfer, StageWide))
        kept = np.flatnonzero(computes & (rounds_of_rows == ALWAYS))
        base = replace(schedule, columns=c.take(kept, offsets_of(c.worker[kept], schedule.shape.worker_count)))
        needed = crossings(base)
        receiver = base.columns.worker[needed.consumer]
        columns = (needed.value, needed.stage, needed.micro_batch, receiver)
        m = schedule.shape.micro_batches
        always = {
            (ValueKind(value), stage, MicroBatch(*divmod(number, m)), worker)
            for value, stage, number, worker in zip(*(column.tolist() for column in columns), strict=True)
        }
        only: dict[tuple[ValueKind, int, MicroBatch, int], int] = {}
        for turn in self.turns:
            (stage, micro_batch), receiver_index = turn.checked, schedule.shape.worker_index(turn.worker)
            for need in Replay.row.needs:
                key = (need.value, stage + need.offset, micro_batch, receiver_index)
                if key not in always:
                    only[key] = turn.round
        return only

    def program(self, worker: Worker, iteration: int) -> tuple[Instruction, ...]:
        """What `worker` runs in an iteration: the same object in all of a round, and in all without replays in turn."""
        key = worker, self.round_of(iteration)
        if key not in self._programs:
            w = self.whole.shape.worker_index(worker)
            first, end = (int(offset) for offset in self.whole.columns.offsets[w : w + 2])
            runs = np.isin(self._rounds_of_rows[first:end], (ALWAYS, key[1])).tolist()
            whole = self.whole.program(worker)
            self._programs[key] = tuple(one for one, is_run in zip(whole, runs, strict=True) if is_run)
        return self._programs[key]

    @cached_property
    def _programs(self) -> dict[tuple[Worker, int], tuple[Instruction, ...]]:
        return {}

    def checked(self, iteration: int) -> frozenset[Checked]:
        """What is replayed in an iteration."""
        return self._checked[self.round_of(iteration)]

    @cached_property
    def _checked(self) -> Mapping[int, frozenset[Checked]]:
        found: dict[int, set[Checked]] = {number: set() for number in (ALWAYS, *self._used)}
        c = self.whole.columns
        rows = np.flatnonzero(c.kind == Replay.kind)
        for (_, checked), number in zip(_named(self.whole, rows), self._rounds_of_rows[rows].tolist(), strict=True):
            for one in found if number == ALWAYS else (number,):
                found[one].add(checked)
        return {number: frozenset(of) for number, of in found.items()}

    def schedule(self, iteration: int) -> Schedule:
        """The lowered schedule of an iteration."""
        kept = np.flatnonzero(np.isin(self._rounds_of_rows, (ALWAYS, self.round_of(iteration))))
        c = self.whole.columns
        return replace(self.whole, columns=c.take(kept, offsets_of(c.worker[kept], self.whole.shape.worker_count)))


def with_replays(
    schedule: Schedule,
    every: int | Literal["gaps"] = 1,
    profile: Profile | None = None,
    disputed: Collection[Checked] = (),
) -> Rotation:
    """A schedule with replays of everything, in turn.

    Args:
        schedule: valid; compute-only, or lowered, whose transfers are then written anew.
        every: iterations until everything was replayed; 0 for nothing. "gaps": one of each worker in an iteration, and
            only what leaves the period as it is; a stage that has no room is not replayed at all.
        profile: prices the schedule, to find its gaps; one slot each when left out.
        disputed: what all other hosts replay besides, in every iteration.
    """
    profile = profile or Profile.uniform()
    base = _without_transfers(schedule)
    hosts = _who_ran(base)
    dealt = _dealt(base, hosts) if every else {}
    if every == "gaps":
        rounds = max(map(len, dealt.values()), default=0)
        turns = _that_fit(base, profile, _in_turn(dealt, rounds), rounds)
        rounds = rounds if turns else 0
    else:
        rounds = every
        turns = _in_turn(dealt, rounds)
    turns = [turn for turn in turns if turn.checked not in disputed]
    turns += [
        Turn(checked, peer, ALWAYS)
        for checked in sorted(disputed)
        for peer in base.hosts(checked.stage)
        if checked in hosts and peer != hosts[checked]
    ]
    turns.sort(key=lambda turn: (turn.worker, turn.round))
    return Rotation(lower(_inserted(base, profile, turns)), rounds, tuple(turns))


def _named(schedule: Schedule, rows: Rows) -> list[tuple[int, Checked]]:
    """(worker index, stage and micro-batch) of computes."""
    c = schedule.columns
    columns = (c.worker[rows], c.stage[rows], c.pipeline[rows], c.index[rows])
    return [(w, Checked(s, MicroBatch(k, j))) for w, s, k, j in zip(*(one.tolist() for one in columns), strict=True)]


def _without_transfers(schedule: Schedule) -> Schedule:
    c = schedule.columns
    kept = np.flatnonzero(~is_kind(c.kind, Transfer))
    if len(kept) == len(c):
        return schedule
    return replace(schedule, columns=c.take(kept, offsets_of(c.worker[kept], schedule.shape.worker_count)))


def _who_ran(schedule: Schedule) -> dict[Checked, Worker]:
    """Who runs the forward of each stage and micro-batch."""
    pieces, shape = work(schedule), schedule.shape
    at = np.flatnonzero((pieces.kind == Forward.kind) & pieces.valid)
    columns = (pieces.stage[at], pieces.micro_batch[at], pieces.worker[at])
    return {
        Checked(stage, MicroBatch(*divmod(number, shape.micro_batches))): shape.worker_at(w)
        for stage, number, w in zip(*(one.tolist() for one in columns), strict=True)
    }


def _dealt(schedule: Schedule, hosts: Mapping[Checked, Worker]) -> dict[Worker, list[Checked]]:
    """Worker -> what it replays, in the order of its turns: first one of each peer, then another one of each."""
    of_host: dict[tuple[int, Worker], list[Checked]] = {}
    for checked, host in sorted(hosts.items()):
        of_host.setdefault((checked.stage, host), []).append(checked)
    dealt: dict[Worker, list[tuple[int, Checked]]] = {}
    for (stage, host), ran in of_host.items():
        others = schedule.hosts(stage)
        behind = sum(other <= host for other in others)
        peers = [other for other in (*others[behind:], *others[:behind]) if other != host]
        for place, checked in enumerate(ran if peers else ()):
            dealt.setdefault(peers[place % len(peers)], []).append((place, checked))
    return {worker: [checked for _, checked in sorted(mine)] for worker, mine in dealt.items()}


def _in_turn(dealt: Mapping[Worker, Sequence[Checked]], rounds: int) -> list[Turn]:
    return [
        Turn(checked, worker, place * rounds // len(mine))
        for worker, mine in sorted(dealt.items())
        for place, checked in enumerate(mine)
    ]


def _that_fit(schedule: Schedule, profile: Profile, turns: Sequence[Turn], rounds: int) -> list[Turn]:
    """The turns that do not lengthen the period, all of a round together.

    Stages are tried from the last one, whose hosts wait longest for their first input, by their first round; a round
    that turns out longer does without the first of them.
    """
    longest = timeline_of(schedule, profile).period * (1 + TOLERANCE)
    by_round: list[list[Turn]] = [[] for _ in range(rounds)]
    for turn in turns:
        by_round[turn.round].append(turn)

    def of(number: int, stages: Collection[int]) -> list[Turn]:
        return [turn for turn in by_round[number] if turn.checked.stage in stages]

    def fit(some: Sequence[Turn]) -> bool:
        return not some or timeline_of(_inserted(schedule, profile, some), profile).period <= longest

    room: set[int] = set()
    for stage in reversed(range(schedule.shape.stages)):
        first = next((n for n in range(rounds) if of(n, {stage})), None)
        if first is not None and fit(of(first, {*room, stage})):
            room.add(stage)
    fitting: list[Turn] = []
    for number in range(rounds):
        stages = sorted({turn.checked.stage for turn in of(number, room)})
        while not fit(of(number, stages)):
            del stages[0]
        fitting += of(number, stages)
    return fitting


@dataclass(frozen=True)
class _Times:
    """When the rows of a schedule run without replays.

    Attributes:
        start, end: seconds.
        order: place of each row in one order of all that respects every dependency.
        held: activations, and bytes of activations, that its worker holds before each row, [2, rows].
        peak: the most that each worker ever holds, [2, workers].
    """

    start: Floats
    end: Floats
    order: Rows
    held: Floats
    peak: Floats

    @classmethod
    def of(cls, schedule: Schedule, profile: Profile) -> _Times:
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
        c, held, peak = schedule.columns, [], []
        for in_bytes in (False, True):
            added, freed = activation_changes(schedule, profile, in_bytes=in_bytes)
            total = np.append(0.0, np.cumsum(added - freed))
            before = total[:-1] - total[c.offsets[c.worker]]
            most = np.zeros(schedule.shape.worker_count)
            np.maximum.at(most, c.worker, before + added)
            held.append(before)
            peak.append(most)
        return cls(start, end, order, np.array(held), np.array(peak))


def _inserted(schedule: Schedule, profile: Profile, turns: Sequence[Turn]) -> Schedule:
    """The schedule with replays in its gaps; `turns` by worker."""
    if not turns:
        return schedule
    profile = profile_of_cut(profile, schedule.shape)
    shape = schedule.shape
    places = _Places(schedule, profile)
    workers = np.array([shape.worker_index(turn.worker) for turn in turns], dtype=np.int64)
    before = np.array([places.find(turn) for turn in turns], dtype=np.int64)
    by_place = np.lexsort((before, workers))
    numbers = [(turn.checked.stage, *turn.checked.micro_batch) for turn in turns]
    stage, pipeline, index = np.array(numbers, dtype=np.int64)[by_place].T
    kind = np.full(len(turns), Replay.kind)
    added = {"kind": kind, "stage": stage, "pipeline": pipeline, "index": index}
    return insert(schedule, workers[by_place], before[by_place], added)[0]


class _Places:
    """Finds where replays go, given those that came before in the same round."""

    def __init__(self, schedule: Schedule, profile: Profile) -> None:
        self._schedule, self._profile, self._shape = schedule, profile, schedule.shape
        self._times = _Times.of(schedule, profile)
        self._beside = is_kind(schedule.columns.kind, Beside)
        self._reduces = is_kind(schedule.columns.kind, ReduceGradients)
        pieces = work(schedule)
        self._makers: dict[tuple[ValueKind, int, int], int] = {}
        for value, classes in (
            (ValueKind.ACTIVATION, (Forward,)),
            (ValueKind.INPUT_GRADIENT, (Backward, BackwardInput)),
        ):
            at = np.flatnonzero(is_kind(pieces.kind, classes) & pieces.valid)
            for row, stage, number in zip(
                *(one[at].tolist() for one in (pieces.row, pieces.stage, pieces.micro_batch)), strict=True
            ):
                self._makers[value, stage, number] = row
        self._free: dict[tuple[Worker, int], dict[int, float]] = {}
        """Of the gaps of a worker in a round: row before which it lies -> when what is left of it begins."""
        names = Replay.row.seconds
        self._seconds = np.sum([profile.per_stage(name, self._shape.stages) for name in names], axis=0)
        self._weights = np.array([self._shape.stage_sizes, profile.per_stage("activation", self._shape.stages)])

    def find(self, turn: Turn) -> int:
        """The row that a replay comes before."""
        (stage, _), w = turn.checked, self._shape.worker_index(turn.worker)
        c, times = self._schedule.columns, self._times
        ready, behind = self._ready(turn.checked, w)
        seconds = float(self._seconds[stage]) * self._profile.speed_of(turn.worker)
        free = self._free.setdefault((turn.worker, turn.round), {})
        first, end = (int(offset) for offset in c.offsets[w : w + 2])
        fits = (times.held[:, first:end].T + self._weights[:, stage] <= times.peak[:, w] * (1 + TOLERANCE)).all(axis=1)
        fits &= (times.order[first:end] > behind) & ~self._beside[first:end]
        until = self._reduces[first:end] & (c.stage[first:end] == stage)
        idle = np.append(0.0, np.maximum.accumulate(np.where(self._beside[first:end], 0.0, times.end[first:end])))
        last = first + int(until.argmax()) if until.any() else end
        for place in np.flatnonzero(fits[: last - first]).tolist():
            row = first + place
            begins = max(free.get(row, float(idle[place])), ready)
            if times.start[row] - begins >= seconds * (1 - TOLERANCE):
                free[row] = begins + seconds
                return row
        return last

    def _ready(self, checked: Checked, w: int) -> tuple[float, int]:
        """(when all that a replay needs is on worker `w`, the last place in the order that has some of it made)."""
        (stage, micro_batch), times = checked, self._times
        number = micro_batch.pipeline * self._shape.micro_batches + micro_batch.index
        ready, behind = 0.0, -1
        for need in Replay.row.needs:
            maker = self._makers.get((need.value, stage + need.offset, number))
            if maker is None:
                continue
            sender, boundary = int(self._schedule.columns.worker[maker]), stage + min(need.offset, 0)
            way = 0.0
            if sender != w:
                way = float(self._profile.transfer_seconds(self._shape, [sender], [w], [boundary])[0])
            ready, behind = max(ready, float(times.end[maker]) + way), max(behind, int(times.order[maker]))
        return ready, behind


def replays_of(schedule: Schedule, worker: Worker) -> Iterable[Checked]:
    """What of `worker`'s work others replay in a schedule that holds replays itself."""
    c = schedule.columns
    rows = np.flatnonzero(c.kind == Replay.kind)
    hosts = _who_ran(schedule)
    return [checked for _, checked in _named(schedule, rows) if hosts.get(checked) == worker]
