"""What the interpreter stands on to move tensors: the Transport protocol, and what all transports share of lanes.

A lane is a directed pair of workers. Sends and receives of a lane pair up in program order, so each transfer is
named by (lane, place in it); a schedule that passed `check` has the same order at both ends.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple, Protocol

import torch

from recycle.errors import RecycleError
from recycle.ir.instruction import Instruction, Receive, Transfer
from recycle.ir.schedule import Schedule
from recycle.job.shape import Worker

Lane = tuple[Worker, Worker]
"""(sender, receiver)."""
Pending = Callable[[], torch.Tensor]
"""A posted receive: calling it waits for the tensor and returns it."""


class Messaged(NamedTuple):
    """What a process knows of its messages with another one since it was asked last.

    Attributes:
        process: position that the other one started in.
        sent: how many messages to it have arrived.
        seconds: the lower quartile of what they took, each from when it was sent, and the one before had arrived.
        waited: what this process waited for messages from it.
    """

    process: Worker
    sent: int
    seconds: float
    waited: float


class TransportError(RecycleError):
    """A transfer or a reduction broke off: a peer is gone, the generation is over, or a timeout expired."""


class Unreachable(TransportError):
    """A peer did not answer on a connection that stands: cut off, unless it is dead.

    Attributes:
        peer: its role.
    """

    def __init__(self, message: str, peer: Worker) -> None:
        super().__init__(message)
        self.peer = peer


class Transport(Protocol):
    """Moves activations, gradients and gradient sums between the workers of one generation."""

    def begin(self, program: Sequence[Instruction], iteration: int) -> None:
        """`iteration` of `program` starts here; receives may be posted from now on.

        A peer may still be in the iteration before, or already in the next one, but never further away: it cannot step
        without the commit of the iteration before. So what was sent two iterations ago has arrived.
        """

    def send(self, instruction: Transfer, tensor: torch.Tensor) -> None:
        """Start sending; returns at once. The tensor must not be written before the iteration after the next begins."""

    def receive(self, instruction: Transfer) -> Pending:
        """The receive that `instruction` names, posted at the latest now."""

    def reduce(self, stage: int, buffers: Sequence[torch.Tensor], bucket: int | None = None) -> None:
        """Sum `buffers` in place over all hosts of `stage`, or of a group of `tie_groups`, who sum in one order.

        Args:
            bucket: whose sum only begins here; nothing may touch its buffers until that of the last one, None, returns.
                That is when the sums of all are there.
        """

    def reduce_scatter(self, stage: int, buffers: Sequence[Sequence[torch.Tensor]], bucket: int | None = None) -> None:
        """Sum the parts of a stage's gradients over all its hosts, each in place on the owners of its shard alone.

        What the other hosts have of a part is of no meaning afterwards.

        Args:
            buffers: of each the parts of all shards, in order.
            bucket: as of `reduce`.
        """

    def gather(self, stage: int, parts: Sequence[torch.Tensor]) -> None:
        """Fill the parts of a stage's parameters whose shard this worker does not own with what its first owner has.

        Returns when they are there and others have what this worker gives.

        Args:
            parts: of all shards, in order; views of one buffer.
        """

    def close(self) -> None:
        """End the generation here; peers that wait for this worker wake up with TransportError."""


def tie_groups(schedule: Schedule) -> dict[int, tuple[int, ...]]:
    """Number of each group of tied stages, from the model's number of stages on -> its stages."""
    return {schedule.shape.stages + place: tie for place, tie in enumerate(schedule.ties)}


def sum_groups(schedule: Schedule) -> dict[int, list[Worker]]:
    """Live hosts of each stage, and of each group of tied stages by the group's number."""
    groups: dict[int, list[Worker]] = {}
    for worker in schedule.live:
        for stage in schedule.stages_of(worker):
            groups.setdefault(stage, []).append(worker)
    for number, tie in tie_groups(schedule).items():
        groups[number] = sorted({worker for stage in tie for worker in groups.get(stage, ())})
    return groups


def lane_places(program: Sequence[Instruction]) -> dict[Instruction, int]:
    """Transfer -> its place in its lane, counted from 0 separately for each peer and direction."""
    counts: Counter[tuple[bool, Worker]] = Counter()
    places: dict[Instruction, int] = {}
    for instruction in program:
        if isinstance(instruction, Transfer):
            lane = (isinstance(instruction, Receive), instruction.peer)
            places[instruction] = counts[lane]
            counts[lane] += 1
    return places


class PostedReceives:
    """Receives of one program, of which the next few are posted before it comes to them.

    They are posted in the program's order, all lanes together, so a sender finds its receive there and memory for
    messages stays bounded.

    Args:
        post: posts a receive; what it returns waits for the message.
        ahead: how many may be posted that the program has not come to.
        may_join: whether a receive may be posted ahead beside those that are.
    """

    def __init__(
        self,
        post: Callable[[Transfer], Pending],
        ahead: Callable[[], int],
        may_join: Callable[[Transfer, Collection[Transfer]], bool] = lambda receive, posted: True,
    ) -> None:
        self._post, self._ahead, self._may_join = post, ahead, may_join
        self._unposted: deque[Receive] = deque()
        self._posted: dict[Transfer, Pending] = {}

    def begin(self, program: Sequence[Instruction]) -> None:
        """The receives are those of `program` from here on."""
        self._unposted = deque(one for one in program if isinstance(one, Receive))
        self._posted = {}
        self._post_ahead()

    def take(self, instruction: Transfer) -> Pending:
        """The receive that the program comes to, posted at the latest now."""
        while instruction not in self._posted:
            self._post_next()
        pending = self._posted.pop(instruction)
        self._post_ahead()
        return pending

    def clear(self) -> None:
        """Forget the receives that are posted, and post no other."""
        self._posted = {}
        self._unposted.clear()

    def _post_ahead(self) -> None:
        while (
            self._unposted
            and len(self._posted) < self._ahead()
            and self._may_join(self._unposted[0], self._posted.keys())
        ):
            self._post_next()

    def _post_next(self) -> None:
        instruction = self._unposted.popleft()
        self._posted[instruction] = self._post(instruction)
