"""Checkpoint and restart: every change of the live set starts all processes again, in the best shape for what is left.

The representative is Varuna (Athlur et al., EuroSys '22), which morphs depth and number of pipelines; plain `torchrun`
with elastic restarts is the same without the morphing. The interval of checkpoints follows Young's rule for the true
failure rate of the whole job. Nodes that come back are let in by a restart as well, from a checkpoint that is written
for it, so without loss: as soon as what they add until the next failure is due is more than the pause. Of a sharded
optimizer's state each host has its part alone (ZeRO-1, as in Megatron's distributed optimizer): everybody reads a
checkpoint anyway.

Limits: every failure costs the work since the last checkpoint and a restart of all processes; at depths at which layers
do not divide the slowest stage is in charge.

Hot spares: some nodes stand idle, and one of them takes the place of a node that dies.

The spares are part of the job's nodes, so that they count in every ratio, paid for and training nothing: the grid is
the best on what is left. A spare has its processes up; it copies the state of a live peer of the stage, which costs the
common pause, and the iteration in progress is repeated. With no spare left everybody restarts from a checkpoint on
fewer workers, as in `checkpoint_restart`, and again when nodes have come back and that pays. Nodes that come back
otherwise become spares, which interrupts nobody. The practice is common: 8 of the 72 GPUs of a rack are spares in
NVIDIA's NVL72 systems (claimed).

Of a sharded optimizer's state there are as many copies as the job says, as if these systems held them as recycle does.
Where the last owner of a shard dies everybody restarts from a checkpoint.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from math import ceil
from typing import ClassVar

from recycle.systems.grids import CheckpointedSystem, GridRunning, PipelineGrid
from recycle.systems.setting import FATAL_SHARE, Setting
from recycle.systems.system import Change, DoesNotFit, Loss, Nodes, State, Stopped


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


class HotSpare(CheckpointRestart):
    """Spares beside the best grid on the other nodes.

    Args:
        spares: nodes that stand idle as long as all are alive; 5 % of the nodes if left out, at least one, unless the
            model needs them all. That share is what a study of the Delta cluster asks for (claimed).
    """

    name = "hot_spare"
    loss = Loss.ITERATION
    copies = None

    def __init__(self, setting: Setting, *, spares: int | None = None) -> None:
        super().__init__(setting)
        self.fatal_share = 1.0 if setting.copies == 1 else FATAL_SHARE
        self.spares = max(1, ceil(0.05 * setting.nodes)) if spares is None else spares

    def begin(self, live: Nodes) -> State | DoesNotFit:
        return self._begun(live, min(len(self.setting.slots(live)), self._working_slots))

    @cached_property
    def _working_slots(self) -> int:
        """Slots beside the spares; all where no model fits on so few."""
        setting = self.setting
        kept = len(setting.slots(range(setting.nodes - self.spares)))
        return kept if kept >= setting.least_ranks else len(setting.node_of)

    def survive(self, state: GridRunning, live: Nodes, failed: Nodes, joined: Nodes) -> Change | None:
        setting, ranks = self.setting, state.grid.ranks
        lost = set(state.used).intersection(setting.slots(failed))
        spare = [slot for slot in setting.slots(live) if slot not in state.used]
        if not lost or len(spare) < len(lost):
            return super().survive(state, live, failed, joined)
        replaced = dict(zip(sorted(lost), spare, strict=False))
        after = self._running(live, state.grid, tuple(replaced.get(slot, slot) for slot in state.used))
        state_bytes = setting.state_per_stage(setting.cut(ranks), state.grid.pipelines)
        copies = [position % ranks for position, slot in enumerate(state.used) if slot in lost]
        copied = sum(state_bytes[rank] for rank in copies)
        hosts = [state.used[rank::ranks] for rank in range(ranks)]
        if any(lost.issuperset(stage) or setting.loses_shard(stage, lost) for stage in hosts):
            return Change(state=after, pause=setting.restart(), loss=Loss.CHECKPOINT, bytes=copied, event="restart")
        busiest = max(
            ceil(copies.count(rank) / (len(hosts[rank]) - copies.count(rank))) * state_bytes[rank] for rank in copies
        )
        return Change(state=after, pause=setting.pause(busiest), loss=self.loss, bytes=copied, event="replace")


class LiveMigration(HotSpare):
    """Standby nodes that take over a role within an iteration, which goes on after the pause: nothing is repeated.

    That is what commercial systems say of themselves (TorchPass; TrainMover, arXiv 2412.12636); it is taken at their
    word here.
    """

    name = "live_migration"
    loss = Loss.NOTHING
