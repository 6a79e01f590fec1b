"""The communicators of a plan's lanes: one per lane, shared by several lanes at workers that have many.

A communicator costs memory of the device, and time to form. After a failure the neighbors of a dead worker exchange
messages with all of its peers. Lanes beyond `LANES` per worker share communicators, whose transfers a worker carries
one at a time, unbuffered and in the order of its program. Executor, checker and simulator use the same function.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from recycle.ir.columns import Rows
from recycle.ir.instruction import Receive, Send, Transfer, is_kind
from recycle.ir.schedule import Schedule
from recycle.job.shape import Worker

Lane = tuple[Worker, Worker]
"""(sender, receiver)."""
LANES = 8
"""Most communicators of a worker for the lanes of its plan."""


def lanes_of(schedule: Schedule) -> list[Lane]:
    """The directed pairs of workers between which a lowered schedule has transfers, sorted."""
    columns, shape = schedule.columns, schedule.shape
    sends = np.flatnonzero(is_kind(columns.kind, Send))
    pairs = np.unique(columns.worker[sends].astype(np.int64) * shape.worker_count + columns.peer[sends])
    return [(shape.worker_at(pair // shape.worker_count), shape.worker_at(pair % shape.worker_count)) for pair in pairs]


def share_communicators(lanes: Collection[Lane], most: int = LANES) -> list[tuple[Lane, ...]]:
    """Return the lanes of each communicator, such that no worker has more than `most` communicators.

    Lanes between pipelines are merged first, and of these the ones with the most workers in common.
    """
    members = [frozenset(lane) for lane in sorted(lanes)]
    shared = {number: [lane] for number, lane in enumerate(sorted(lanes))}
    of_worker: dict[Worker, set[int]] = {}
    for number, workers in enumerate(members):
        for worker in workers:
            of_worker.setdefault(worker, set()).add(number)

    def cost(number: int) -> tuple[bool, int, int]:
        return any(lane[0].pipeline == lane[1].pipeline for lane in shared[number]), len(shared[number]), number

    # Merging at one worker never adds a communicator to another one.
    for worker in sorted(of_worker, key=lambda worker: (-len(of_worker[worker]), worker)):
        while len(own := of_worker[worker]) > most:
            first, *others = sorted(own, key=cost)
            second = min(others, key=lambda other: (cost(other)[0], -len(members[first] & members[other]), cost(other)))
            for member in members[second]:
                of_worker[member] = of_worker[member] - {second} | {first}
            members[first] |= members[second]
            shared[first] += shared.pop(second)
    # Lanes that share with the same workers share one communicator.
    by_key: dict[object, list[Lane]] = {}
    for number, of_number in shared.items():
        by_key.setdefault(number if len(of_number) == 1 else members[number], []).extend(of_number)
    return sorted(tuple(sorted(of_key)) for of_key in by_key.values())


def shared_chains(schedule: Schedule, sends: Rows, shared: Sequence[Sequence[Lane]]) -> tuple[Rows, Rows]:
    """Return (worker and communicator, send) of each transfer on the lanes of `shared`, by worker in program order.

    `sends` has the send of each receive; receives without one are skipped.
    """
    columns, shape = schedule.columns, schedule.shape
    number = {
        shape.worker_index(sender) * shape.worker_count + shape.worker_index(receiver): place
        for place, lanes in enumerate(shared)
        for sender, receiver in lanes
    }
    rows = np.flatnonzero(is_kind(columns.kind, Transfer))
    transfer = np.where(is_kind(columns.kind[rows], Receive), sends[rows], rows)
    rows, transfer = rows[transfer >= 0], transfer[transfer >= 0]
    lane = columns.worker[transfer].astype(np.int64) * shape.worker_count + columns.peer[transfer]
    lanes, where = np.unique(lane, return_inverse=True)
    place = np.array([number.get(each, -1) for each in lanes.tolist()], dtype=np.int64)[where]
    rows, transfer, place = rows[place >= 0], transfer[place >= 0], place[place >= 0]
    chain = columns.worker[rows].astype(np.int64) * (len(shared) + 1) + place
    order = np.argsort(chain, kind="stable")
    return chain[order], transfer[order]
