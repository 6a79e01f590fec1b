"""Resilience systems on one engine: one system per file, registered here; `cluster` runs them over a failure trace.

Begin with `system`, the protocol, `setting`, the common input, and `failures`, the events.
"""

from __future__ import annotations

from collections.abc import Callable

from recycle.systems.bamboo.bamboo import Bamboo
from recycle.systems.checkpoint_restart import CheckpointRestart, HotSpare, LiveMigration
from recycle.systems.elaswave import ElasWave
from recycle.systems.oobleck.oobleck import Oobleck
from recycle.systems.recycle import ReCycle
from recycle.systems.recycle_elastic import ElasticReCycle
from recycle.systems.sample_dropping import SampleDropping
from recycle.systems.setting import Setting
from recycle.systems.system import Change, DoesNotFit, Loss, Pause, Running, Stopped, System

SYSTEMS: dict[str, Callable[[Setting], System]] = {
    "recycle": ReCycle,
    "recycle_elastic": ElasticReCycle,
    "oobleck": Oobleck,
    "elaswave": ElasWave,
    "bamboo": Bamboo,
    "hot_spare": HotSpare,
    "live_migration": LiveMigration,
    "sample_dropping": SampleDropping,
    "checkpoint_restart": CheckpointRestart,
}
VARIANTS: dict[str, Callable[[Setting], System]] = {
    "recycle_adaptive": lambda setting: ReCycle(setting, decoupled=False, staggered=False),
    "recycle_decoupled": lambda setting: ReCycle(setting, staggered=False),
    "bamboo_1f1b_buffers": lambda setting: Bamboo(setting, buffer_per_micro_batch=False),
}
"""Modified systems; compared only if requested by name."""

__all__ = [
    "SYSTEMS",
    "VARIANTS",
    "Change",
    "DoesNotFit",
    "Loss",
    "Pause",
    "Running",
    "Setting",
    "Stopped",
]
