"""Transport with a communicator of its own per lane: what NCCL needs, and any backend can do.

A lane is a directed pair of workers. On one communicator per lane only one worker sends and one receives, both in the
order of the checked schedule, so first in, first out cannot deadlock, whatever other lanes do; and a lane whose peer
is gone blocks no other. The communicators of one worker form one after the other, in an order that is the same
everywhere (by sender, then receiver, then the stages' sums by number): the lowest one that has not formed always has
both its members waiting for it, so forming cannot deadlock either.

Communicators that form lazily would do so at the first transfer, in the order of the program and not in this one:
each is warmed up as soon as it stands, which also keeps that time out of the first iteration.
"""

from __future__ import annotations

import contextlib
from abc import abstractmethod
from collections.abc import Collection, Sequence
from typing import Any

import torch

from recycle.exec.transport.groups import GroupsOfGeneration, GroupTransport, Lane
from recycle.ir.instruction import Instruction, Send, Transfer
from recycle.shape import Worker


def lanes_of(role: Worker, program: Sequence[Instruction], joins: Collection[Lane] = ()) -> list[Lane]:
    """The lanes that a worker has a part in, sorted: those of its program and those by which states are copied.

    Args:
        joins: (source, joiner) of every state that is copied before the program runs.
    """
    lanes = {lane for lane in joins if role in lane}
    for instruction in program:
        if isinstance(instruction, Transfer):
            sends = isinstance(instruction, Send)
            lanes.add((role, instruction.peer) if sends else (instruction.peer, role))
    return sorted(lanes)


class LaneTransport(GroupTransport):
    """One worker's end of all its lanes and sums, in one generation; a subclass makes the communicators."""

    def __init__(self, groups: GroupsOfGeneration, device: torch.device) -> None:
        super().__init__(groups, device)
        self._standing: list[Any] = []

    @abstractmethod
    def _make(self, name: str, rank: int, size: int) -> Any:
        """A torch backend of `size` ranks; waits for the others."""

    @abstractmethod
    def _abort(self, group: Any) -> None:
        """End a communicator at once, which wakes whoever waits on it here."""

    def form(self) -> None:
        self._wait_in_thread(self._form_all)

    def _form_all(self) -> None:
        groups = self._groups
        for sender, receiver in lanes_of(groups.role, groups.program, groups.joins):
            group = self._stand(f"lane{sender}>{receiver}", [sender, receiver])
            token = torch.zeros(1, device=self._device)
            if sender == groups.role:
                self._outgoing[receiver] = group, 1
                group.send([token], 1, 0).wait()
            else:
                self._incoming[sender] = group, 0
                group.recv([token], 0, 0).wait()
        for stage, roles in sorted(groups.hosts.items()):
            if len(roles) > 1:
                self._sums[stage] = self._stand(f"stage{stage}", sorted(roles))
                self._sums[stage].allreduce([torch.zeros(1, device=self._device)]).wait()
        self._settle()

    def _stand(self, name: str, roles: Sequence[Worker]) -> Any:
        if self._over.is_set():
            raise RuntimeError("the generation is over")
        group = self._make(f"{self._groups.name}/{name}", roles.index(self._groups.role), len(roles))
        self._standing.append(group)
        return group

    def release(self) -> None:
        with contextlib.suppress(IndexError):  # another thread may take the last one
            while self._standing:
                self._abort(self._standing.pop())

    def close(self) -> None:
        super().close()
        self.release()
