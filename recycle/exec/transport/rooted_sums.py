"""Sums and gathers of shards over communicators that have sums on a root and broadcasts, as NCCL's do.

Reduce: each shard is summed on its first owner. From there the sum goes to the other owners over a communicator that
they have for themselves, so that all have the same bits: g N (D - 1) / D and g N (k - 1) / D bytes per host, as over
gloo (sharded_sums.py). Gather: the first owner broadcasts to all hosts of the stage, w N (D - 1) / D bytes. Another
owner has what comes already and takes it into a scratch, so that nobody reads its state while a buffer is written.

All hosts begin the operations of a communicator in the order of the shards.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from recycle.exec.transport.communicators import Communicator
from recycle.exec.transport.groups import GroupsOfGeneration
from recycle.job.footprint import ON_GPU
from recycle.job.shape import Worker

_OWNERS = 1 << 20
"""Number of the first group of owners, beyond those of stages and of tied stages."""


def with_owners(groups: GroupsOfGeneration) -> tuple[GroupsOfGeneration, dict[int, list[int | None]]]:
    """What a generation needs, with the groups of owners; and stage -> the number of each shard's group.

    None for a shard with one owner. One that all hosts of the stage own has their group.
    """
    hosts, numbers = dict(groups.hosts), dict[int, list[int | None]]()
    most = max(map(len, groups.owners.values()), default=0)
    for stage, owners in sorted(groups.owners.items()):
        known = {frozenset(hosts[stage]): stage}
        for place, mine in enumerate(owners):
            number = known.setdefault(frozenset(mine), _OWNERS + stage * most + place)
            hosts.setdefault(number, sorted(mine))
            numbers.setdefault(stage, []).append(number if len(mine) > 1 else None)
    return replace(groups, hosts=hosts), numbers


@dataclass(frozen=True)
class RootedSums:
    """One host's part in those of a stage.

    Args:
        hosts: communicator of all hosts.
        role: of this host.
        owners, givers: of each shard, as of `GroupsOfGeneration`.
        of_owners: communicator of each shard's owners; None where this host is not one of several.
        rank: of a role in a communicator.
        attempt: begins an operation. Raises TransportError when it cannot.
    """

    hosts: Communicator
    role: Worker
    owners: Sequence[Sequence[Worker]]
    givers: Sequence[Sequence[Worker]]
    of_owners: Sequence[Communicator | None]
    rank: Callable[[Communicator, Worker], int]
    attempt: Callable[[Callable[[], Any]], Any]

    def reduce(self, parts: Sequence[torch.Tensor]) -> list[Any]:
        """Begin to sum the parts of all shards, each in place on its first owner."""
        return [
            self._begin(self.hosts.reduce, part, self.hosts, mine[0])
            for part, mine in zip(parts, self.owners, strict=True)
            if part.numel()
        ]

    def broadcast(self, parts: Sequence[torch.Tensor]) -> list[Any]:
        """Begin to give the sums to the other owners; what follows on the device waits for them."""
        return [
            self._begin(group.broadcast, part, group, mine[0])
            for part, mine, group in zip(parts, self.owners, self.of_owners, strict=True)
            if part.numel() and group is not None
        ]

    def gather(self, parts: Sequence[torch.Tensor]) -> list[Any]:
        """Begin to fill the parts that this host has not."""
        works = []
        for part, mine in zip(parts, self.givers, strict=True):
            has_it = self.role in mine[1:]
            scratch = torch.empty_like(part[: ON_GPU.stepped]) if has_it else part
            for piece in torch.split(part, ON_GPU.stepped):
                if piece.numel():
                    into = scratch[: piece.numel()] if has_it else piece
                    works.append(self._begin(self.hosts.broadcast, into, self.hosts, mine[0]))
        return works

    def _begin(
        self, operation: Callable[[list[torch.Tensor], int], Any], part: torch.Tensor, group: Communicator, root: Worker
    ) -> Any:
        return self.attempt(lambda: operation([part], self.rank(group, root)))


def communicators_of(
    numbers: Sequence[int | None], owners: Sequence[Sequence[Worker]], role: Worker, sums: Mapping[int, Communicator]
) -> list[Communicator | None]:
    """The communicator of each shard's owners, where this host is one of several."""
    return [
        sums[number] if number is not None and role in mine else None
        for number, mine in zip(numbers, owners, strict=True)
    ]
