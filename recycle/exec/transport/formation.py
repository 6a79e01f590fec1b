"""Which communicators a generation needs, in which order they form, and the store that they form on.

A process forms one communicator at a time, and each forms only while all its members are at it. Communicators are
therefore the edges of a graph whose vertices are the workers, and a coloring of the edges gives rounds: in one round
each worker forms at most one. Every process forms its own by round, then by name, an order that is the same
everywhere; so the first of all that have not formed has all its members waiting for it, and forming cannot deadlock.
That holds as well where some are not formed because they stand from before. A communicator of a sum has more than two
members: it gets the first round that is free at all of them.

Lanes between neighboring ranks are a bipartite graph unless the ranks are a ring of odd length; the lanes that states
are copied by, between hosts of one stage, are few. So there are about as many rounds as the busiest worker has
communicators.

Communicators are between processes, whichever roles of the plan they play, so that one may serve several generations.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import count
from typing import Any

import numpy as np
from torch.distributed.distributed_c10d import Store

from recycle.exec.transport.base import Lane
from recycle.exec.transport.communicators import CommunicatorKey
from recycle.exec.transport.groups import GroupsOfGeneration
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


TENSOR, LANE, SUM = "tensor", "lane", "stage"
"""What a communicator is for."""


def member_of(process: Worker, tensor_rank: int, tensor_parallel: int) -> str:
    """A process of a worker, of which there is one per tensor rank."""
    return f"{process}t{tensor_rank}" if tensor_parallel > 1 else str(process)


@dataclass(frozen=True)
class CommunicatorPart:
    """This process's part of a communicator that the generation needs.

    Attributes:
        purpose: of the communicator.
        number: of the sum; 0 for others.
        members: processes, by rank.
        rank: of this process.
        peer: role at the other end of a lane.
    """

    purpose: str
    number: int
    members: tuple[str, ...]
    rank: int
    peer: Worker | None = None

    @property
    def key(self) -> CommunicatorKey:
        return f"{self.purpose}{self.number}", self.members

    @property
    def name(self) -> str:
        """In its generation, the same at all members and no other's."""
        if self.purpose == LANE:
            return f"lane{self.members[0]}>{self.members[1]}"
        return f"{self.purpose}{self.number}:{self.members[0]}"


def parts_of(groups: GroupsOfGeneration, tensor_rank: int, tensor_parallel: int) -> list[CommunicatorPart]:
    """The parts of this process, in the order in which the communicators form."""
    process = {role: groups.processes.get(role, role) for role in groups.members}
    parts = []
    if tensor_parallel > 1:
        members = tuple(member_of(process[groups.role], rank, tensor_parallel) for rank in range(tensor_parallel))
        parts.append(CommunicatorPart(TENSOR, 0, members, tensor_rank))
    for wanted in formation(groups.lanes, groups.hosts):
        if groups.role not in wanted.members:
            continue
        rank = wanted.members.index(groups.role)
        members = tuple(member_of(process[role], tensor_rank, tensor_parallel) for role in wanted.members)
        if wanted.stage is None:
            parts.append(CommunicatorPart(LANE, 0, members, rank, wanted.members[1 - rank]))
        else:  # which of its processes plays which role is nothing to a sum
            ordered = tuple(sorted(members))
            parts.append(CommunicatorPart(SUM, wanted.stage, ordered, ordered.index(members[rank])))
    return parts


PAUSE_SECONDS = (0.001, 0.05)
"""How often a group that forms looks for its members: at first, and after a while."""


class FormingStore(Store):
    """Keys that a process's groups form on, with waits that end when the generation is over.

    torch's own clients block in `get` until the value is there, with the client's lock held: a process whose peer has
    died before it came would neither leave its generation nor reach its agent. Opening such a client looks its address
    up in the DNS with the interpreter lock held, which took 5 s where no name server answered. Backends accept this
    store below a PrefixStore, whether the keys are the agent's or torchrun's; that does not keep it alive.

    Args:
        client: `set`, `get` and `check` of it are used.
        over: set when the generation is over; waits then raise RuntimeError.
        seconds: after which a `get` of what is not there raises RuntimeError.
    """

    def __init__(self, client: Any, over: threading.Event, seconds: float = 300.0) -> None:
        super().__init__()
        self._client, self._over, self._seconds = client, over, seconds

    def set(self, key: str, value: str) -> None:
        self._client.set(key, value)

    def get(self, key: str) -> bytes:
        self.wait([key], timedelta(seconds=self._seconds))
        value: bytes = self._client.get(key)
        return value

    def check(self, keys: list[str]) -> bool:
        return bool(self._client.check(keys))

    def wait(self, keys: list[str], timeout: timedelta = timedelta(seconds=300)) -> None:
        deadline = time.monotonic() + timeout.total_seconds()
        pause, longest = PAUSE_SECONDS
        while not self._client.check(keys):
            if self._over.is_set() or time.monotonic() > deadline:
                raise RuntimeError(f"waited for {keys[0]} in vain")
            time.sleep(pause)
            pause = min(1.5 * pause, longest)
