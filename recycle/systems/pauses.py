"""The pause model that all systems share, in seconds; see `Pause` for its causes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class PauseModel:
    """What a change costs whoever makes it.

    Attributes:
        detect: until a failure is noticed.
        plan: until it is known what runs next, where a system does not say otherwise.
        rebuild: until groups of workers can talk again.
        start: until a node that came (back) can be used; training goes on without it.
        restart: until all processes have started again, before they read a checkpoint.
        storage_bandwidth: bytes per second at which one worker writes or reads its part of a checkpoint.
        snapshot: until all workers agree to take a checkpoint and go on after it; training waits.
        snapshot_bandwidth: bytes per second at which one worker copies its state to host memory while training waits;
            the writing behind it does not stop training.
    """

    detect: float = 5.0
    plan: float = 0.0
    rebuild: float = 2.0
    start: float = 45.0
    restart: float = 60.0
    storage_bandwidth: float = 1e9
    snapshot: float = 1.0
    snapshot_bandwidth: float = 10e9
