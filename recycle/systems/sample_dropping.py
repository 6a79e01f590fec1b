"""Sample dropping, as in torchft: a pipeline that lost a worker leaves, and its samples are not trained.

The failure domain is a replica group, here a pipeline; the others keep their micro-batches, so the batch shrinks. All
groups discard the step in progress; the quorum costs the common pause, not torchft's timeouts of 60 s. A group returns
at the next boundary with its node, or when live workers of broken groups can form one, and copies a peer's state.

Source: meta-pytorch/torchft @ 7eb7087 (BSD-3), Lighthouse's quorum and the vote `should_commit`.
"""

from __future__ import annotations

from recycle.systems.grids import CheckpointedSystem, GridConfiguration, PipelineGrid
from recycle.systems.system import Change, DoesNotFit, Loss, Nodes, State, Stopped


class SampleDropping(CheckpointedSystem[GridConfiguration]):
    name = "sample_dropping"

    def begin(self, live: Nodes) -> State | DoesNotFit:
        grid = self.grids.fastest()
        if isinstance(grid, DoesNotFit):
            return grid
        used = self._form_groups(grid, (), self.scenario.slots(live))
        if not used:
            return Stopped(live=live, reason=f"no replica group of {grid.ranks} workers is whole")
        return self._configuration(live, grid, used)

    def survive(self, state: GridConfiguration, live: Nodes, failed: Nodes, joined: Nodes) -> Change | None:
        scenario, grid = self.scenario, state.grid
        gone = set(scenario.slots(failed))
        groups = [state.used[at : at + grid.ranks] for at in range(0, len(state.used), grid.ranks)]
        used = tuple(slot for group in groups if gone.isdisjoint(group) for slot in group)
        if not used:
            return None
        if used != state.used:
            return Change(
                state=self._configuration(live, grid, used), pause=scenario.pause(), loss=Loss.ITERATION, event="drop"
            )
        formed = self._form_groups(grid, used, sorted(set(scenario.slots(live)).difference(used)))
        new = (len(formed) - len(used)) // grid.ranks
        if failed or not new:  # waiting nodes failed, or new nodes do not yet form a group
            return Change(state=self._configuration(live, grid, used), event="wait")
        state_bytes = scenario.state_per_stage(scenario.cut(grid.ranks))
        copied = -(-new // len(groups)) * max(state_bytes)
        return Change(
            state=self._configuration(live, grid, formed),
            pause=scenario.pause(copied, detected=False),
            bytes=new * sum(state_bytes),
            event="join",
        )

    def _form_groups(self, grid: PipelineGrid, used: tuple[int, ...], free: list[int]) -> tuple[int, ...]:
        new = min((grid.slots - len(used)) // grid.ranks, len(free) // grid.ranks)
        return (*used, *free[: new * grid.ranks])

    def _configuration(self, live: Nodes, grid: PipelineGrid, used: tuple[int, ...]) -> GridConfiguration:
        waiting = len(self.scenario.slots(live)) - len(used)
        return self.grids.configuration(live, grid, used, reconsider=waiting >= grid.ranks and len(used) < grid.slots)
