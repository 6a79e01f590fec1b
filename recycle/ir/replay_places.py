"""Who replays what, and where: the work of a host is assigned to its peers and spread over iterations, and each replay
goes into the first gap of its worker that holds it.

A gap begins behind all that the replay needs and has room for an activation, in the timeline of the schedule without
any. Where there is none the replay goes behind the worker's computing, before the stage is reduced. So all that it
needs comes before it in one order that respects every dependency.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from recycle.ir.columns import Flags, Floats, Rows, occurrences
from recycle.ir.event_graph import event_graph
from recycle.ir.instruction import Backward, BackwardInput, Beside, Forward, ReduceGradients, Replay, is_kind
from recycle.ir.kinds import ValueKind
from recycle.ir.lower import insert, lower_with_origin
from recycle.ir.memory import TOLERANCE, held_before
from recycle.ir.pieces import work
from recycle.ir.schedule import Schedule
from recycle.ir.simulate import time_graph
from recycle.job.cut import profile_of_cut
from recycle.job.profile import Profile
from recycle.job.shape import MicroBatch

ALWAYS = -1
"""The round of what runs in every iteration."""
_MAKERS = {ValueKind.ACTIVATION: (Forward,), ValueKind.INPUT_GRADIENT: (Backward, BackwardInput)}


class Checked(NamedTuple):
    """What a replay checks: a stage's work on a micro-batch."""

    stage: int
    micro_batch: MicroBatch


class Turns(NamedTuple):
    """Replays and when they have their turn, as columns, by worker and round.

    Attributes:
        worker: index of the one that replays. stage, micro_batch: what; the micro-batch as global id.
        round: it runs in the iterations whose number leaves this when divided by the rounds, or `ALWAYS`.
    """

    worker: Rows
    stage: Rows
    micro_batch: Rows
    round: Rows

    def take(self, places: Rows | Flags) -> Turns:
        """Those in these places."""
        return Turns(*(column[places] for column in self))


NO_TURNS = Turns(*np.empty((4, 0), dtype=np.int64))


def who_ran(schedule: Schedule) -> Rows:
    """Worker index of who runs the forward of each [stage, micro-batch]; -1 for nobody."""
    pieces, shape = work(schedule), schedule.shape
    first = pieces.first(shape, pieces.of(Forward))
    return np.where(first >= 0, pieces.worker[first], -1).reshape(shape.stages, -1)


def assigned_to_peers(schedule: Schedule, ran: Rows, every: int | Literal["gaps"]) -> tuple[Turns, int]:
    """(what each worker replays of what its peers ran, over how many iterations it is spread).

    The peers of a host take turns with what it ran; of what a worker replays, one of each peer comes first.

    Args:
        ran: as of `who_ran`.
        every: as of `with_replays`.
    """
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


def inserted(schedule: Schedule, profile: Profile, turns: Turns) -> Schedule:
    """The schedule with a replay for each turn.

    Args:
        schedule: compute-only.
        turns: those of one round share gaps, others do not see each other.
    """
    if not len(turns.worker):
        return schedule
    before = _Places(schedule, profile_of_cut(profile, schedule.shape)).find(turns)
    by_place = np.lexsort((before, turns.worker))
    worker, stage, micro_batch, _ = turns.take(by_place)
    pipeline, index = np.divmod(micro_batch, schedule.shape.micro_batches)
    added = {"kind": np.full(len(stage), Replay.kind), "stage": stage, "pipeline": pipeline, "index": index}
    return insert(schedule, worker, before[by_place], added)[0]


def _times_without(schedule: Schedule, profile: Profile) -> tuple[Floats, Floats, Rows]:
    """(start, end, place in one order of all that respects every dependency) of each row, without replays."""
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


@dataclass(frozen=True)
class _Candidates:
    """The rows of a worker that replays of a stage may come before.

    Attributes:
        rows: in order. last: behind all computing; the replay goes there where no gap holds it.
        idle: when the worker is idle before each. start, order: of each, as of `_times_without`.
    """

    rows: Rows
    idle: Floats
    start: Floats
    order: Rows
    last: int


