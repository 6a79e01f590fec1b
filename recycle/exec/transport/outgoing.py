"""The messages that a process sends over one lane: each held back as its link is paced, and timed until it is there.

A lane is a directed pair of workers and carries one message at a time: a transfer begins when it is asked for and the
one before has ended, and ends when the receiver's process has it, which the thread of the lane waits for.

Limit: gloo sends a message only once its receive is posted, so a receiver that is late makes the transfer look long.
Of the transfers of an iteration the lower quartile is told, and beside it how long the receiver waited (`Messaged`).
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import torch

_UNTIL_THE_END = timedelta(days=30)
"""A sent tensor may wait for as long as its receiver computes; the end of the generation ends that wait."""
MOST_TIMES = 4096
"""Messages whose times are kept until somebody asks for them."""
LATELY = 32
"""Messages of which the fastest says what the network takes."""
Start = Callable[[torch.Tensor, int], Any]
"""Begins to send a tensor with a tag; what it returns can be waited for. Raises RuntimeError."""


class Sending:
    """A message under way, which says whether it has arrived."""

    def __init__(self, waiting: Future[Any]) -> None:
        self.waiting = waiting

    def is_completed(self) -> bool:
        return self.waiting.done()

    def wait(self) -> Any:
        """Wait until it has arrived. Raises RuntimeError when it cannot.

        Returns:
            of a part of a state when it has, monotonic seconds.
        """
        return self.waiting.result()


class OutgoingLane:
    """One lane of one generation.

    Args:
        start: sends over it.
        hold: seconds to hold the next message back, given what the network takes.
        over: set when the generation is over.
    """

    def __init__(self, start: Start, hold: Callable[[float], float], over: threading.Event) -> None:
        self._start, self._hold, self._over = start, hold, over
        self._thread = ThreadPoolExecutor(1)
        self._network: deque[float] = deque(maxlen=LATELY)
        self._taken: deque[float] = deque(maxlen=MOST_TIMES)
        self._free = 0.0
        self._held: Sending | None = None
        self.last: Sending | None = None

    def send(self, tensor: torch.Tensor, tag: int) -> Sending:
        """Send a message; returns at once."""
        asked, hold = time.monotonic(), self._hold(min(self._network, default=0.0))
        if hold > 0 or (self._held is not None and not self._held.is_completed()):
            self.last = self._held = Sending(self._thread.submit(self._send_later, asked, hold, tensor, tag))
        else:
            self.last = self._sent(asked, self._start(tensor, tag))
        return self.last

    def send_state(self, tensor: torch.Tensor, tag: int) -> Sending:
        """Send a part of a state, which is neither held back nor timed."""
        self.last = Sending(self._thread.submit(_until_there, self._start(tensor, tag)))
        return self.last

    def take_seconds(self) -> Sequence[float]:
        """What each message took that has arrived since the last call."""
        return [self._taken.popleft() for _ in range(len(self._taken))]

    def close(self) -> None:
        """Send nothing more."""
        self._thread.shutdown(wait=False)

    def _sent(self, asked: float, work: Any) -> Sending:
        return Sending(self._thread.submit(self._arrive, asked, asked, work))

    def _send_later(self, asked: float, hold: float, tensor: torch.Tensor, tag: int) -> None:
        began = max(asked, self._free)
        if self._over.wait(max(0.0, began + hold - time.monotonic())):
            raise RuntimeError("the generation is over")
        self._arrive(began, time.monotonic(), self._start(tensor, tag))

    def _arrive(self, began: float, sent: float, work: Any) -> None:
        work.wait(_UNTIL_THE_END)
        now = time.monotonic()
        self._taken.append(now - max(began, self._free))
        self._network.append(now - max(sent, self._free))
        self._free = now


def _until_there(work: Any) -> float:
    work.wait(_UNTIL_THE_END)
    return time.monotonic()
