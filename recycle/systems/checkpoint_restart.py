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

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial

from recycle.systems.grids import PipelineGrid, PipelineGrids
from recycle.systems.setting import Setting
from recycle.systems.system import Change, DoesNotFit, Loss, Nodes, Running, State, Stopped


@dataclass(frozen=True, kw_only=True)
class WholeGridRunning(Running):
    """A whole grid; `used` has the slot of each position, pipeline by pipeline. The other slots are idle."""

    grid: PipelineGrid
    used: tuple[int, ...]

    def lost(self, slots: Iterable[int]) -> set[int]:
        """Those of `slots` that play a position."""
        return set(slots).intersection(self.used)


class CheckpointRestart:
    """Checkpoints at Young's interval; a restart at every change, on the fastest grid of what is left."""

    name = "checkpoint_restart"
    fatal_share = 1.0
    """Of failures that need a checkpoint."""
    copies: int | None = 1
    """Of each part of the optimizer's state, where the job shards it; None for as many as the job says."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting = setting if self.copies is None else setting.with_copies(self.copies)
        self.grids = PipelineGrids(setting)

    def begin(self, live: Nodes) -> State | DoesNotFit:
        return self._begun(live, len(self.setting.slots(live)))

    def _begun(self, live: Nodes, slots: int) -> State | DoesNotFit:
        """The best grid on so many of the live slots."""
        grid = self.grids.best(slots)
        if grid is None and slots >= self.setting.least_ranks:
            return self.grids.leanest(slots).misfit()
        if grid is None:
            return Stopped(live=live, reason=f"{slots} live worker(s) cannot hold the model")
        return self._running(live, grid, tuple(self.setting.slots(live)[: grid.slots]))

    def change(self, state: State, failed: Nodes, joined: Nodes) -> Change:
        setting = self.setting
        live = state.live - failed | joined
        running = state if isinstance(state, WholeGridRunning) else None
        lost = running is not None and bool(running.lost(setting.slots(failed)))
        after = self.begin(live)
        pause = setting.restart(detected=lost)
        if running is not None and not lost:
            pause = replace(pause, restart=pause.restart + setting.storage_seconds)
            if not (isinstance(after, WholeGridRunning) and self._pays(running, after, pause.seconds)):
                return Change(state=self._running(live, running.grid, running.used), event="wait")
        if isinstance(after, DoesNotFit):
            after = Stopped(live=live, reason=f"does not fit: {after.reason}")
        return Change(
            state=after,
            pause=pause,
            loss=Loss.CHECKPOINT if lost or running is None else Loss.NOTHING,
            event="stop" if isinstance(after, Stopped) else "restart",
        )

    def _pays(self, before: WholeGridRunning, after: WholeGridRunning, pause: float) -> bool:
        """Whether more is done until the next failure is due, with the pause than without it."""
        failures = self.setting.failure_rate * len(after.live)
        return after.period * (1 + pause * failures) < before.period

    def _running(self, live: Nodes, grid: PipelineGrid, used: tuple[int, ...]) -> WholeGridRunning:
        setting = self.setting
        return WholeGridRunning(
            live=live,
            period=grid.period,
            samples=setting.samples,
            idle=len(setting.slots(live)) - grid.slots,
            checkpoints=setting.checkpoints(len(live), self.fatal_share),
            layout=f"{grid.pipelines} x {grid.ranks}",
            schedules=partial(self.grids.schedules, grid),
            grid=grid,
            used=used,
        )
