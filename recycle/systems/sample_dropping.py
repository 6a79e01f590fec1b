"""Sample dropping, as torchft does it: a pipeline that lost a worker leaves, and its samples are not trained.

The failure domain is a whole replica group, here a pipeline. The others go on with the same micro-batches each, so that
the batch shrinks: throughput is that of the healthy share of the groups, and the dropped samples have a column of their
own. The step in progress is discarded by all; the quorum costs the common pause, not torchft's timeouts of 60 s. A
group comes back at the next boundary when its node does, or when live workers of broken groups suffice for one; it
copies a peer's state. With all groups lost everybody goes back to a checkpoint.

Source: meta-pytorch/torchft @ 7eb7087 (BSD-3), Lighthouse's quorum and the vote `should_commit`.

A job's sharded optimizer changes nothing: torchft shards inside a group, whose pipeline has one host of each stage.

Limits: a shrinking batch changes the training; one dead worker takes a whole pipeline with it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from recycle.systems.grids import PipelineGrid, PipelineGrids
from recycle.systems.setting import Setting
from recycle.systems.system import Change, DoesNotFit, Loss, Nodes, Running, State, Stopped


@dataclass(frozen=True, kw_only=True)
class GroupsRunning(Running):
    """Healthy replica groups, some or all pipelines of a grid; `groups` has the slots of each."""

    grid: PipelineGrid
    groups: tuple[tuple[int, ...], ...]


class SampleDropping:
    """Replica groups on the best grid of all nodes, of which the healthy ones train."""

    name = "sample_dropping"

    def __init__(self, setting: Setting) -> None:
        self.setting = setting = setting.with_copies(0)
        self.grids = PipelineGrids(setting)

    def begin(self, live: Nodes) -> State | DoesNotFit:
        whole = self.grids.best(len(self.setting.node_of))
        if whole is None:
            return self.grids.leanest(len(self.setting.node_of)).misfit()
        slots = self.setting.slots(live)
        return self._running(live, whole, self._grouped(whole, [], slots))

    def change(self, state: State, failed: Nodes, joined: Nodes) -> Change:
        setting = self.setting
        live = state.live - failed | joined
        before = state if isinstance(state, GroupsRunning) else None
        gone = frozenset(setting.slots(failed))
        groups = [] if before is None else [group for group in before.groups if gone.isdisjoint(group)]
        if before is None or not groups:
            after = self.begin(live)
            assert not isinstance(after, DoesNotFit)
            return Change(
                state=after,
                pause=setting.restart(detected=bool(failed)),
                loss=Loss.CHECKPOINT,
                event="stop" if isinstance(after, Stopped) else "restart",
            )
        if len(groups) < len(before.groups):
            after = self._running(live, before.grid, groups)
            return Change(state=after, pause=setting.pause(), loss=Loss.ITERATION, event="drop")
        taken = {slot for group in groups for slot in group}
        formed = self._grouped(before.grid, groups, [slot for slot in setting.slots(live) if slot not in taken])
        after = self._running(live, before.grid, formed)
        new = len(formed) - len(groups)
        if failed or not new:  # a failure of nodes that wait, or newcomers that do not make a group yet
            return Change(state=self._running(live, before.grid, groups), event="wait")
        state_bytes = setting.state_per_stage(setting.cut(before.grid.ranks))
        copied = -(-new // len(groups)) * max(state_bytes)
        return Change(
            state=after, pause=setting.pause(copied, detected=False), bytes=new * sum(state_bytes), event="join"
        )

    def _grouped(self, grid: PipelineGrid, groups: list[tuple[int, ...]], free: list[int]) -> list[tuple[int, ...]]:
        """`groups` and as many new ones of the free slots as the grid has room for."""
        room = grid.pipelines - len(groups)
        new = [tuple(free[at : at + grid.ranks]) for at in range(0, len(free) - grid.ranks + 1, grid.ranks)]
        return groups + new[:room]

    def _running(self, live: Nodes, grid: PipelineGrid, groups: list[tuple[int, ...]]) -> State:
        setting = self.setting
        if not groups:
            return Stopped(live=live, reason=f"no replica group of {grid.ranks} workers is whole")
        idle = len(setting.slots(live)) - len(groups) * grid.ranks
        trained = setting.samples * len(groups) / grid.pipelines
        return GroupsRunning(
            live=live,
            period=grid.period,
            samples=trained,
            dropped=setting.samples - trained,
            idle=idle,
            checkpoints=setting.checkpoints(len(live)),
            reconsider=idle >= grid.ranks and len(groups) < grid.pipelines,
            layout=f"{len(groups)} x {grid.ranks}",
            schedules=partial(self.grids.schedules, grid),
            grid=grid,
            groups=tuple(groups),
        )
