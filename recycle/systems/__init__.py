"""Resilience systems on one engine: each file one system, registered here; `cluster` runs them over a failure trace.

`system` is the protocol, `setting` what all of them get alike, `failures` where the events come from.
"""

from __future__ import annotations

from collections.abc import Callable

from recycle.systems.bamboo import Bamboo
from recycle.systems.oobleck import Oobleck
from recycle.systems.setting import Layer, Setting
from recycle.systems.system import Change, Checkpoints, DoesNotFit, Loss, Pause, Running, Stopped, System, Timed

SYSTEMS: dict[str, Callable[[Setting], System]] = {
    "bamboo": Bamboo,
    "oobleck": Oobleck,
}

__all__ = [
    "SYSTEMS",
    "Change",
    "Checkpoints",
    "DoesNotFit",
    "Layer",
    "Loss",
    "Pause",
    "Running",
    "Setting",
    "Stopped",
    "System",
    "Timed",
]
