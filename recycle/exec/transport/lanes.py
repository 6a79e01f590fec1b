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

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from recycle.exec.transport.base import TransportError
from recycle.exec.transport.groups import GroupTransport
from recycle.exec.transport.plugin import GroupsOfGeneration, Lane
from recycle.ir.instruction import Instruction, Send, Transfer
from recycle.shape import Worker


@dataclass(frozen=True)
class Communicators:
    """Makes and ends communicators of one backend.

    Attributes:
        device: where the tensors that they move must lie.
        make: (name, own rank, size) -> a torch backend of `size` ranks; waits for the others.
        release: ends one at once, which wakes whoever waits on it here; called from any thread.
        settle: waits until what a wait has only queued on the device is done.
    """

    device: torch.device
    make: Callable[[str, int, int], Any]
    release: Callable[[Any], None]
    settle: Callable[[], None]


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
    """One worker's end of all its lanes and sums, in one generation.

    Args:
        communicators: of the backend.
        groups: what to form.
        lanes: as `lanes_of` gives them.

    Raises:
        TransportError: the communicators did not form.
    """

    def __init__(self, communicators: Communicators, groups: GroupsOfGeneration, lanes: Sequence[Lane]) -> None:
        super().__init__(groups.message, communicators.device, groups.over, groups.waiting)
        self._of, self._role = communicators, groups.role
        self._standing: list[Any] = []
        self._outgoing: dict[Worker, Any] = {}
        self._incoming: dict[Worker, Any] = {}
        self._sums: dict[int, Any] = {}
        self._leave_when_over(lambda: self._form(groups.name, lanes, groups.hosts))

    def _form(self, prefix: str, lanes: Sequence[Lane], hosts: Mapping[int, Sequence[Worker]]) -> None:
        for sender, receiver in sorted(lanes):
            group = self._make(f"{prefix}/lane{sender}>{receiver}", [sender, receiver])
            token = torch.zeros(1, device=self._device)
            if sender == self._role:
                self._outgoing[receiver] = group
                group.send([token], 1, 0).wait()
            else:
                self._incoming[sender] = group
                group.recv([token], 0, 0).wait()
        for stage, roles in sorted(hosts.items()):
            if len(roles) > 1:
                self._sums[stage] = self._make(f"{prefix}/stage{stage}", sorted(roles))
                self._sums[stage].allreduce([torch.zeros(1, device=self._device)]).wait()
        self._of.settle()

    def _make(self, name: str, roles: Sequence[Worker]) -> Any:
        if self._over.is_set():
            raise RuntimeError("the generation is over")
        group = self._of.make(name, roles.index(self._role), len(roles))
        self._standing.append(group)
        return group

    def _start_receive(self, peer: Worker, tensor: torch.Tensor, tag: int) -> Any:
        return self._incoming[peer].recv([tensor], 0, tag)

    def _start_send(self, peer: Worker, tensor: torch.Tensor, tag: int) -> Any:
        return self._outgoing[peer].send([tensor], 1, tag)

    def reduce(self, stage: int, buffers: Sequence[torch.Tensor]) -> None:
        group = self._sums.get(stage)
        if group is None:
            return
        options: Any = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp.SUM
        self._waiting(True)
        try:
            for buffer in buffers:
                self._leave_when_over(partial(self._sum, group, buffer, options))
        finally:
            self._waiting(False)
        # A released communicator lets a device go on with whatever was in the buffer.
        if self._over.is_set():
            raise TransportError("the generation is over")

    def _sum(self, group: Any, buffer: torch.Tensor, options: Any) -> None:
        group.allreduce([buffer], options).wait()
        self._of.settle()

    def release(self) -> None:
        """End every communicator at once, from any thread: what waits on one here wakes up."""
        for group in list(self._standing):
            self._of.release(group)

    def close(self) -> None:
        super().close()
        self.release()
        self._standing, self._outgoing, self._incoming, self._sums = [], {}, {}, {}
