"""The messages that a process sends: each held back as its link is paced, and timed until it is there.

An emulated stage takes its profile's time, and so does a message that it sends: it is held back for the latency and the
bytes / bandwidth of its link. A `slow-link` fault has the messages to one other process take so many times as long, for
some iterations; a `flaky-link` fault holds each back with some probability. The message itself goes over the network
as ever, at the end of its time. Where nobody emulates a link, a slow one takes so many times what messages over it took
lately, as the process measured.

A lane is a directed pair of workers and carries one message at a time, so that who waits for one waits for real: a
transfer begins when it is asked for and the one before has ended, and ends when the receiver's process has it, which
the thread of the lane waits for.

Limits: only messages between stages are held back, not sums of gradients and not copies of states. Both ends of a link
slow down what they send. gloo sends a message only once its receive is posted, so a receiver that is late makes the
transfer look long: of the transfers of an iteration the lower quartile is told, and beside it how long the receiver
waited (`Messaged`).
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from random import Random
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # the command line reads faults without torch
    import torch

from recycle.job import Job, price
from recycle.job.shape import Worker

LOST_SECONDS = 0.2
"""How long a flaky link holds a message back: TCP sends again what was lost after that at the soonest (the minimum
retransmission timeout of Linux; RFC 6298 has a second)."""


class PacedLinks:
    """The links that one process sends over.

    Args:
        process: position that the process started in.
        seconds: of a message to another process, where links are emulated.
    """

    def __init__(self, process: Worker, seconds: Callable[[Worker], float] = lambda _: 0.0) -> None:
        self._process, self._seconds = process, seconds
        self._emulated: dict[Worker, float] = {}
        self._factor: dict[Worker, float] = {}
        self._flaky: dict[Worker, tuple[float, Random]] = {}

    @classmethod
    def of(cls, job: Job, process: Worker) -> PacedLinks:
        """Those that `job` emulates; none where its stages are real."""
        scale = job.model.seconds_per_unit if job.model.kind == "emulated" else 0.0
        if not scale:
            return cls(process)
        profile, shape = price(job).prices, job.shape
        largest = max(profile.per_stage("message", shape.stages))

        def seconds(receiver: Worker) -> float:
            ends = [shape.worker_index(process)], [shape.worker_index(receiver)]
            return scale * float(profile.copy_seconds(shape, *ends, largest)[0])

        return cls(process, seconds)

    def begin(self) -> None:
        """An iteration begins; what faults did to the one before is over."""
        self._factor, self._flaky = {}, {}

    def slow_down(self, one: Worker, other: Worker, factor: float) -> None:
        """What this process sends between the two takes `factor` times as long in this iteration."""
        peer = other if one == self._process else one
        self._factor[peer] = self._factor.get(peer, 1.0) * factor

    def make_flaky(self, one: Worker, other: Worker, probability: float, seed: str) -> None:
        """Each message that this process sends between the two is held back with this probability in this iteration."""
        peer = other if one == self._process else one
        self._flaky[peer] = probability, Random(f"{seed} {self._process}")

    def hold(self, peer: Worker, usual: float) -> float:
        """Seconds for which the next message to a process is held back before it is sent.

        Args:
            usual: what messages to it took lately over the network alone.
        """
        if peer not in self._emulated:
            self._emulated[peer] = self._seconds(peer)
        emulated, factor = self._emulated[peer], self._factor.get(peer, 1.0)
        probability, random = self._flaky.get(peer, (0.0, None))
        lost = random is not None and random.random() < probability
        return factor * emulated + (0.0 if emulated else (factor - 1.0) * usual) + LOST_SECONDS * lost


_UNTIL_THE_END = timedelta(days=30)
"""A sent tensor may wait for as long as its receiver computes; the end of the generation ends that wait."""
MOST_TIMES = 4096
"""Messages whose times are kept until somebody asks for them."""
LATELY = 32
"""Messages of which the fastest says what the network takes."""
Start = Callable[["torch.Tensor", int], Any]
"""Begins to send a tensor with a tag; what it returns can be waited for. Raises RuntimeError."""


class Sending:
    """What a thread waits for, a message under way or a sum; says whether it is there."""

    def __init__(self, waiting: Future[Any]) -> None:
        self.waiting = waiting

    def is_completed(self) -> bool:
        return self.waiting.done()

    def wait(self) -> Any:
        """Wait until it is there. Raises RuntimeError when it cannot be.

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
            self.last = Sending(self._thread.submit(self._arrive, asked, asked, self._start(tensor, tag)))
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
