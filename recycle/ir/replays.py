"""Where replays go: into the gaps of a schedule, spread over several iterations until each micro-batch had its turn.

Every micro-batch of every stage is replayed once in `rounds` iterations, by another live host of the stage than the one
that ran it; the peers of a host take turns with what it ran (turns.py). All workers do theirs in the same iterations,
because an iteration takes as long as its slowest worker.

A replay goes into the first gap that holds it (replay_places.py). Where there is none it goes behind the worker's
computing, before the stage is reduced, where it lengthens the iteration by what no later gap takes up. Either way all
that it needs comes before it in one order that respects every dependency, and nobody waits for it but its own worker.
So replays can be added to a valid schedule, and taken out again, in any number: one lowered schedule holds those of all
iterations, and what runs in one of them is that schedule without the others. Both ends of a transfer leave together, so
lanes keep their order.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import numpy as np

from recycle.ir.columns import Flags, Ints, Rows
from recycle.ir.dependencies import crossings, find
from recycle.ir.instruction import CARRIERS, Instruction, Replay, StageWide, Transfer, is_kind
from recycle.ir.lower import lower
from recycle.ir.replay_places import inserted
from recycle.ir.replay_room import that_fit
from recycle.ir.schedule import Schedule
from recycle.ir.turns import ALWAYS as ALWAYS
from recycle.ir.turns import Checked as Checked
from recycle.ir.turns import Turn as Turn
from recycle.ir.turns import assigned_to_peers, in_turn, who_ran
from recycle.profile import Profile
from recycle.shape import MicroBatch, Worker

MOST_ROUNDS = 1_000_000
"""Iterations in which all have their turn, at most."""


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
        rounds = np.array([*(turn.round for turn in self.turns), ALWAYS], dtype=np.int64)
        return rounds[self.turn_of_rows]

    @cached_property
    def turn_of_rows(self) -> Rows:
        """Row of `whole` -> the place in `turns` of the only one that it is there for, -1 for what runs in any case."""
        c, shape = self.whole.columns, self.whole.shape
        found = np.full(len(c), -1, dtype=np.int64)
        if not self.turns:
            return found
        index = {worker: number for number, worker in enumerate(shape.workers())}
        worker = np.array([index[turn.worker] for turn in self.turns], dtype=np.int64)
        stage = np.array([turn.checked.stage for turn in self.turns], dtype=np.int64)
        micro_batch = np.array([turn.checked.micro_batch for turn in self.turns], dtype=np.int64)
        micro_batch = micro_batch[:, 0] * shape.micro_batches + micro_batch[:, 1]

        def key(receiver: Rows | Ints, value: Rows | int, made_by: Rows | Ints, of: Rows) -> Rows:
            within = (receiver.astype(np.int64) * len(CARRIERS) + value) * (shape.stages + 2) + made_by + 1
            return within * shape.global_micro_batches + of

        at = np.flatnonzero(c.kind == Replay.kind)
        of_rows = c.pipeline.astype(np.int64) * shape.micro_batches + c.index
        found[at] = find(key(worker, 0, stage, micro_batch), key(c.worker[at], 0, c.stage[at], of_rows[at]))
        # A transfer is there for a turn alone if nothing that runs in any case needs the value there.
        kept = np.flatnonzero(~is_kind(c.kind, (Transfer, StageWide)) & (found < 0))
        base = replace(self.whole, columns=c.take(kept))
        needed = crossings(base)
        always = key(base.columns.worker[needed.consumer], needed.value, needed.stage, needed.micro_batch)
        needs = [key(worker, need.value, stage + need.offset, micro_batch) for need in Replay.row.needs]
        wanted, turn = np.concatenate(needs), np.tile(np.arange(len(self.turns)), len(needs))
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
        columns = c.take(kept)
        turns = tuple(turn for turn, does in zip(self.turns, stays.tolist(), strict=True) if does)
        return Rotation(replace(self.whole, columns=columns), self.rounds if turns else 0, turns)

    def room(self) -> list[list[int]]:
        """Of each round the stages that have replays."""
        found: list[set[int]] = [set() for _ in range(self.rounds)]
        for turn in self.turns:
            if turn.round != ALWAYS:
                found[turn.round].add(turn.checked.stage)
        return [sorted(of) for of in found]

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
        return replace(self.whole, columns=c.take(kept))


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
    hosts = who_ran(base)
    mine = assigned_to_peers(base, hosts) if every else {}
    rounds = max(map(len, mine.values()), default=0) if every == "gaps" else every
    rotation = _rotation(base, profile, rounds, in_turn(mine, rounds))
    if every == "gaps" and room is not None and len(room) in (0, rounds):
        stays = [bool(room) and turn.checked.stage in room[turn.round] for turn in rotation.turns]
        rotation = rotation.keeping(np.array(stays, bool))
    elif every == "gaps" and rotation.turns:
        rotation = rotation.keeping(that_fit(rotation.whole, rotation.turn_of_rows, rotation.turns, profile))
    if not disputed:
        return rotation
    turns = [turn for turn in rotation.turns if turn.checked not in disputed]
    turns += [
        Turn(checked, peer, ALWAYS)
        for checked in sorted(disputed)
        for peer in base.hosts(checked.stage)
        if checked in hosts and peer != hosts[checked]
    ]
    return _rotation(base, profile, rotation.rounds, turns)


def _rotation(base: Schedule, profile: Profile, rounds: int, turns: Iterable[Turn]) -> Rotation:
    by_worker = tuple(sorted(turns, key=lambda turn: (turn.worker, turn.round)))
    return Rotation(lower(inserted(base, profile, by_worker)), rounds, by_worker)


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
    return replace(schedule, columns=c.take(kept))