class _Places:
    """Finds where replays go in one schedule."""

    def __init__(self, schedule: Schedule, profile: Profile) -> None:
        self._schedule, self._profile, self._shape = schedule, profile, schedule.shape
        self._start, self._end, self._order = _times_without(schedule, profile)
        c, shape = schedule.columns, schedule.shape
        self._beside, self._reduces = is_kind(c.kind, Beside), is_kind(c.kind, ReduceGradients)
        self._of: dict[tuple[int, int], _Candidates] = {}
        self._seconds = np.sum([profile.per_stage(name, shape.stages) for name in Replay.row.seconds], axis=0)
        # Activations, and bytes of activations: of a stage, what a worker holds before each row, and its most ever.
        self._weights = np.array([shape.stage_sizes, profile.per_stage("activation", shape.stages)])
        held = [held_before(schedule, profile, in_bytes=in_bytes) for in_bytes in (False, True)]
        self._held = np.array([before for _, _, before in held])
        self._peak = np.zeros((len(held), shape.worker_count))
        for peak, (added, _, before) in zip(self._peak, held, strict=True):
            np.maximum.at(peak, c.worker, before + added)

    def find(self, turns: Turns) -> Rows:
        """The row that each replay comes before."""
        workers, stage, micro_batch, rounds = turns
        ready, behind = self._ready(workers, stage, micro_batch)
        speed = np.array([self._profile.speed_of(worker) for worker in self._shape.workers()])
        seconds = self._seconds[stage] * speed[workers]
        found, taken = np.empty(len(workers), dtype=np.int64), dict[tuple[int, int], dict[int, float]]()
        columns = (one.tolist() for one in (workers, stage, rounds, ready, behind, seconds))
        for place, (w, s, of, available, after, needed) in enumerate(zip(*columns, strict=True)):
            its = self._candidates(w, s)
            begins = np.maximum(its.idle, available)
            free = taken.setdefault((w, of), {})
            for row, since in free.items():
                begins[its.rows == row] = max(since, available)
            fits = (its.start - begins >= needed * (1 - TOLERANCE)) & (its.order > after)
            first = int(fits.argmax()) if len(fits) else 0
            if not len(fits) or not fits[first]:
                found[place] = its.last
                continue
            found[place] = row = int(its.rows[first])
            free[row] = float(begins[first]) + needed
        return found

    def _candidates(self, w: int, stage: int) -> _Candidates:
        if (w, stage) not in self._of:
            c = self._schedule.columns
            first, end = (int(offset) for offset in c.offsets[w : w + 2])
            holds = self._held[:, first:end].T + self._weights[:, stage] <= self._peak[:, w] * (1 + TOLERANCE)
            fits = holds.all(axis=1) & ~self._beside[first:end]
            until = self._reduces[first:end] & (c.stage[first:end] == stage)
            ends = np.where(self._beside[first:end], 0.0, self._end[first:end])
            idle = np.append(0.0, np.maximum.accumulate(ends))
            last = int(until.argmax()) if until.any() else end - first
            at = np.flatnonzero(fits[:last])
            rows = first + at
            self._of[w, stage] = _Candidates(rows, idle[at], self._start[rows], self._order[rows], first + last)
        return self._of[w, stage]

    def _ready(self, workers: Rows, stage: Rows, micro_batch: Rows) -> tuple[Floats, Rows]:
        """(when all that each replay needs is there, the last place in the order that has some of it made)."""
        pieces, shape = work(self._schedule), self._shape
        ready, behind = np.zeros(len(workers)), np.full(len(workers), -1, dtype=np.int64)
        for need in Replay.row.needs:
            makers = pieces.first(shape, pieces.of(*_MAKERS[need.value])).reshape(shape.stages, -1)
            of = stage + need.offset
            made = np.where((of >= 0) & (of < shape.stages), makers[np.clip(of, 0, shape.stages - 1), micro_batch], -1)
            there = np.flatnonzero(made >= 0)
            maker, receiver = pieces.row[made[there]], workers[there]
            sender, boundary = self._schedule.columns.worker[maker], stage[there] + min(need.offset, 0)
            way = self._profile.transfer_seconds(shape, sender, receiver, boundary)
            ready[there] = np.maximum(ready[there], self._end[maker] + np.where(sender == receiver, 0.0, way))
            behind[there] = np.maximum(behind[there], self._order[maker])
        return ready, behind
