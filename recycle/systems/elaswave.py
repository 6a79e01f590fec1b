"""ElasWave as far as it is published: a pipeline that lost a worker is cut anew, and micro-batches change size.

Source: ElasWave, arXiv 2510.00606. What is modelled, and what is assumed where the paper leaves it open:

    layers          re-cut by a minimax program over the live workers of the pipeline that lost one; others stay
    micro-batches   as many in every pipeline as before, of other sizes, so that all pipelines end together and the
                    global batch stays; sizes are taken as divisible as need be, and time and activations as
                    proportional to them
    schedule        1F1B, all stages stepping together
    state           snapshots of each step lie on a peer's host, so that any one dead worker costs the iteration in
                    progress; where all hosts of a layer die, everybody goes back to a checkpoint. Where the job
                    shards its optimizer's state each part is on one device (ZeRO), as snapshots make up for that
    pause           detection, planning and one second for communicators that are edited in place, as claimed (the
                    common figure where that is less); copies do not block: training goes on while they last
    a pipeline whose live workers cannot hold the model stands idle

It runs the fastest 1F1B grid of all nodes. Not modelled: the clock frequency that is raised for stragglers, and who has
which shard once pipelines are cut differently.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

from recycle.ir.families import one_f_one_b
from recycle.ir.simulate import simulate
from recycle.job.profile import Profile
from recycle.job.shape import Shape
from recycle.systems.grids import CheckpointedSystem, PipelineGrid
from recycle.systems.setting import Setting, ranges
from recycle.systems.system import Change, DoesNotFit, Loss, Nodes, Running, State, Stopped, Timed

COMMUNICATORS = 1.0
"""Seconds to edit communicators in place, as claimed."""
_SCALED = ("forward", "backward_input", "backward_weight", "activation", "message")
"""What goes with the size of a micro-batch."""


@dataclass(frozen=True, kw_only=True)
class ElasWaveRunning(Running):
    """Pipelines of unlike depth.

    Attributes:
        grid: the fault-free one.
        members: live slots of each pipeline of the grid, by rank.
    """

    grid: PipelineGrid
    members: tuple[tuple[int, ...], ...]


class ElasWave(CheckpointedSystem[ElasWaveRunning]):
    """Implements `recycle.systems.system.System`."""

    name = "elaswave"
    copies = 1
    counts_reads = True

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self._alone = cache(self._makespan)

    def begin(self, live: Nodes) -> State | DoesNotFit:
        grid = self.grids.whole()
        if isinstance(grid, DoesNotFit):
            return grid
        alive = set(self.setting.slots(live))
        rows = [range(k * grid.ranks, (k + 1) * grid.ranks) for k in range(grid.pipelines)]
        return self._running(live, grid, tuple(tuple(slot for slot in row if slot in alive) for row in rows))

    def survive(self, state: ElasWaveRunning, live: Nodes, failed: Nodes, joined: Nodes) -> Change | None:
        setting, after = self.setting, self.begin(live)
        if not isinstance(after, ElasWaveRunning) or self._lost(state, failed):
            return None
        if after.members == state.members:
            return Change(state=after, event="wait")
        pause = setting.pause(detected=bool(failed))
        return Change(
            state=after,
            pause=dataclasses.replace(pause, rebuild=min(pause.rebuild, COMMUNICATORS)),
            loss=Loss.ITERATION if failed else Loss.NOTHING,
            bytes=self._copied(state, after),
            event="re-cut" if failed else "join",
        )

    # ---- what runs

    def _running(self, live: Nodes, grid: PipelineGrid, members: tuple[tuple[int, ...], ...]) -> State:
        setting = self.setting
        depths = [len(row) if self._fits(len(row), grid) else 0 for row in members]
        if not any(depths):
            return Stopped(live=live, reason="no pipeline has live workers that hold the model")
        kinds = sorted({kind for kind in zip(depths, self.sizes(grid, tuple(depths)), strict=True) if kind[0]})
        schedules = partial(self._schedules, kinds, grid)
        return ElasWaveRunning(
            live=live,
            period=max(simulate(*timed).period for timed in schedules()),
            samples=setting.samples,
            idle=len(setting.slots(live)) - sum(depths),
            checkpoints=setting.checkpoints(len(live)),
            layout=" + ".join(f"{depths.count(depth)} x {depth}" for depth in sorted({*depths} - {0}, reverse=True)),
            schedules=schedules,
            grid=grid,
            members=members,
        )

    def sizes(self, grid: PipelineGrid, depths: tuple[int, ...]) -> list[float]:
        """Size of a micro-batch of each pipeline over the fault-free one: as the pace of the pipeline; 0 where none."""
        pace = [1 / self._alone(depth, grid.micro_batches) if depth else 0.0 for depth in depths]
        whole = self.setting.micro_batches / grid.micro_batches
        return [whole * each / sum(pace) if each else 0.0 for each in pace]

    def _makespan(self, depth: int, micro_batches: int) -> float:
        """Seconds of a pipeline's compute, with micro-batches of the fault-free size."""
        profile = dataclasses.replace(self._profile(depth, 1.0), reduce=0.0, step=0.0, gather=0.0)
        return simulate(one_f_one_b(Shape(1, depth, micro_batches)), profile).makespan

    def _profile(self, depth: int, size: float) -> Profile:
        profile = self.setting.profile(self.setting.cut(depth), self._hosts(depth))
        scaled: dict[str, Any] = {name: [each * size for each in profile.per_stage(name, depth)] for name in _SCALED}
        return dataclasses.replace(profile, **scaled)

    def _hosts(self, depth: int) -> int:
        """Of a stage of pipelines of this depth."""
        return max(1, len(self.setting.node_of) // depth)

    def _fits(self, depth: int, grid: PipelineGrid) -> bool:
        """Whether live workers of a pipeline hold the model and the activations of 1F1B."""
        setting = self.setting
        if not max(1, setting.least_ranks) <= depth <= len(setting.layers):
            return False
        split, size = setting.cut(depth), depth / grid.ranks
        return setting.fullest_of_1f1b(split, grid.micro_batches, self._hosts(depth), size).fits

    def _schedules(self, kinds: list[tuple[int, float]], grid: PipelineGrid) -> list[Timed]:
        """One pipeline of each depth and size."""
        return [(self.grids.schedule(depth, grid.micro_batches), self._profile(depth, size)) for depth, size in kinds]

    # ---- what moves

    def _held(self, state: ElasWaveRunning) -> dict[int, range]:
        """The layers of each slot that runs."""
        held: dict[int, range] = {}
        for row in state.members:
            if self._fits(len(row), state.grid):
                places = ranges(self.setting.cut(len(row)))
                held |= {slot: range(first, last) for slot, (first, last) in zip(row, places, strict=True)}
        return held

    def _lost(self, state: ElasWaveRunning, failed: Nodes) -> bool:
        """Whether a layer has lost all its hosts."""
        gone = set(self.setting.slots(failed))
        left = {layer for slot, layers in self._held(state).items() if slot not in gone for layer in layers}
        return len(left) < len(self.setting.layers)

    def _copied(self, before: ElasWaveRunning, after: ElasWaveRunning) -> float:
        had = self._held(before)
        return sum(
            self.setting.layers[layer].state
            for slot, layers in self._held(after).items()
            for layer in layers
            if layer not in had.get(slot, ())
        )
