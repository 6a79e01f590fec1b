"""Who replays what, and when: the work of a host is assigned to its peers, and spread over iterations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from recycle.ir.instruction import Forward
from recycle.ir.pieces import work
from recycle.ir.schedule import Schedule
from recycle.shape import MicroBatch, Worker

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


def who_ran(schedule: Schedule) -> dict[Checked, Worker]:
    """Who runs the forward of each stage and micro-batch."""
    pieces, shape = work(schedule), schedule.shape
    at = np.flatnonzero((pieces.kind == Forward.kind) & pieces.valid)
    columns = (pieces.stage[at], pieces.micro_batch[at], pieces.worker[at])
    workers = list(shape.workers())
    return {
        Checked(stage, MicroBatch(*divmod(number, shape.micro_batches))): workers[w]
        for stage, number, w in zip(*(one.tolist() for one in columns), strict=True)
    }


def assigned_to_peers(schedule: Schedule, hosts: Mapping[Checked, Worker]) -> dict[Worker, list[Checked]]:
    """Worker -> what it replays, in the order of its turns: first one of each peer, then another one of each.

    Args:
        hosts: as of `who_ran`.
    """
    of_host: dict[tuple[int, Worker], list[Checked]] = {}
    for checked, host in sorted(hosts.items()):
        of_host.setdefault((checked.stage, host), []).append(checked)
    found: dict[Worker, list[tuple[int, Checked]]] = {}
    of_stage = {stage: schedule.hosts(stage) for stage in {stage for stage, _ in of_host}}
    for (stage, host), ran in of_host.items():
        others = of_stage[stage]
        behind = sum(other <= host for other in others)
        peers = [other for other in (*others[behind:], *others[:behind]) if other != host]
        for place, checked in enumerate(ran if peers else ()):
            found.setdefault(peers[place % len(peers)], []).append((place, checked))
    return {worker: [checked for _, checked in sorted(mine)] for worker, mine in found.items()}


def in_turn(assigned: Mapping[Worker, Sequence[Checked]], rounds: int) -> list[Turn]:
    """The turns of what was assigned, spread over so many iterations; by worker and round."""
    return [
        Turn(checked, worker, place * rounds // len(mine))
        for worker, mine in sorted(assigned.items())
        for place, checked in enumerate(mine)
    ]
