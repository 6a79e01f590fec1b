"""The Transport protocol of the interpreter, and the order of transfers on lanes.

A lane is a directed pair of workers. Sends and receives of a lane pair up in program order, so (lane, place in the
lane) identifies a transfer. A schedule that passed `check` has the same order at both ends.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from itertools import islice
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from recycle.errors import RecycleError
from recycle.ir.communicators import Lane as Lane
from recycle.ir.instruction import Instruction, Receive, Transfer
from recycle.ir.schedule import Schedule
from recycle.job.shape import Worker

Pending = Callable[[], Tensor]
"""A posted receive: calling it waits for the tensor and returns it."""
MessageSpec = tuple[tuple[int, ...], torch.dtype]
"""Shape and type of the activations that stages pass on, and of the gradients that return."""


Shapes = Sequence[torch.Size]
Exchanging = Callable[[], list[Tensor]]
"""An exchange of tensors that has begun: calling it waits, and returns what each tensor rank sent to this one."""


class LinkStats(NamedTuple):
    """Statistics of a process's messages with another process since the last query.

    Attributes:
        sent: number of messages delivered to it.
        seconds: lower quartile of their times, from the send or the previous delivery, whichever is later.
        waited: seconds that this process waited for messages from it.
    """

    process: Worker
    sent: int
    seconds: float
    waited: float


Messaged = LinkStats  # former name, for other packages' transports


class TransportError(RecycleError):
    """A transfer or a reduction failed: a peer is gone, the generation is over, or a timeout expired."""

    code = "transport-error"


class Unreachable(TransportError):
    """A peer did not answer on an established connection: it is cut off or dead."""

    def __init__(self, message: str, peer: Worker) -> None:
        super().__init__(message)
        self.peer = peer


class Transport(Protocol):
    """Moves activations, gradients and gradient sums between the workers of one generation."""

    def begin(self, program: Sequence[Instruction], iteration: int) -> None:
        """Start `iteration` of `program`; receives may be posted from now on.

        Peers are at most one iteration apart, so tensors sent two iterations ago have been delivered.
        """

    def send(self, instruction: Transfer, tensor: Tensor) -> None:
        """Start sending and return. The tensor must not be written during this iteration and the next."""

    def receive(self, instruction: Transfer) -> Pending:
        """The posted receive of `instruction`; posts it if necessary."""

    def reduce(self, stage: int, buffers: Sequence[Tensor], bucket: int | None = None) -> None:
        """Sum `buffers` in place over all hosts of `stage`, or of a group of `tie_groups`, in one order of sums.

        With a bucket, only starts the sum; do not use its buffers until the sum of bucket None, the last, returns.
        """

    def reduce_scatter(self, stage: int, buffers: Sequence[Sequence[Tensor]], bucket: int | None = None) -> None:
        """Sum the parts of a stage's gradients over its hosts, each in place on the owners of its shard.

        Each of `buffers` has the parts of all shards, in order. Parts on other hosts are undefined afterwards.
        """

    def gather(self, stage: int, parts: Sequence[Tensor]) -> None:
        """Fill the parts of shards that this worker does not own from their first owners, and send its own parts.

        The parts of all shards, in order, are views of one buffer.
        """

    def close(self) -> None:
        """End the generation here; peers that wait for this worker get TransportError."""


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


LOOKED_AT = 16
"""Next receives among which some are posted ahead."""


class PostedReceives:
    """Receives of one program, the next few of which are posted ahead, in the program's order.

    `ahead` returns the number of receives to post ahead, and `may_join` whether one may be added; others are skipped,
    so it must keep the order of each lane.
    """

    def __init__(
        self,
        post: Callable[[Transfer], Pending],
        ahead: Callable[[], int],
        may_join: Callable[[Transfer, Collection[Transfer]], bool] = lambda receive, posted: True,
    ) -> None:
        self._post, self._ahead, self._may_join = post, ahead, may_join
        self._unposted: dict[Transfer, None] = {}
        self._posted: dict[Transfer, Pending] = {}

    def begin(self, program: Sequence[Instruction]) -> None:
        self._unposted = dict.fromkeys(instruction for instruction in program if isinstance(instruction, Receive))
        self._posted = {}
        self._post_ahead()

    def take(self, instruction: Transfer) -> Pending:
        """The posted receive of the current instruction; posts it if necessary."""
        if instruction not in self._posted:
            self._post_now(instruction)
        pending = self._posted.pop(instruction)
        self._post_ahead()
        return pending

    def clear(self) -> None:
        self._posted = {}
        self._unposted.clear()

    def _post_ahead(self) -> None:
        for receive in list(islice(self._unposted, LOOKED_AT)):
            if len(self._posted) >= self._ahead():
                return
            if self._may_join(receive, self._posted.keys()):
                self._post_now(receive)

    def _post_now(self, instruction: Transfer) -> None:
        del self._unposted[instruction]
        self._posted[instruction] = self._post(instruction)
