"""Which communicators a generation needs, and in which order they form.

A process forms one communicator at a time, and each forms only while all its members are at it. Communicators are
therefore the edges of a graph whose vertices are the workers, and a coloring of the edges gives rounds: in one round
each worker forms at most one. Every process forms its own by round, then by name, an order that is the same
everywhere; so the first of all that have not formed has all its members waiting for it, and forming cannot deadlock.
That holds as well where some are not formed because they stand from before. A communicator of a sum has more than two
members: it gets the first round that is free at all of them.

Lanes between neighboring ranks are a bipartite graph unless the ranks are a ring of odd length; the lanes that states
are copied by, between hosts of one stage, are few. So there are about as many rounds as the busiest worker has
communicators.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import count

import numpy as np

from recycle.exec.transport.base import Lane
from recycle.ir.instruction import Send
from recycle.ir.kinds import is_kind
from recycle.ir.schedule import Schedule
from recycle.job.shape import Worker
from recycle.plans.edge_coloring import color_edges


@dataclass(frozen=True)
class Wanted:
    """A communicator that a generation needs.

    Attributes:
        round: in which it forms, from 0.
        members: by rank; the sender of a lane before its receiver.
        stage: whose sum it carries (or the number of a group of tied stages); None for a lane.
    """

    round: int
    members: tuple[Worker, ...]
    stage: int | None = None


def lanes_of(schedule: Schedule) -> list[Lane]:
    """The directed pairs of workers between which a lowered schedule has transfers, sorted."""
    columns, shape = schedule.columns, schedule.shape
    sends = np.flatnonzero(is_kind(columns.kind, (Send,)))
    pairs = np.unique(columns.worker[sends].astype(np.int64) * shape.worker_count + columns.peer[sends])
    return [(shape.worker_at(pair // shape.worker_count), shape.worker_at(pair % shape.worker_count)) for pair in pairs]


def formation(lanes: Collection[Lane], hosts: Mapping[int, Sequence[Worker]]) -> list[Wanted]:
    """The communicators of lanes and of the sums of several hosts, in the order in which they form.

    Args:
        hosts: stage, or number of a group of tied stages -> its live hosts.
    """
    # Those inside a pipeline come first, so that they have low numbers: after a failure in the middle of an iteration
    # they form again, while those of re-routed micro-batches may be there from an earlier failure.
    ordered = sorted(lanes, key=lambda lane: (lane[0].pipeline != lane[1].pipeline, lane))
    number = {worker: place for place, worker in enumerate(sorted({worker for lane in lanes for worker in lane}))}
    colors = color_edges([(number[sender], number[receiver]) for sender, receiver in ordered])
    taken: dict[Worker, set[int]] = {}
    wanted = [Wanted(color, lane) for color, lane in zip(colors, ordered, strict=True)]
    for one in wanted:
        for worker in one.members:
            taken.setdefault(worker, set()).add(one.round)
    for stage, members in sorted(hosts.items()):
        if len(members) < 2:
            continue
        busy = [taken.setdefault(worker, set()) for worker in members]
        free = next(color for color in count() if not any(color in rounds for rounds in busy))
        for rounds in busy:
            rounds.add(free)
        wanted.append(Wanted(free, tuple(sorted(members)), stage))
    return sorted(wanted, key=lambda one: (one.round, one.stage is not None, one.members))
