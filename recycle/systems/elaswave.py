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
from itertools import accumulate, pairwise

from recycle.ir.families import one_f_one_b
from recycle.ir.simulate import simulate
from recycle.layers import stage_bytes
from recycle.profile import Profile
from recycle.shape import Shape
from recycle.systems.grids import PipelineGrid, PipelineGrids
from recycle.systems.setting import Setting, Split
from recycle.systems.system import Change, DoesNotFit, Loss, Nodes, Running, State, Stopped, Timed

COMMUNICATORS = 1.0
"""Seconds to edit communicators in place, as claimed."""


@dataclass(frozen=True, kw_only=True)
class ElasWaveRunning(Running):
    """Pipelines of unlike depth.

    Attributes:
        grid: the fault-free one.
        members: live slots of each pipeline of the grid, by rank.
    """

    grid: PipelineGrid
    members: tuple[tuple[int, ...], ...]


class ElasWave:
    """Implements `recycle.systems.system.System`."""

    name = "elaswave"

    def __init__(self, setting: Setting) -> None:
        self.setting = setting = setting.with_copies(1)
        self.grids = PipelineGrids(setting)
        self._alone = cache(self._makespan)

    def begin(self, live: Nodes) -> State | DoesNotFit:
        slots = self.setting.node_of
        grid = self.grids.best(len(slots))
        if grid is None:
            return self.grids.leanest(len(slots)).misfit()
        alive = set(self.setting.slots(live))
        rows = [range(k * grid.ranks, (k + 1) * grid.ranks) for k in range(grid.pipelines)]
        return self._running(live, grid, tuple(tuple(slot for slot in row if slot in alive) for row in rows))

    def change(self, state: State, failed: Nodes, joined: Nodes) -> Change:
        setting = self.setting
        live = state.live - failed | joined
        after = self.begin(live)
        assert not isinstance(after, DoesNotFit)
        if not isinstance(state, ElasWaveRunning) or isinstance(after, Stopped) or self._lost(state, failed):
            restarted = isinstance(after, Running)
            return Change(
                state=after,
                pause=setting.restart(detected=bool(failed)) if restarted else setting.pause(),
                loss=Loss.CHECKPOINT,
                bytes=setting.state if restarted else 0.0,
                event="restart" if restarted else "stop",
            )
        assert isinstance(after, ElasWaveRunning)
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
        sizes = self.sizes(grid, tuple(depths))
        if not any(depths):
            return Stopped(live=live, reason="no pipeline has live workers that hold the model")
        running = [k for k, depth in enumerate(depths) if depth]
        period = max(self._period(depths[k], grid, sizes[k]) for k in running)
        return ElasWaveRunning(
            live=live,
            period=period,
            samples=setting.samples,
            idle=len(setting.slots(live)) - sum(depths),
            checkpoints=setting.checkpoints(len(live)),
            layout=" + ".join(f"{depths.count(depth)} x {depth}" for depth in sorted({*depths} - {0}, reverse=True)),
            schedules=partial(self._schedules, tuple(sorted({(depths[k], sizes[k]) for k in running})), grid),
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

    def _period(self, depth: int, grid: PipelineGrid, size: float) -> float:
        schedule = one_f_one_b(Shape(1, depth, grid.micro_batches), optimizer="barrier")
        return simulate(self.setting.gathering(schedule), self._profile(depth, size)).period

    def _profile(self, depth: int, size: float) -> Profile:
        profile = self.setting.profile(self.setting.cut(depth), self._hosts(depth))

        def scaled(name: str) -> list[float]:
            return [each * size for each in profile.per_stage(name, depth)]

        return dataclasses.replace(
            profile,
            forward=scaled("forward"),
            backward_input=scaled("backward_input"),
            backward_weight=scaled("backward_weight"),
            activation=scaled("activation"),
            message=scaled("message"),
        )

    def _hosts(self, depth: int) -> int:
        """Of a stage of pipelines of this depth."""
        return max(1, len(self.setting.node_of) // depth)

    def _fits(self, depth: int, grid: PipelineGrid) -> bool:
        """Whether live workers of a pipeline hold the model and the activations of 1F1B."""
        if not depth or depth > len(self.setting.layers):
            return False
        if depth < self.setting.least_ranks:
            return False
        size = depth / grid.ranks
        return all(
            stage_bytes(stage, min(depth - rank, grid.micro_batches) * size)
            <= self.setting.cap(rank, depth) * (1 + 1e-9)
            for rank, stage in enumerate(self.setting.stages(self.setting.cut(depth), self._hosts(depth)))
        )

    def _schedules(self, kinds: tuple[tuple[int, float], ...], grid: PipelineGrid) -> list[Timed]:
        """One pipeline of each depth and size."""
        return [
            (
                self.setting.gathering(one_f_one_b(Shape(1, depth, grid.micro_batches), optimizer="barrier")),
                self._profile(depth, size),
            )
            for depth, size in kinds
        ]

    # ---- what moves

    def _held(self, state: ElasWaveRunning) -> dict[int, range]:
        """The layers of each slot that runs."""
        held: dict[int, range] = {}
        for row in state.members:
            if self._fits(len(row), state.grid):
                split: Split = self.setting.cut(len(row))
                ends = pairwise([0, *accumulate(split)])
                held |= {slot: range(a, b) for slot, (a, b) in zip(row, ends, strict=True)}
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
