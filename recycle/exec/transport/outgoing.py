"""Messages that a process sends: delayed by emulated links and faults, and timed until delivery.

A message of an emulated stage is delayed by the latency and bytes / bandwidth of its link. A `slow-link` fault
multiplies that time, a `flaky-link` fault delays with some probability. A lane carries one message at a time.

Limits: sums of gradients and copies of states are not delayed. gloo sends a message only once its receive is posted, so
a late receiver makes the transfer look long. Statistics therefore give the lower quartile of an iteration, and the time
that the receiver waited (`LinkStats`).
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from datetime import timedelta
from random import Random
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # the command line reads faults without torch
    import torch

from recycle.job import Job, price
from recycle.job.shape import Worker
from recycle.threads import WaitingThread

LOST_SECONDS = 0.2
"""Delay of a message on a flaky link: Linux's minimum TCP retransmission timeout (RFC 6298 has a second)."""


class PacedLinks:
    """The links over which the process that started at position `process` sends."""

    def __init__(self, process: Worker, seconds: Callable[[Worker], float] = lambda _: 0.0) -> None:
        self._process, self._seconds = process, seconds
        self._emulated: dict[Worker, float] = {}
        self._factor: dict[Worker, float] = {}
        self._flaky: dict[Worker, tuple[float, Random]] = {}

    @classmethod
    def for_job(cls, job: Job, process: Worker) -> PacedLinks:
        """The links that `job` emulates; no delays if its stages are real."""
        scale = job.model.seconds_per_unit if job.model.kind == "emulated" else 0.0
        if not scale:
            return cls(process)
        profile, shape = price(job).prices, job.shape
        largest = max(profile.per_stage("message", shape.stages))

        def seconds(receiver: Worker) -> float:
            ends = [shape.worker_index(process)], [shape.worker_index(receiver)]
            return scale * float(profile.copy_seconds(shape, *ends, largest)[0])

        return cls(process, seconds)

    def begin_iteration(self) -> None:
        self._factor, self._flaky = {}, {}

    def slow_down(self, first: Worker, second: Worker, factor: float) -> None:
        """Multiply the time of this process's messages between two workers by `factor`, in this iteration."""
        peer = second if first == self._process else first
        self._factor[peer] = self._factor.get(peer, 1.0) * factor

    def make_flaky(self, first: Worker, second: Worker, probability: float, seed: str) -> None:
        """Delay each of this process's messages between two workers with this probability, in this iteration."""
        peer = second if first == self._process else first
        self._flaky[peer] = probability, Random(f"{seed} {self._process}")

    def delay(self, peer: Worker, network: float) -> float:
        """Seconds to delay the next message to a process, given their recent time over the network alone."""
        if peer not in self._emulated:
            self._emulated[peer] = self._seconds(peer)
        emulated, factor = self._emulated[peer], self._factor.get(peer, 1.0)
        probability, random = self._flaky.get(peer, (0.0, None))
        lost = random is not None and random.random() < probability
        return factor * emulated + (0.0 if emulated else (factor - 1.0) * network) + LOST_SECONDS * lost

    hold = delay  # former name, for other packages' transports


_NO_TIMEOUT = timedelta(days=30)
"""A sent tensor may wait as long as its receiver computes; the end of the generation ends the wait."""
MOST_TIMES = 4096
"""Most message times kept until they are queried."""
RECENT_MESSAGES = 32
"""Number of recent messages; the fastest gives the time of the network."""
StartSend = Callable[["torch.Tensor", int], Any]
"""Starts to send a tensor with a tag; returns an object to wait for. Raises RuntimeError."""


class PendingSend:
    """A message in flight or a sum that a thread waits for."""

    def __init__(self, waiting: Future[Any]) -> None:
        self.waiting = waiting

    def is_completed(self) -> bool:
        return self.waiting.done()

    def wait(self) -> Any:
        """Wait for completion. Raises RuntimeError."""
        return self.waiting.result()


class OutgoingLane:
    """One lane of one generation. `delay` returns the delay of the next message, given the network's time."""

    def __init__(self, start: StartSend, delay: Callable[[float], float], over: threading.Event) -> None:
        self._start, self._delay, self._over = start, delay, over
        self._thread = WaitingThread()
        self._network: deque[float] = deque(maxlen=RECENT_MESSAGES)
        self._delivered: deque[float] = deque(maxlen=MOST_TIMES)
        self._free = 0.0
        self._last_delayed: PendingSend | None = None

    def send(self, tensor: torch.Tensor, tag: int) -> PendingSend:
        requested, delay = time.monotonic(), self._delay(min(self._network, default=0.0))
        if delay > 0 or (self._last_delayed is not None and not self._last_delayed.is_completed()):
            sending = self._thread.submit(self._send_later, requested, delay, tensor, tag)
            self._last_delayed = PendingSend(sending)
            return self._last_delayed
        return PendingSend(self._thread.submit(self._record_delivery, requested, requested, self._start(tensor, tag)))

    def send_state(self, tensor: torch.Tensor, tag: int) -> PendingSend:
        """Send a part of a state, neither delayed nor timed."""
        return PendingSend(self._thread.submit(self._start(tensor, tag).wait, _NO_TIMEOUT))

    def take_seconds(self) -> Sequence[float]:
        """Times of messages delivered since the last call."""
        return [self._delivered.popleft() for _ in range(len(self._delivered))]

    def close(self) -> None:
        self._thread.shut()

    def _send_later(self, requested: float, delay: float, tensor: torch.Tensor, tag: int) -> None:
        began = max(requested, self._free)
        if self._over.wait(max(0.0, began + delay - time.monotonic())):
            raise RuntimeError("the generation is over")
        self._record_delivery(began, time.monotonic(), self._start(tensor, tag))

    def _record_delivery(self, began: float, sent: float, work: Any) -> None:
        work.wait(_NO_TIMEOUT)
        now = time.monotonic()
        self._delivered.append(now - max(began, self._free))
        self._network.append(now - max(sent, self._free))
        self._free = now
