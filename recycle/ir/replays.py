"""Where replays go: into the gaps of a schedule, spread over several iterations until each micro-batch had its turn.

Every micro-batch of every stage is replayed once in `rounds` iterations, by another live host of the stage than the one
that ran it; the peers of a host take turns with what it ran. All workers do theirs in the same iterations,
because an iteration takes as long as its slowest worker.

A replay goes into the first gap that holds it (replay_places.py). Where there is none it goes behind the worker's
computing, before the stage is reduced, where it lengthens the iteration by what no later gap takes up. Either way all
that it needs comes before it in one order that respects every dependency, and nobody waits for it but its own worker.
So replays can be added to a valid schedule, and taken out again, in any number: one lowered schedule holds those of all
iterations, and what runs in one of them is that schedule without the others. Both ends of a transfer leave together, so
lanes keep their order.

Which of them leave the period as it is, is found on the graph of the schedule with all, which is made once. What runs
in one round is a part of that: its edges between rows that stay, and the chains of workers and lanes that close over
those that do not. So a round is timed without being written out.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal

import numpy as np

from recycle.ir.columns import Flags, Ints, Rows
from recycle.ir.compiled import COMPILE_FROM
from recycle.ir.dependencies import Dependencies, dependencies, find
from recycle.ir.event_graph import EventGraph, event_edges, event_graph
from recycle.ir.graph import group_edges, load_compiled
from recycle.ir.instruction import CARRIERS, Instruction, Replay, StageWide, Transfer, is_kind
from recycle.ir.lower import lower
from recycle.ir.memory import TOLERANCE
from recycle.ir.replay_places import ALWAYS as ALWAYS
from recycle.ir.replay_places import NO_TURNS, Turns, assigned_to_peers, inserted, who_ran
from recycle.ir.replay_places import Checked as Checked
from recycle.ir.schedule import Schedule
from recycle.ir.simulate import time_graph
from recycle.job.profile import Profile
from recycle.job.shape import MicroBatch, Worker

_FEW_EVENTS = 5 * COMPILE_FROM
"""Rows that are timed in all, up to which plain Python is faster than loading compiled loops."""
MOST_ROUNDS = 1_000_000
"""Iterations in which all have their turn, at most."""


@dataclass(frozen=True, eq=False)
class Rotation:
    """A schedule with replays that take turns.

    Attributes:
        whole: lowered, with the replays of all rounds: what is checked, and whose lanes are formed.
        rounds: iterations until all had their turn; 0 where nothing is replayed in turn.
        turns: all replays that were added.
    """

    whole: Schedule
    rounds: int
    turns: Turns = NO_TURNS
    _programs: dict[tuple[Worker, int], tuple[Instruction, ...]] = field(default_factory=dict, repr=False)
    _checked: dict[int, frozenset[Checked]] = field(default_factory=dict, repr=False)

    def round_of(self, iteration: int) -> int:
        """The round of an iteration; `ALWAYS` of all in which nothing has its turn."""
        number = iteration % self.rounds if self.rounds else ALWAYS
        return number if number in self._used else ALWAYS

    @cached_property
    def _used(self) -> frozenset[int]:
        return frozenset(self.turns.round.tolist())

    @cached_property
    def _rounds_of_rows(self) -> Rows:
        """Row of `whole` -> the only round in which it runs, or `ALWAYS`."""
        return np.append(self.turns.round, ALWAYS)[self.turn_of_rows]

    @cached_property
    def turn_of_rows(self) -> Rows:
        """Row of `whole` -> the place in `turns` of the only one that it is there for, -1 for what runs in any case."""
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
        # A transfer is there for a turn alone if nothing that runs in any case needs the value there.
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
        """The rotation without some of its turns.

        Args:
            stays: of each turn whether it does.
        """
        kept = np.flatnonzero(np.append(stays, True)[self.turn_of_rows])
        c = self.whole.columns
        return Rotation(
            replace(self.whole, columns=c.take(kept)), self.rounds if stays.any() else 0, self.turns.take(stays)
        )

    def room(self) -> list[list[int]]:
        """Of each round the stages that have replays."""
        return [np.unique(self.turns.stage[self.turns.round == number]).tolist() for number in range(self.rounds)]

    def _runs(self, iteration: int) -> Flags:
        """Of each row of `whole` whether it runs in an iteration."""
        return np.isin(self._rounds_of_rows, (ALWAYS, self.round_of(iteration)))

    def schedule(self, iteration: int) -> Schedule:
        """The lowered schedule of an iteration."""
        return replace(self.whole, columns=self.whole.columns.take(np.flatnonzero(self._runs(iteration))))

    def program(self, worker: Worker, iteration: int) -> tuple[Instruction, ...]:
        """What `worker` runs in an iteration: the same object in all of a round, and in all without replays in turn."""
        key = worker, self.round_of(iteration)
        if key not in self._programs:
            self._programs[key] = self.schedule(iteration).program(worker)
        return self._programs[key]

    def checked(self, iteration: int) -> frozenset[Checked]:
        """What is replayed in an iteration."""
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
    """A schedule with replays of everything, in turn.

    Args:
        schedule: valid; compute-only, or lowered, whose transfers are then written anew.
        every: iterations until everything was replayed; 0 for nothing. "gaps": one of each worker in an iteration, and
            only what leaves the period as it is; a stage that has no room is not replayed at all.
        profile: prices the schedule, to find its gaps; one slot each when left out.
        disputed: what all other hosts replay besides, in every iteration.
        room: of each round the stages whose replays leave the period as it is, for "gaps", empty for none at all;
            worked out when left out, or when there are not as many rounds.
    """
    profile = profile or Profile.uniform()
    base = _without_transfers(schedule)
    ran, shape = who_ran(base), base.shape
    turns, rounds = assigned_to_peers(base, ran, every) if every else (NO_TURNS, 0)
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
    return Rotation(lower(inserted(base, profile, by_worker)), rounds, by_worker)


def _without_transfers(schedule: Schedule) -> Schedule:
    c = schedule.columns
    kept = np.flatnonzero(~is_kind(c.kind, Transfer))
    if len(kept) == len(c):
        return schedule
    return replace(schedule, columns=c.take(kept))


def _that_fit(whole: Schedule, of_rows: Rows, turns: Turns, profile: Profile) -> Flags:
    """Of each turn whether it stays where those that lengthen the period are left out; all of a round together.

    Stages are tried from the last one, whose hosts wait longest for their first input, by their first round; a round
    that turns out longer does without the first of them.

    Args:
        whole: lowered, with the replays of all turns.
        of_rows: of each of its rows the number of the only turn that it is there for, -1 for what always runs.
    """
    graph = event_graph(whole)
    stage, number = turns.stage, turns.round
    rounds = np.unique(number[number != ALWAYS]).tolist()
    if len(graph.order) * (len(rounds) + whole.shape.stages) > _FEW_EVENTS:
        load_compiled()

    def period(stays: Flags) -> float:
        kept = np.append(stays, True)[of_rows]
        return time_graph(_part_of(graph, kept), profile).period

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


def _part_of(graph: EventGraph, kept: Flags) -> EventGraph:
    """The graph of a lowered schedule without some rows, such that none that stays needs one of them.

    Args:
        kept: of each row whether it stays.
    """
    whole, within = graph.schedule, graph.dependencies
    rows, joins = np.flatnonzero(kept), within.nodes - within.rows
    number = np.full(within.nodes, -1, dtype=np.int64)
    number[rows] = np.arange(len(rows))
    number[within.rows :] = len(rows) + np.arange(joins)
    columns = whole.columns.take(rows)
    source, target = number[within.source], number[within.target]
    edges = (source >= 0) & (target >= 0)
    carried_source, carried_target = number[within.carried_source], number[within.carried_target]
    carried = (carried_source >= 0) & (carried_target >= 0)
    sends = within.sends[rows]
    part = Dependencies(
        len(rows),
        len(rows) + joins,
        source[edges],
        target[edges],
        within.cause[edges],
        carried_source[carried],
        carried_target[carried],
        within.missing,
        np.where(sends >= 0, number[sends], -1),
        within.crossings,
    )
    source, target, _ = event_edges(columns, part, graph.serialised)
    offsets, sources = group_edges(source, target, part.nodes)
    order = number[graph.order]
    return EventGraph(replace(whole, columns=columns), part, offsets, sources, order[order >= 0], graph.serialised)
