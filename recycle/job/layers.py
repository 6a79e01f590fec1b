"""Layer: the prices of one layer of a model, and profiles of stages made of layers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial

from recycle.job.profile import Profile


@dataclass(frozen=True)
class Layer:
    """Prices of one layer on one worker. The first layer includes the embedding, the last one the head.

    Attributes:
        forward, backward_input, backward_weight: seconds of one micro-batch.
        step: seconds of the optimizer.
        static: bytes that every schedule needs: parameters, gradients, optimizer state.
        undo: bytes of a copy of the state before a step that may be undone.
        state: bytes that a new host has to copy: parameters and optimizer state.
        gradients: bytes that are reduced over the hosts of the layer.
        activation: bytes held per micro-batch from the start of F to the end of W.
        workspace: further bytes while one of the layer's instructions runs.
        message: bytes passed to the next layer, and returned as a gradient.
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
        return self.forward + self.backward_input + self.backward_weight


def stage_sums(stages: Iterable[Sequence[Layer]], name: str) -> list[float]:
    """Return the sum of a price over the layers of each stage."""
    return [sum(getattr(layer, name) for layer in stage) for stage in stages]


def stage_bytes(stage: Sequence[Layer], held: float) -> float:
    """Return the bytes of a worker that hosts one stage of these layers and holds at most `held` micro-batches."""
    return sum(layer.static + held * layer.activation for layer in stage) + max(layer.workspace for layer in stage)


def ring_seconds(amount: float, hosts: int, bandwidth: float | None) -> float:
    """Return the seconds of a ring all-reduce of `amount` bytes: each of n hosts sends 2 (n - 1) / n of them."""
    return 0.0 if bandwidth is None else 2 * (hosts - 1) / hosts * amount / bandwidth


def ring_latency(hosts: int, latency: float) -> float:
    """Return the part of a ring all-reduce's time that does not depend on bytes: 2 (n - 1) transfers."""
    return 2 * (hosts - 1) * latency


def stage_profile(
    stages: Sequence[Sequence[Layer]],
    hosts: int,
    *,
    latency: float,
    bandwidth: float | None,
    weight_stash: float,
) -> Profile:
    """Return the profile of stages made of layers, whose gradients are reduced over `hosts` workers.

    A directed pair of workers, and a ring, have `latency` and `bandwidth`; None: only latency counts.
    """
    total = partial(stage_sums, stages)
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
