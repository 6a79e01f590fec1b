"""A process's parts of the communicators that a generation needs, with a communicator per lane.

Communicators are between processes, whichever roles of the plan they play, so that one may serve several generations.
"""

from __future__ import annotations

from dataclasses import dataclass

from recycle.exec.transport.communicators import CommunicatorKey
from recycle.exec.transport.formation import formation
from recycle.exec.transport.groups import GroupsOfGeneration
from recycle.job.shape import Worker

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


def live_members(groups: GroupsOfGeneration, tensor_parallel: int) -> set[str]:
    """All processes of the generation."""
    processes = [groups.processes.get(role, role) for role in groups.members]
    return {member_of(process, rank, tensor_parallel) for process in processes for rank in range(tensor_parallel)}
