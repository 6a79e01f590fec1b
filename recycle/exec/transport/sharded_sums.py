"""Sums and gathers of shards, over sends and receives (gloo) or over sums on a root and broadcasts (NCCL).

Reduce: each shard is summed on its first owner, and the sum goes from there to the other owners. So all owners have the
same bits, also of sums that depend on their order, and with N elements of g bytes over D hosts each sends
g N (D - 1) / D for the first owners and g N (k - 1) / D for the others. Gather: the first owner of a shard gives it to
the hosts that do not own it, w N (D - k) / D bytes, or by broadcasts to all, w N (D - 1) / D.

gloo has no reduce-scatter of its own (`ShardedSums`): every host sends its part of a shard to the first owner, which
adds them in the order of the hosts. Parts go in pieces, so that all a host needs besides is two pieces from each peer,
and adds one while the next comes.

With NCCL (`RootedSums`) the owners of a shard have a communicator for themselves. An owner that has already what a
broadcast brings takes it into a scratch, so that nobody reads its state while a buffer is written. All hosts begin the
operations of a communicator in the order of the shards.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from recycle.exec.transport.communicators import Communicator
from recycle.exec.transport.groups import GroupsOfGeneration
from recycle.job.footprint import AWAITED, ON_GPU, SHARD_PIECE
from recycle.job.shape import Worker

_REDUCE, _SUM, _GATHER = range(3)


class ShardedSums:
    """One host's part in them.

    Args:
        group: of the stage's hosts; a torch backend with send and recv.
        rank: of this host in it.
        size: of the group.
        owners: of each shard, ranks of those who own it, the first first.
        givers: of these, who has its parameters before a gather.
        wait: waits for an operation of the group.
    """

    def __init__(
        self,
        group: Any,
        rank: int,
        size: int,
        owners: Sequence[Sequence[int]],
        givers: Sequence[Sequence[int]],
        wait: Callable[[Any], None],
    ) -> None:
        self._group, self._rank, self._owners, self._givers, self._wait = group, rank, owners, givers, wait
        self._peers = [peer for peer in range(size) if peer != rank]

    def reduce_scatter(self, parts: Sequence[torch.Tensor]) -> None:
        """Sum the parts in place; returns when the sums are there and all is sent."""
        sent, received, mine = list[Any](), list[Any](), list[int]()
        for shard, (part, owners) in enumerate(zip(parts, self._owners, strict=True)):
            first, *others = owners
            if first == self._rank:
                mine.append(shard)
                continue
            for number, piece in enumerate(_pieces(part)):
                sent.append(self._send(piece, first, shard, number, _REDUCE))
                if self._rank in others:
                    # The sum comes when the first owner has all of what is being sent from here.
                    received.append(self._receive(piece, first, shard, number, _SUM))
        for shard in mine:
            sent += self._add_up(shard, parts[shard])
        for work in [*received, *sent]:
            self._wait(work)

    def _add_up(self, shard: int, part: torch.Tensor) -> list[Any]:
        """Add what the peers have of a part, piece by piece, and send it to the other owners; what is being sent."""
        whole = _pieces(part)
        scratch = [
            [torch.empty_like(whole[0]) for _ in self._peers] if whole else [] for _ in range(min(AWAITED, len(whole)))
        ]
        coming: list[list[Any]] = []

        def expect(number: int) -> None:
            size = len(whole[number])
            coming.append(
                [
                    self._receive(into[:size], peer, shard, number, _REDUCE)
                    for peer, into in zip(self._peers, scratch[number % AWAITED], strict=True)
                ]
            )

        for number in range(len(scratch)):
            expect(number)
        sent = []
        for number, piece in enumerate(whole):
            for work, other in zip(coming[number], scratch[number % AWAITED], strict=True):
                self._wait(work)
                piece.add_(other[: len(piece)])
            sent += [self._send(piece, owner, shard, number, _SUM) for owner in self._owners[shard][1:]]
            if number + AWAITED < len(whole):
                expect(number + AWAITED)
        return sent

    def gather(self, parts: Sequence[torch.Tensor]) -> None:
        """Fill the parts that this host does not own; returns when that and all sends are done."""
        works = []
        for shard, (part, owners) in enumerate(zip(parts, self._givers, strict=True)):
            for number, piece in enumerate(_pieces(part)):
                if owners[0] == self._rank:
                    takers = (peer for peer in self._peers if peer not in owners)
                    works += [self._send(piece, peer, shard, number, _GATHER) for peer in takers]
                elif self._rank not in owners:
                    works.append(self._receive(piece, owners[0], shard, number, _GATHER))
        for work in works:
            self._wait(work)

    def _send(self, piece: torch.Tensor, peer: int, shard: int, number: int, purpose: int) -> Any:
        return self._group.send([piece], peer, self._tag(shard, number, purpose))

    def _receive(self, piece: torch.Tensor, peer: int, shard: int, number: int, purpose: int) -> Any:
        return self._group.recv([piece], peer, self._tag(shard, number, purpose))

    def _tag(self, shard: int, number: int, purpose: int) -> int:
        """Messages of one pair of hosts and tag come in the order in which they were sent, so iterations share tags."""
        return ((shard % 4096) * 3 + purpose) * 32768 + number % 32768


def _pieces(part: torch.Tensor) -> list[torch.Tensor]:
    return [piece for piece in torch.split(part, SHARD_PIECE) if piece.numel()]


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
