"""Hot spares: some nodes stand idle, and one of them takes the place of a node that dies.

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

from functools import cached_property
from math import ceil

from recycle.systems.checkpoint_restart import CheckpointRestart
from recycle.systems.grids import GridRunning
from recycle.systems.setting import FATAL_SHARE, Setting
from recycle.systems.system import Change, DoesNotFit, Loss, Nodes, State


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
