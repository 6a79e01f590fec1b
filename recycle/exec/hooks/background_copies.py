"""Background copies of shards from an owner to another worker, after a death has removed a copy.

Each iteration copies one piece: both ends start the transfer when the iteration begins, and wait for it before they
step. Missing elements of the new owner are overwritten later. Step counts and moments of an element are copied before
its parameter (`Shards.apart`). Each generation restarts unfinished copies.

Over communicators that only queue on a device, copies begin in the second iteration, and a piece is part of one tensor.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from recycle.exec.hooks.hook import Generation, IterationHook
from recycle.exec.hooks.phases import Phase
from recycle.exec.protocol import Copied, Copy, CopyProgress
from recycle.exec.transport.groups import GroupTransport
from recycle.exec.worker.local_stages import LocalShards
from recycle.ir.instruction import Instruction
from recycle.job.shape import Worker
from recycle.plans.hosting import UnitRange

PIECE_BYTES = 64 << 20
"""Bytes of a piece, unless `[train] copy_bytes` gives them."""


@dataclass
class BackgroundCopy:
    """One end of all copies from one worker to another.

    Args:
        peer: role of the other end.
        shards: in order, each a range of shard numbers with their flat state in the order of `Shards.apart`.
        size: bytes of a piece.
    """

    peer: Worker
    sends: bool
    shards: Sequence[tuple[UnitRange, Sequence[torch.Tensor]]]
    source: str
    size: int
    _bytes: int = 0
    _seconds: float = 0.0
    _began: float = 0.0
    _waits: Sequence[Callable[[], object]] = ()

    def __post_init__(self) -> None:
        self._remaining = deque(tensor.view(torch.uint8) for _, tensors in self.shards for tensor in tensors)
        sizes = [sum(tensor.nbytes for tensor in tensors) for _, tensors in self.shards]
        self._ends = deque(zip((units for units, _ in self.shards), sizes, accumulate(sizes), strict=True))

    def start_piece(self, transport: GroupTransport) -> None:
        parts, room = list[torch.Tensor](), self.size
        while self._remaining and room and (transport.overlaps_copies or not parts):
            tensor = self._remaining.popleft()
            parts.append(tensor[:room])
            if room < len(tensor):
                self._remaining.appendleft(tensor[room:])
            room -= len(parts[-1])
        self._began = time.monotonic()
        self._bytes += self.size - room
        begin = transport.begin_send_state if self.sends else transport.begin_receive_state
        self._waits = [begin(self.peer, part) for part in parts]

    @property
    def is_over(self) -> bool:
        return not self._ends

    def finish_piece(self) -> list[Copied]:
        """Wait for the current piece before a step. Returns the shards that it completes."""
        if not self._waits:
            return []
        for wait in self._waits:
            wait()
        self._waits = ()
        self._seconds += time.monotonic() - self._began
        complete = list[Copied]()
        while self._ends and self._ends[0][-1] <= self._bytes:
            units, size, _ = self._ends.popleft()
            complete.append(Copied(self.source, *units, size, round(self._seconds, 6)))
        if complete:
            self._seconds = 0.0
        return complete


class BackgroundCopies(IterationHook):
    """All background copies of one worker. `send` reports their progress to the leader."""

    def __init__(
        self,
        worker: str,
        shards: LocalShards,
        send: Callable[[CopyProgress], object],
        reach: Callable[[Phase, int], object],
        size: int | None,
    ) -> None:
        self._worker, self._shards, self._send, self._reach = worker, shards, send, reach
        self._size = size or PIECE_BYTES

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
            self._copies.append(BackgroundCopy(peer, sends, parts, source, self._size))

    def begin_iteration(self, iteration: int, program: Sequence[Instruction]) -> None:
        is_first, self._is_first = self._is_first, False
        for copy in self._copies:
            if self._transport.overlaps_copies or not is_first:
                copy.start_piece(self._transport)
        if self._copies:
            self._reach("copy", iteration)

    def before_step(self) -> None:
        """Wait for the current pieces. Raises TransportError on failure."""
        for copy in list(self._copies):
            complete = copy.finish_piece()
            if copy.is_over:
                self._copies.remove(copy)
            if complete and not copy.sends:
                self._transport.settle()  # other workers rely on the copy once it is reported
                for copied in complete:
                    self._shards.complete(range(copied.first, copied.last))
                self._copied += complete
                self._send(CopyProgress(list(self._copied)))
