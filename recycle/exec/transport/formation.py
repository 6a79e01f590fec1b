"""Communicators of a generation, the order in which they form, and the store that they form on.

An edge coloring, of workers by communicators, gives rounds in which each worker forms at most one. A sum gets the first
round that is free at all its members. Every process forms its communicators by round, then by name, which is the same
order everywhere, so forming cannot deadlock. Communicators connect processes, not roles of a plan.
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
class NeededCommunicator:
    """A communicator that a generation needs.

    Attributes:
        round: in which it forms, from 0.
        members: by rank; the sender of a lane before its receiver.
        stage: stage, or number of a group of tied stages, of its sum; None for a lane.
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


def formation_order(lanes: Collection[Lane], hosts: Mapping[int, Sequence[Worker]]) -> list[NeededCommunicator]:
    """Communicators of lanes and of sums over several hosts, in the order in which they form."""
    # Lanes within a pipeline get low numbers: they must re-form after a failure inside an iteration, while re-routed
    # lanes may still exist from an earlier failure.
    ordered = sorted(lanes, key=lambda lane: (lane[0].pipeline != lane[1].pipeline, lane))
    number = {worker: place for place, worker in enumerate(sorted({worker for lane in lanes for worker in lane}))}
    colors = color_edges([(number[sender], number[receiver]) for sender, receiver in ordered])
    taken: dict[Worker, set[int]] = {}
    needed = [NeededCommunicator(color, lane) for color, lane in zip(colors, ordered, strict=True)]
    for communicator in needed:
        for worker in communicator.members:
            taken.setdefault(worker, set()).add(communicator.round)
    for stage, members in sorted(hosts.items()):
        if len(members) < 2:
            continue
        busy = [taken.setdefault(worker, set()) for worker in members]
        free = next(color for color in count() if not any(color in rounds for rounds in busy))
        for rounds in busy:
            rounds.add(free)
        needed.append(NeededCommunicator(free, tuple(sorted(members)), stage))
    return sorted(needed, key=lambda item: (item.round, item.stage is not None, item.members))


TENSOR, LANE, SUM = "tensor", "lane", "stage"
"""Purposes of communicators."""


def member_of(process: Worker, tensor_rank: int, tensor_parallel: int) -> str:
    return f"{process}t{tensor_rank}" if tensor_parallel > 1 else str(process)


@dataclass(frozen=True)
class CommunicatorPart:
    """This process's part of a communicator that the generation needs.

    Attributes:
        number: of the sum; 0 for other purposes.
        members: processes, by rank.
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
        """Unique name in its generation, the same at all members."""
        if self.purpose == LANE:
            return f"lane{self.members[0]}>{self.members[1]}"
        return f"{self.purpose}{self.number}:{self.members[0]}"


def parts_of(groups: GroupsOfGeneration, tensor_rank: int, tensor_parallel: int) -> list[CommunicatorPart]:
    """The parts of this process, in the order in which the communicators form."""
    parts = []
    if tensor_parallel > 1:
        own = groups.process(groups.role)
        members = tuple(member_of(own, rank, tensor_parallel) for rank in range(tensor_parallel))
        parts.append(CommunicatorPart(TENSOR, 0, members, tensor_rank))
    for needed in formation_order(groups.lanes, groups.hosts):
        if groups.role not in needed.members:
            continue
        rank = needed.members.index(groups.role)
        members = tuple(member_of(groups.process(role), tensor_rank, tensor_parallel) for role in needed.members)
        if needed.stage is None:
            parts.append(CommunicatorPart(LANE, 0, members, rank, needed.members[1 - rank]))
        else:  # a sum does not depend on roles, so order members by process
            ordered = tuple(sorted(members))
            parts.append(CommunicatorPart(SUM, needed.stage, ordered, ordered.index(members[rank])))
    return parts


PAUSE_SECONDS = (0.001, 0.05)
"""Polling interval of a forming group, initial and maximum."""


class FormingStore(Store):
    """Store that a process's groups form on, with waits that end with the generation.

    torch's own clients block in `get` with the client's lock held. Backends accept this store below a PrefixStore but
    do not keep it alive. Waits raise RuntimeError after `over` is set, or after `seconds`.
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
                raise RuntimeError(f"key {keys[0]} was not written before the deadline or the end of the generation")
            time.sleep(pause)
            pause = min(1.5 * pause, longest)
