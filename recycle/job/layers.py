"""Layer: what one layer of a model costs, and the profile of stages that are cut from layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from recycle.job.profile import Profile


@dataclass(frozen=True)
class Layer:
    """What one layer costs on one worker; the embedding is part of the first, the head of the last.

    Attributes:
        forward, backward_input, backward_weight: seconds of one micro-batch.
        step: seconds of the optimizer.
        static: bytes held whatever the schedule: parameters, gradients, optimizer state.
        undo: bytes of a copy of the state before a step that may be taken back.
        state: bytes of these that a new host has to copy: parameters and optimizer state.
        gradients: bytes that are reduced over the hosts of the layer.
        activation: bytes held per micro-batch from the start of F to the end of W.
        workspace: bytes beside all these while one of its instructions runs.
        message: bytes that it hands to the next layer, and that come back as a gradient.
    """

    forward: float
    backward_input: float
    backward_weight: float
    step: float = 0.0
    static: float = 0.0
    undo: float = 0.0
    state: float = 0.0
    gradients: float = 0.0
    activation: float = 1.0
    workspace: float = 0.0
    message: float = 0.0

    @property
    def seconds(self) -> float:
        """F + I + W of one micro-batch."""
        return self.forward + self.backward_input + self.backward_weight


def stage_bytes(stage: Sequence[Layer], held: float) -> float:
    """Bytes of a worker of one stage of these layers that holds so many micro-batches at most."""
    return sum(layer.static + held * layer.activation for layer in stage) + max(layer.workspace for layer in stage)


def ring_seconds(amount: float, hosts: int, bandwidth: float | None) -> float:
    """All-reduce of `amount` bytes by a ring: 2 (n - 1) / n of them leave each of the n hosts."""
    return 0.0 if bandwidth is None else 2 * (hosts - 1) / hosts * amount / bandwidth


def ring_latency(hosts: int, latency: float) -> float:
    """What an all-reduce by a ring takes however few bytes it has: 2 (n - 1) turns, each a transfer."""
    return 2 * (hosts - 1) * latency


def stage_profile(
    stages: Sequence[Sequence[Layer]],
    hosts: int,
    *,
    latency: float,
    bandwidth: float | None,
    weight_stash: float,
) -> Profile:
    """Seconds and bytes of stages of layers.

    Args:
        hosts: workers that a stage's gradients are reduced over.
        latency: seconds per transfer between two workers, and per turn of a ring.
        bandwidth: bytes per second of a directed pair of workers, and of a ring; None: only latency counts.
    """

    def total(name: str) -> list[float]:
        return [sum(getattr(layer, name) for layer in stage) for stage in stages]

    return Profile(
        forward=total("forward"),
        backward_input=total("backward_input"),
        backward_weight=total("backward_weight"),
        reduce=[
            ring_latency(hosts, latency) + ring_seconds(gradients, hosts, bandwidth) for gradients in total("gradients")
        ],
        reduce_latency=[ring_latency(hosts, latency)] * len(stages),
        step=total("step"),
        latency=latency,
        bandwidth=bandwidth,
        message=[stage[-1].message for stage in stages],
        activation=total("activation"),
        weight_stash=weight_stash,
        static=total("static"),
        workspace=[max(layer.workspace for layer in stage) for stage in stages],
    )
