"""Checkpoint and restart: every change of the live set starts all processes again, in the best shape for what is left.

The representative is Varuna (Athlur et al., EuroSys '22), which morphs depth and number of pipelines; plain `torchrun`
with elastic restarts is the same without the morphing. The interval of checkpoints follows Young's rule for the true
failure rate of the whole job. Nodes that come back are let in by a restart as well, from a checkpoint that is written
for it, so without loss: as soon as what they add until the next failure is due is more than the pause. Of a sharded
optimizer's state each host has its part alone (ZeRO-1, as in Megatron's distributed optimizer): everybody reads a
checkpoint anyway.

Limits: every failure costs the work since the last checkpoint and a restart of all processes; at depths at which layers
do not divide the slowest stage is in charge.
"""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from recycle.systems.grids import CheckpointedSystem, GridRunning, PipelineGrid
from recycle.systems.system import Change, DoesNotFit, Nodes, State, Stopped


class CheckpointRestart(CheckpointedSystem[GridRunning]):
    """Checkpoints at Young's interval; a restart at every change, on the fastest grid of what is left."""

    name = "checkpoint_restart"
    copies: ClassVar[int | None] = 1
    fatal_share = 1.0
    """Of failures that need a checkpoint."""

    def begin(self, live: Nodes) -> State | DoesNotFit:
        return self._begun(live, len(self.setting.slots(live)))

    def _begun(self, live: Nodes, slots: int) -> State | DoesNotFit:
        """The best grid on so many of the live slots."""
        grid = self.grids.best(slots)
        if grid is not None:
            return self._running(live, grid, tuple(self.setting.slots(live)[: grid.slots]))
        if slots >= self.setting.least_ranks:
            return self.grids.misfit(slots)
        return Stopped(live=live, reason=f"{slots} live worker(s) cannot hold the model")

    def survive(self, state: GridRunning, live: Nodes, failed: Nodes, joined: Nodes) -> Change | None:
        if not set(state.used).isdisjoint(self.setting.slots(failed)):
            return None
        after = self.begin(live)
        pause = self.setting.restart(detected=False)
        pause = replace(pause, restart=pause.restart + self.setting.storage_seconds)
        if isinstance(after, GridRunning) and self._pays(state, after, pause.seconds):
            return Change(state=after, pause=pause, event="restart")
        return Change(state=self._running(live, state.grid, state.used), event="wait")

    def _pays(self, before: GridRunning, after: GridRunning, pause: float) -> bool:
        """Whether more is done until the next failure is due, with the pause than without it."""
        failures = self.setting.failure_rate * len(after.live)
        return after.period * (1 + pause * failures) < before.period

    def _running(self, live: Nodes, grid: PipelineGrid, used: tuple[int, ...]) -> GridRunning:
        return self.grids.running(live, grid, used, self.fatal_share)
