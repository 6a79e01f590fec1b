"""Communicators of a generation, the order in which they form, and the store that they form on.

A worker has at most `LANES` communicators for the lanes of the plan, `COPIES` for copies of states, and one per set of
workers that sum. They form in rounds, in which each worker forms at most `AT_ONCE`. Every process begins its
communicators by round, then by name, which is the same order everywhere, so forming cannot deadlock. Communicators
connect processes, not roles of a plan.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import chain, count
from typing import Any, NamedTuple

from torch.distributed.distributed_c10d import Store

from recycle.exec.transport.base import Lane
from recycle.exec.transport.communicators import CommunicatorKey
from recycle.exec.transport.groups import GroupsOfGeneration
from recycle.ir.communicators import share_communicators
from recycle.job.shape import Worker

COPIES = 2
"""Most communicators of a worker for copies of states."""
TENSOR, LANE, COPY, SUM = "tensor", "lane", "copy", "sum"
"""Purposes of communicators."""
AT_ONCE = 4
"""Communicators that a process forms at the same time. NCCL hangs more often the more there are (NCCL issue 2379)."""


class NeededCommunicator(NamedTuple):
    """A communicator that a generation needs.

    Attributes:
        round: in which it forms, from 0.
        purpose: LANE, COPY or SUM.
        members: by rank; the sender of a single lane before its receiver.
        lanes: that use it; empty for sums.
        sums: stages, or numbers of groups of tied stages or owners, whose hosts are its members.
    """

    round: int
    purpose: str
    members: tuple[Worker, ...]
    lanes: tuple[Lane, ...] = ()
    sums: tuple[int, ...] = ()


def formation_order(
    lanes: Collection[Lane], hosts: Mapping[int, Sequence[Worker]], copies: Collection[Lane] = ()
) -> list[NeededCommunicator]:
    """Communicators of lanes, of copies and of sums over several hosts, in the order in which they form."""
    wanted = [
        NeededCommunicator(
            0, purpose, of_lanes[0] if len(of_lanes) == 1 else tuple(sorted({*chain(*of_lanes)})), of_lanes
        )
        for purpose, shared in (
            (LANE, share_communicators(lanes)),
            (COPY, share_communicators({*copies} - {*lanes}, COPIES)),
        )
        for of_lanes in shared
    ]
    sums: dict[tuple[Worker, ...], list[int]] = {}
    for number, members in sorted(hosts.items()):
        if len(members) > 1:
            sums.setdefault(tuple(sorted(members)), []).append(number)
    wanted += [NeededCommunicator(0, SUM, members, sums=tuple(numbers)) for members, numbers in sums.items()]
    # Lanes within a pipeline get early rounds: they must re-form after a failure inside an iteration, while re-routed
    # lanes may still exist from an earlier failure.
    wanted.sort(key=lambda item: (not item.lanes, item.members[0].pipeline != item.members[1].pipeline, item))
    begun: Counter[tuple[Worker, int]] = Counter()
    needed = []
    for item in wanted:
        free = next(turn for turn in count() if all(begun[worker, turn] < AT_ONCE for worker in item.members))
        begun.update((worker, free) for worker in item.members)
        needed.append(item._replace(round=free))
    # Neighbors (0, 1), (2, 3), ... form before (1, 2), (3, 4), ..., else each pair waits for the one before.
    return sorted(
        needed, key=lambda item: (item.round, item.purpose, min(w.rank for w in item.members) % 2, item.members)
    )


def member_of(process: Worker, tensor_rank: int, tensor_parallel: int) -> str:
    return f"{process}t{tensor_rank}" if tensor_parallel > 1 else str(process)


@dataclass(frozen=True)
class CommunicatorPart:
    """This process's part of a communicator that the generation needs.

    Attributes:
        members: processes, by rank.
        rank_of: role -> its rank.
        lanes, sums: as in `NeededCommunicator`.
    """

    purpose: str
    members: tuple[str, ...]
    rank: int
    rank_of: Mapping[Worker, int]
    lanes: tuple[Lane, ...] = ()
    sums: tuple[int, ...] = ()

    @property
    def key(self) -> CommunicatorKey:
        return self.purpose, self.members

    @property
    def name(self) -> str:
        """Unique name in its generation, the same at all members."""
        return f"{self.purpose}{'>'.join(self.members)}"


def parts_of(groups: GroupsOfGeneration, tensor_rank: int, tensor_parallel: int) -> list[CommunicatorPart]:
    """The parts of this process, in the order in which the communicators form."""
    parts = []
    own = groups.process(groups.role)
    if tensor_parallel > 1:
        members = tuple(member_of(own, rank, tensor_parallel) for rank in range(tensor_parallel))
        parts.append(CommunicatorPart(TENSOR, members, tensor_rank, {}))
    for needed in formation_order(groups.lanes, groups.hosts, groups.copies):
        if groups.role not in needed.members:
            continue
        name = {role: member_of(groups.process(role), tensor_rank, tensor_parallel) for role in needed.members}
        # What is not a single lane does not depend on roles, so its members are ordered by process.
        members = tuple(name.values()) if len(needed.lanes) == 1 else tuple(sorted(name.values()))
        rank_of = {role: members.index(member) for role, member in name.items()}
        parts.append(
            CommunicatorPart(needed.purpose, members, rank_of[groups.role], rank_of, needed.lanes, needed.sums)
        )
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
