"""What makes the messages of a process take longer than the network does: links of emulated jobs, and faults.

An emulated stage takes its profile's time, and so does a message that it sends: it is held back for the latency and the
bytes / bandwidth of its link. A `slow-link` fault has the messages to one other process take so many times as long, for
some iterations; a `flaky-link` fault holds each back with some probability. The message itself goes over the network
as ever, at the end of its time, and a lane carries one at a time, so that who waits for it waits for real.

Where nobody emulates a link, a slow one takes so many times what messages over it took lately, as the process measured.

Limits: only messages between stages are held back, not sums of gradients and not copies of states. Both ends of a link
slow down what they send.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random

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
