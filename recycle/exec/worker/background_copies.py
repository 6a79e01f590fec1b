"""Shards that go from an owner to another worker in pieces, while training goes on, after a death has taken a copy.

Between two steps a state does not change. So in each iteration one piece of it goes over: both ends begin the transfer
when the iteration begins, and wait for it before they step. From then on the new owner steps the piece with everybody
else, since the sum of the shard's gradients comes to it from the generation's first iteration on. It steps what has not
come yet as well; that is overwritten, and changes nothing else, because every element is stepped by itself once its
step counts and moments are there, which come first (`Shards.apart`).

The source says how large the next piece is, behind each one: as much as goes over in a share of the time that there was
between the beginning of the iteration and its step, by what the last one took. So nobody waits for a piece, unless the
network or the iterations get slower at once. Whatever ends the generation ends the copy, which begins anew in the next.

Over communicators whose operations only queue on a device nobody knows when a piece has arrived. There pieces are of
one size, in one transfer each, one at a time on each lane, and begin with the generation's second iteration, as
receives that are posted ahead do (`recycle.exec.transport.lanes`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from recycle.exec.membership.messages import Copied
from recycle.exec.transport.groups import GroupTransport, StateTransfer
from recycle.shape import Worker

FIRST_BYTES = 16 << 20
"""Of the first piece, before anything is known of the network; more than sockets take in without sending it."""
UNTIMED_BYTES = 64 << 20
"""Of a piece, where it is not known when one has arrived."""
LEAST_BYTES = 1 << 16
SHARE = 0.5
"""Of the time between the beginning of an iteration and its step that a piece is to take."""
GROWTH = 16.0
"""Times that a piece may be as large as the one before."""


@dataclass
class BackgroundCopy:
    """One end of a copy.

    Args:
        peer: role of the other end.
        sends: whether this end is the source.
        tensors: the state, flat, in an order as `Shards.apart` gives it.
        units: the shards' numbers, from the first up to but without the last.
        source: the process that the state comes from.
        most: bytes of a piece; None for no limit.
    """

    peer: Worker
    sends: bool
    tensors: Sequence[torch.Tensor]
    units: tuple[int, int]
    source: str
    most: int | None = None
    bytes: int = 0
    seconds: float = 0.0
    _piece: StateTransfer | None = None
    _next: StateTransfer | None = None
    _began: float = 0.0
    _size: torch.Tensor = field(default_factory=lambda: torch.zeros(1, dtype=torch.int64))

    def __post_init__(self) -> None:
        self._left = [one.view(torch.uint8) for one in self.tensors]

    def begin(self, transport: GroupTransport) -> None:
        """An iteration begins: begin with its piece."""
        if self._next is not None:
            self._next.wait()
            self._next = None
        if not self._left:
            return
        if not transport.tells_times:
            parts = self._take(self.most or UNTIMED_BYTES, one=True)
        else:
            parts = self._take(int(self._size) or min(FIRST_BYTES, self.most or FIRST_BYTES))
        self._began = time.monotonic()
        self.bytes += sum(part.nbytes for part in parts)
        begin = transport.begin_send_state if self.sends else transport.begin_receive_state
        self._piece, self._parts = begin(self.peer, parts), parts

    def _take(self, size: int, one: bool = False) -> list[torch.Tensor]:
        parts = list[torch.Tensor]()
        while size > 0 and self._left and not (one and parts):
            parts.append(self._left[0][:size])
            size -= parts[-1].numel()
            self._left[0] = self._left[0][parts[-1].numel() :]
            if not self._left[0].numel():
                del self._left[0]
        return parts

    def settle(self, transport: GroupTransport) -> bool:
        """The next step is due: wait for the piece; whether it was the last."""
        if self._piece is None:
            return False
        window = time.monotonic() - self._began
        taken, self._piece = self._piece.wait(), None
        self.seconds += taken
        if not self._left:
            return True
        if not transport.tells_times:
            return False
        if self.sends:
            size = sum(part.nbytes for part in self._parts)
            wanted = min(size * window * SHARE / max(taken, 1e-9), size * GROWTH)
            self._size.fill_(min(max(int(wanted), LEAST_BYTES), self.most or int(wanted) + LEAST_BYTES))
            self._next = transport.begin_send_state(self.peer, [self._size])
        else:
            self._next = transport.begin_receive_state(self.peer, [self._size])
        return False


class BackgroundCopies:
    """All of one worker in one generation.

    Args:
        copies: that it takes part in.
        transport: of the generation.
        come: called when all of a copy to this worker has come, with all that have so far.
    """

    def __init__(
        self,
        copies: Sequence[BackgroundCopy],
        transport: GroupTransport,
        come: Callable[[BackgroundCopy, list[Copied]], object],
    ) -> None:
        self._copies, self._transport, self._come = list(copies), transport, come
        self._copied: list[Copied] = []
        self._is_first = True

    def begin(self) -> bool:
        """An iteration begins; whether something is under way in it."""
        is_first, self._is_first, lanes = self._is_first, False, set[tuple[Worker, bool]]()
        for copy in self._copies:
            lane = copy.peer, copy.sends
            if self._transport.tells_times or not (is_first or lane in lanes):
                copy.begin(self._transport)
            lanes.add(lane)
        return bool(self._copies)

    def settle(self) -> None:
        """A step is due: what was begun is there when this returns. Raises TransportError when it cannot be."""
        for copy in list(self._copies):
            if copy.settle(self._transport):
                self._copies.remove(copy)
                if not copy.sends:
                    self._transport.settle()  # else it might still be under way when others count on it
                    self._copied.append(Copied(copy.source, *copy.units, copy.bytes, round(copy.seconds, 6)))
                    self._come(copy, self._copied)
