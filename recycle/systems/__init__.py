"""Resilience systems on one engine: one system per file, registered here; `cluster` runs them over a failure trace.

Begin with `system`, the protocol, `scenario`, the common input, and `failures`, the events.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

from recycle.systems import scenario, system
from recycle.systems.bamboo.bamboo import Bamboo
from recycle.systems.checkpoint_restart import CheckpointRestart, HotSpare, JobRestart, LiveMigration
from recycle.systems.elaswave import ElasWave
from recycle.systems.oobleck.oobleck import Oobleck
from recycle.systems.recycle import ReCycle
from recycle.systems.recycle_elastic import ElasticReCycle
from recycle.systems.sample_dropping import SampleDropping
from recycle.systems.scenario import Scenario
from recycle.systems.system import ActiveConfiguration, Change, DoesNotFit, Loss, Pause, Stopped, System

SYSTEMS: dict[str, Callable[[Scenario], System]] = {
    "recycle": ReCycle,
    "recycle_elastic": ElasticReCycle,
    "oobleck": Oobleck,
    "elaswave": ElasWave,
    "bamboo": Bamboo,
    "hot_spare": HotSpare,
    "job_restart": JobRestart,
    "live_migration": LiveMigration,
    "sample_dropping": SampleDropping,
    "checkpoint_restart": CheckpointRestart,
}
VARIANTS: dict[str, Callable[[Scenario], System]] = {
    "recycle_adaptive": lambda scenario: ReCycle(scenario, decoupled=False, staggered=False),
    "recycle_decoupled": lambda scenario: ReCycle(scenario, staggered=False),
    "bamboo_1f1b_buffers": lambda scenario: Bamboo(scenario, buffer_per_micro_batch=False),
}
"""Modified systems; compared only if requested by name."""

# Former names, which plug-ins may import.
scenario.Setting = Setting = Scenario  # type: ignore[attr-defined]
system.Running = Running = ActiveConfiguration  # type: ignore[attr-defined]
sys.modules[f"{__name__}.setting"] = scenario

__all__ = [
    "SYSTEMS",
    "VARIANTS",
    "ActiveConfiguration",
    "Change",
    "DoesNotFit",
    "Loss",
    "Pause",
    "Running",
    "Scenario",
    "Setting",
    "Stopped",
]
