"""Sums and gathers of shards, over sends and receives (gloo) or over rooted sums and broadcasts (NCCL).

Reduce: each shard is summed on its first owner, which sends the sum to the other owners. With N elements of g bytes
over D hosts, each host sends g N (D - 1) / D to the first owners and g N (k - 1) / D to the others. Gather: the first
owner of a shard sends it to the hosts without it, w N (D - k) / D bytes, or by broadcasts to all, w N (D - 1) / D.

`ShardedSums` sends parts in pieces, so a host needs only two more pieces per peer. In `RootedSums` the owners of a
shard have a separate communicator; an owner receives parameters that it already has into scratch memory. All hosts
begin the operations of a communicator in the order of the shards.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from recycle.exec.transport.communicators import Communicator
from recycle.exec.transport.groups import GroupsOfGeneration
from recycle.job.footprint import AWAITED, ON_GPU, SHARD_PIECE
from recycle.job.shape import Worker

_REDUCE, _SUM, _GATHER = range(3)


class ShardedSums:
    """One host's part in the sums and gathers of a stage, over a torch backend with send and recv."""

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

    def reduce_scatter(self, parts: Sequence[Tensor]) -> None:
        """Sum the parts in place; returns when the sums are complete and everything is sent."""
        sent, received, own_shards = list[Any](), list[Any](), list[int]()
        for shard, (part, owners) in enumerate(zip(parts, self._owners, strict=True)):
            first, *others = owners
            if first == self._rank:
                own_shards.append(shard)
                continue
            for number, piece in enumerate(_pieces(part)):
                sent.append(self._group.send([piece], first, _tag(shard, number, _REDUCE)))
                if self._rank in others:
                    # The first owner sends the sum only after it has received all of this part.
                    received.append(self._group.recv([piece], first, _tag(shard, number, _SUM)))
        for shard in own_shards:
            sent += self._add_up(shard, parts[shard])
        for work in [*received, *sent]:
            self._wait(work)

    def _add_up(self, shard: int, part: Tensor) -> list[Any]:
        pieces = _pieces(part)
        scratch = [
            [torch.empty_like(pieces[0]) for _ in self._peers] if pieces else []
            for _ in range(min(AWAITED, len(pieces)))
        ]
        receives: list[list[Any]] = []

        def expect(number: int) -> None:
            size = len(pieces[number])
            receives.append(
                [
                    self._group.recv([into[:size]], peer, _tag(shard, number, _REDUCE))
                    for peer, into in zip(self._peers, scratch[number % AWAITED], strict=True)
                ]
            )

        for number in range(len(scratch)):
            expect(number)
        sent = []
        for number, piece in enumerate(pieces):
            for work, other in zip(receives[number], scratch[number % AWAITED], strict=True):
                self._wait(work)
                piece.add_(other[: len(piece)])
            sent += [self._group.send([piece], owner, _tag(shard, number, _SUM)) for owner in self._owners[shard][1:]]
            if number + AWAITED < len(pieces):
                expect(number + AWAITED)
        return sent

    def gather(self, parts: Sequence[Tensor]) -> None:
        """Fill the parts that this host does not own; returns when all transfers are done."""
        works = []
        for shard, (part, owners) in enumerate(zip(parts, self._givers, strict=True)):
            for number, piece in enumerate(_pieces(part)):
                if owners[0] == self._rank:
                    takers = (peer for peer in self._peers if peer not in owners)
                    works += [self._group.send([piece], peer, _tag(shard, number, _GATHER)) for peer in takers]
                elif self._rank not in owners:
                    works.append(self._group.recv([piece], owners[0], _tag(shard, number, _GATHER)))
        for work in works:
            self._wait(work)


def _tag(shard: int, number: int, purpose: int) -> int:
    """Iterations share tags, because messages with one tag arrive in the order in which they were sent."""
    return ((shard % 4096) * 3 + purpose) * 32768 + number % 32768


def _pieces(part: Tensor) -> list[Tensor]:
    return [piece for piece in torch.split(part, SHARD_PIECE) if piece.numel()]


_OWNERS = 1 << 20
"""Number of the first group of owners, beyond the numbers of stages and of tied stages."""


def with_owners(groups: GroupsOfGeneration) -> tuple[GroupsOfGeneration, dict[int, list[int | None]]]:
    """Add groups of owners to a generation's groups; returns also stage -> group of each shard, None with one owner."""
    hosts, numbers = dict(groups.hosts), dict[int, list[int | None]]()
    most = max(map(len, groups.owners.values()), default=0)
    for stage, owners in sorted(groups.owners.items()):
        for place, owners_of_shard in enumerate(owners):
            number = _OWNERS + stage * most + place
            hosts[number] = sorted(owners_of_shard)
            numbers.setdefault(stage, []).append(number if len(owners_of_shard) > 1 else None)
    return replace(groups, hosts=hosts), numbers


@dataclass(frozen=True)
class RootedSums:
    """One host's part in the sums and gathers of a stage, by rooted collectives.

    Args:
        of_owners: communicator of each shard's owners; None if this host is not one of several.
        attempt: begins an operation. Raises TransportError on failure.
    """

    hosts: Communicator
    role: Worker
    owners: Sequence[Sequence[Worker]]
    givers: Sequence[Sequence[Worker]]
    of_owners: Sequence[Communicator | None]
    rank: Callable[[Communicator, Worker], int]
    attempt: Callable[[Callable[[], Any]], Any]

    def reduce(self, parts: Sequence[Tensor]) -> list[Any]:
        """Begin to sum the parts of all shards, each in place on its first owner."""
        return [
            self._begin(self.hosts.reduce, part, self.hosts, owners[0])
            for part, owners in zip(parts, self.owners, strict=True)
            if part.numel()
        ]

    def broadcast(self, parts: Sequence[Tensor]) -> list[Any]:
        """Begin to send the sums to the other owners; later work on the device waits for them."""
        return [
            self._begin(group.broadcast, part, group, owners[0])
            for part, owners, group in zip(parts, self.owners, self.of_owners, strict=True)
            if part.numel() and group is not None
        ]

    def gather(self, parts: Sequence[Tensor]) -> list[Any]:
        """Begin to fill the parts that this host does not have."""
        works = []
        for part, givers in zip(parts, self.givers, strict=True):
            has_it = self.role in givers[1:]
            scratch = torch.empty_like(part[: ON_GPU.stepped]) if has_it else part
            for piece in torch.split(part, ON_GPU.stepped):
                if piece.numel():
                    into = scratch[: piece.numel()] if has_it else piece
                    works.append(self._begin(self.hosts.broadcast, into, self.hosts, givers[0]))
        return works

    def _begin(
        self, operation: Callable[[list[Tensor], int], Any], part: Tensor, group: Communicator, root: Worker
    ) -> Any:
        return self.attempt(lambda: operation([part], self.rank(group, root)))
