"""Background copies of shards from an owner to another worker, after a death has removed a copy.

Each iteration copies one piece: both ends start the transfer when the iteration begins, and wait for it before they
step. Missing elements of the new owner are overwritten later. Step counts and moments of an element are copied before
its parameter (`Shards.apart`).

The source chooses the size of each piece. Each generation restarts unfinished copies. Communicators that only queue on
a device report no deliveries: their pieces have a fixed size, sent one at a time from the second iteration on.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import torch

from recycle.exec.hooks.hook import Generation, IterationHook
from recycle.exec.hooks.phases import Phase
from recycle.exec.protocol import Copied, Copy, CopyProgress
from recycle.exec.transport.groups import GroupTransport, StateTransfer
from recycle.exec.worker.local_stages import LocalShards
from recycle.ir.instruction import Instruction
from recycle.job.shape import Worker
from recycle.plans.hosting import UnitRange

FIRST_BYTES = 16 << 20
"""Bytes of the first piece, before the network is measured; more than socket buffers hold."""
UNTIMED_BYTES = 64 << 20
"""Bytes of a piece if delivery times are unknown."""
LEAST_BYTES = 1 << 16
SHARE = 0.5
"""Share of the time between the beginning of an iteration and its step that a piece may take."""
GROWTH = 16.0
"""Largest ratio of a piece's size to the previous one."""


@dataclass
class BackgroundCopy:
    """One end of all copies from one worker to another.

    Args:
        peer: role of the other end.
        shards: in order, each a range of shard numbers with their flat state in the order of `Shards.apart`.
        most: bytes of a piece; None for no limit.
    """

    peer: Worker
    sends: bool
    shards: Sequence[tuple[UnitRange, Sequence[torch.Tensor]]]
    source: str
    most: int | None = None
    _bytes: int = 0
    _seconds: float = 0.0
    _piece: StateTransfer | None = None
    _next: StateTransfer | None = None
    _began: float = 0.0
    _size: torch.Tensor = field(default_factory=lambda: torch.zeros(1, dtype=torch.int64))

    def __post_init__(self) -> None:
        self._remaining = [tensor.view(torch.uint8) for _, tensors in self.shards for tensor in tensors]
        sizes = [sum(tensor.nbytes for tensor in tensors) for _, tensors in self.shards]
        self._ends = deque(zip((units for units, _ in self.shards), sizes, accumulate(sizes), strict=True))

    def start_piece(self, transport: GroupTransport) -> None:
        if self._next is not None:
            self._next.wait()
            self._next = None
        if not self._remaining:
            return
        if not transport.reports_times:
            parts = self._take(self.most or UNTIMED_BYTES, single=True)
        else:
            parts = self._take(int(self._size) or min(FIRST_BYTES, self.most or FIRST_BYTES))
        self._began = time.monotonic()
        self._bytes += sum(part.nbytes for part in parts)
        begin = transport.begin_send_state if self.sends else transport.begin_receive_state
        self._piece, self._parts = begin(self.peer, parts), parts

    def _take(self, size: int, single: bool = False) -> list[torch.Tensor]:
        parts = list[torch.Tensor]()
        while size > 0 and self._remaining and not (single and parts):
            parts.append(self._remaining[0][:size])
            size -= parts[-1].numel()
            self._remaining[0] = self._remaining[0][parts[-1].numel() :]
            if not self._remaining[0].numel():
                del self._remaining[0]
        return parts

    @property
    def is_over(self) -> bool:
        return not self._ends

    def finish_piece(self, transport: GroupTransport) -> list[Copied]:
        """Wait for the current piece before a step. Returns the shards that it completes."""
        if self._piece is None:
            return []
        window = time.monotonic() - self._began
        seconds, self._piece = self._piece.wait(), None
        self._seconds += seconds
        complete = list[Copied]()
        while self._ends and self._ends[0][-1] <= self._bytes:
            units, size, _ = self._ends.popleft()
            complete.append(Copied(self.source, *units, size, round(self._seconds, 6)))
        if complete:
            self._seconds = 0.0
        if self._remaining and transport.reports_times:
            self._agree_size(transport, seconds, window)
        return complete

    def _agree_size(self, transport: GroupTransport, seconds: float, window: float) -> None:
        if self.sends:
            size = sum(part.nbytes for part in self._parts)
            wanted = min(size * window * SHARE / max(seconds, 1e-9), size * GROWTH)
            self._size.fill_(min(max(int(wanted), LEAST_BYTES), self.most or int(wanted) + LEAST_BYTES))
            self._next = transport.begin_send_state(self.peer, [self._size])
        else:
            self._next = transport.begin_receive_state(self.peer, [self._size])


class BackgroundCopies(IterationHook):
    """All background copies of one worker. `send` reports their progress to the leader."""

    def __init__(
        self,
        worker: str,
        shards: LocalShards,
        send: Callable[[CopyProgress], object],
        reach: Callable[[Phase, int], object],
        most: int | None,
    ) -> None:
        self._worker, self._shards, self._send, self._reach, self._most = worker, shards, send, reach, most

    def begin_generation(self, generation: Generation) -> None:
        self._copies, self._copied, self._is_first = list[BackgroundCopy](), list[Copied](), True
        record = generation.record
        pairs: dict[tuple[str, str], list[Copy]] = {}
        for copy in record.behind:
            if self._worker in (copy.source, copy.worker):
                pairs.setdefault((copy.source, copy.worker), []).append(copy)
        if not pairs:
            return
        assert isinstance(generation.transport, GroupTransport)
        self._transport = generation.transport
        for (source, worker), copies in pairs.items():
            sends = source == self._worker
            peer = Worker.parse(record.roles[worker if sends else source])
            parts = [
                (
                    (copy.first, copy.last),
                    [
                        part
                        for number in range(copy.first, copy.last)
                        for part in self._shards.background_tensors(number)
                    ],
                )
                for copy in copies
            ]
            self._copies.append(BackgroundCopy(peer, sends, parts, source, self._most))

    def begin_iteration(self, iteration: int, program: Sequence[Instruction]) -> None:
        is_first, self._is_first, lanes = self._is_first, False, set[tuple[Worker, bool]]()
        for copy in self._copies:
            lane = copy.peer, copy.sends
            if self._transport.reports_times or not (is_first or lane in lanes):
                copy.start_piece(self._transport)
            lanes.add(lane)
        if self._copies:
            self._reach("copy", iteration)

    def before_step(self) -> None:
        """Wait for the current pieces. Raises TransportError on failure."""
        for copy in list(self._copies):
            complete = copy.finish_piece(self._transport)
            if copy.is_over:
                self._copies.remove(copy)
            if complete and not copy.sends:
                self._transport.settle()  # other workers rely on the copy once it is reported
                for copied in complete:
                    self._shards.complete(range(copied.first, copied.last))
                self._copied += complete
                self._send(CopyProgress(list(self._copied)))
