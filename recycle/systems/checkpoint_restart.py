"""Checkpoint and restart, hot spares, restarts with spares, and live migration.

Checkpoint and restart: every change of the live nodes restarts all processes in the best shape for the rest, as Varuna
(Athlur et al., EuroSys '22) and elastic restarts of `torchrun` do, with ZeRO-1 if the job shards its optimizer. The
interval follows Young's rule. Returning nodes join by a restart from a checkpoint written for it, once their gain until
the next failure exceeds the pause.

Hot spares: some nodes are idle with running processes, and the grid is the best on the rest. A spare replaces a dead
node by copying the state of a live peer, and the iteration is repeated. Without a spare, or without an owner of a
shard, all workers restart from a checkpoint. Returning nodes become spares.
"""

from __future__ import annotations

from dataclasses import replace
from math import ceil
from typing import ClassVar

from recycle.systems.grids import CheckpointedSystem, GridConfiguration
from recycle.systems.scenario import FATAL_SHARE, Scenario
from recycle.systems.system import Change, DoesNotFit, Loss, Nodes, State, Stopped


class CheckpointRestart(CheckpointedSystem[GridConfiguration]):
    name = "checkpoint_restart"
    copies: ClassVar[int | None] = 1
    fatal_share = 1.0

    def begin(self, live: Nodes) -> State | DoesNotFit:
        return self._on_slots(live, len(self.scenario.slots(live)))

    def _on_slots(self, live: Nodes, slots: int) -> State | DoesNotFit:
        grid = self.grids.best(slots)
        if grid is not None:
            return self.grids.configuration(live, grid, tuple(self.scenario.slots(live)[: grid.slots]))
        if slots >= self.scenario.least_ranks:
            return self.grids.does_not_fit(slots)
        return Stopped(live=live, reason=f"{slots} live worker(s) cannot hold the model")

    def survive(self, state: GridConfiguration, live: Nodes, failed: Nodes, joined: Nodes) -> Change | None:
        if not set(state.used).isdisjoint(self.scenario.slots(failed)):
            return None
        after = self.begin(live)
        pause = self.scenario.restart(detected=False)
        pause = replace(pause, restart=pause.restart + self.scenario.storage_seconds)
        with_pauses = 1 + pause.seconds * (self.scenario.failure_rate * len(live))
        if isinstance(after, GridConfiguration) and after.period * with_pauses < state.period:
            return Change(state=after, pause=pause, event="restart")
        return Change(state=self.grids.configuration(live, state.grid, state.used), event="wait")


class HotSpare(CheckpointRestart):
    """Spares besides the best grid on the other nodes.

    Args:
        spares: number of idle nodes while all are alive. None for 5 % of the nodes, at least one, unless the model
            needs them all; a study of the Delta cluster asks for this share (claimed).
    """

    name = "hot_spare"
    loss = Loss.ITERATION
    copies = None

    def __init__(self, scenario: Scenario, *, spares: int | None = None) -> None:
        super().__init__(scenario)
        self.fatal_share = 1.0 if scenario.copies == 1 or self.loss is Loss.CHECKPOINT else FATAL_SHARE
        self.spares = max(1, ceil(0.05 * scenario.nodes)) if spares is None else spares

    def begin(self, live: Nodes) -> State | DoesNotFit:
        scenario = self.scenario
        kept = len(scenario.slots(range(scenario.nodes - self.spares)))
        working = kept if kept >= scenario.least_ranks else len(scenario.node_of)
        return self._on_slots(live, min(len(scenario.slots(live)), working))

    def survive(self, state: GridConfiguration, live: Nodes, failed: Nodes, joined: Nodes) -> Change | None:
        scenario, ranks = self.scenario, state.grid.ranks
        lost = set(state.used).intersection(scenario.slots(failed))
        spare = [slot for slot in scenario.slots(live) if slot not in state.used]
        if not lost or len(spare) < len(lost):
            return super().survive(state, live, failed, joined)
        replaced = dict(zip(sorted(lost), spare, strict=False))
        used = tuple(replaced.get(slot, slot) for slot in state.used)
        after = self.grids.configuration(live, state.grid, used)
        state_bytes = scenario.state_per_stage(scenario.cut(ranks), state.grid.pipelines)
        copies = [position % ranks for position, slot in enumerate(state.used) if slot in lost]
        copied = sum(state_bytes[rank] for rank in copies)
        hosts = [state.used[rank::ranks] for rank in range(ranks)]
        gone = any(lost.issuperset(stage) or scenario.loses_shard(stage, lost) for stage in hosts)
        if gone or self.loss is Loss.CHECKPOINT:
            return Change(state=after, pause=scenario.restart(), loss=Loss.CHECKPOINT, bytes=copied, event="restart")
        busiest = max(
            ceil(copies.count(rank) / (len(hosts[rank]) - copies.count(rank))) * state_bytes[rank] for rank in copies
        )
        return Change(state=after, pause=scenario.pause(busiest), loss=self.loss, bytes=copied, event="replace")


class JobRestart(HotSpare):
    """All workers restart with spares in the places of the dead, as NVIDIA's resiliency extension restarts a job."""

    name = "job_restart"
    loss = Loss.CHECKPOINT


class LiveMigration(HotSpare):
    """Standby nodes that take over within an iteration, as TorchPass and TrainMover (arXiv 2412.12636) claim."""

    name = "live_migration"
    loss = Loss.NOTHING
