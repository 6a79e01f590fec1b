"""ElasWave as published: a pipeline that lost a worker is repartitioned, and micro-batches change size.

Source: ElasWave, arXiv 2510.00606. The model, with assumptions for open points of the paper:

    layers          repartitioned by a minimax program over the live workers of the affected pipeline only
    micro-batches   their number per pipeline stays; sizes change so that all pipelines end together
    schedule        the fastest 1F1B grid of all nodes, all stages stepping together
    state           snapshots of each step on a peer's host: a dead worker costs the iteration in progress. If all hosts
                    of a layer die, all workers restart from a checkpoint. ZeRO-1 if the job shards its optimizer
    pause           detection, planning and one second to edit communicators in place, as claimed; copies are hidden
    idle            a pipeline whose live workers cannot hold the model

Not modeled: higher clock frequencies for stragglers, and owners of shards once pipelines have different cuts.
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
from recycle.systems.scenario import Scenario, ranges
from recycle.systems.system import ActiveConfiguration, Change, DoesNotFit, Loss, Nodes, State, Stopped, TimedSchedule

COMMUNICATORS = 1.0
"""Seconds to edit communicators in place, as claimed."""
_SCALED = ("forward", "backward_input", "backward_weight", "activation", "message")
"""Prices proportional to the size of a micro-batch."""


@dataclass(frozen=True, kw_only=True)
class ElasWaveConfiguration(ActiveConfiguration):
    """Pipelines of different depths.

    Attributes:
        members: live slots of each pipeline of the fault-free grid, by rank.
    """

    grid: PipelineGrid
    members: tuple[tuple[int, ...], ...]


class ElasWave(CheckpointedSystem[ElasWaveConfiguration]):
    name = "elaswave"
    copies = 1
    counts_reads = True

    def __init__(self, scenario: Scenario) -> None:
        super().__init__(scenario)
        self._alone = cache(self._makespan)

    def begin(self, live: Nodes) -> State | DoesNotFit:
        grid = self.grids.fastest()
        if isinstance(grid, DoesNotFit):
            return grid
        alive = set(self.scenario.slots(live))
        rows = [range(k * grid.ranks, (k + 1) * grid.ranks) for k in range(grid.pipelines)]
        return self._configuration(live, grid, tuple(tuple(slot for slot in row if slot in alive) for row in rows))

    def survive(self, state: ElasWaveConfiguration, live: Nodes, failed: Nodes, joined: Nodes) -> Change | None:
        scenario, after = self.scenario, self.begin(live)
        if not isinstance(after, ElasWaveConfiguration) or self._lost(state, failed):
            return None
        if after.members == state.members:
            return Change(state=after, event="wait")
        pause = scenario.pause(detected=bool(failed))
        return Change(
            state=after,
            pause=dataclasses.replace(pause, rebuild=min(pause.rebuild, COMMUNICATORS)),
            loss=Loss.ITERATION if failed else Loss.NOTHING,
            bytes=self._copied(state, after),
            event="re-cut" if failed else "join",
        )

    # ---- configurations

    def _configuration(self, live: Nodes, grid: PipelineGrid, members: tuple[tuple[int, ...], ...]) -> State:
        scenario = self.scenario
        depths = [len(row) if self._fits(len(row), grid) else 0 for row in members]
        if not any(depths):
            return Stopped(live=live, reason="no pipeline has live workers that hold the model")
        kinds = sorted({kind for kind in zip(depths, self.sizes(grid, tuple(depths)), strict=True) if kind[0]})
        schedules = partial(self._schedules, kinds, grid)
        return ElasWaveConfiguration(
            live=live,
            period=max(simulate(*timed).period for timed in schedules()),
            samples=scenario.samples,
            idle=len(scenario.slots(live)) - sum(depths),
            checkpoints=scenario.checkpoints(len(live)),
            layout=" + ".join(f"{depths.count(depth)} x {depth}" for depth in sorted({*depths} - {0}, reverse=True)),
            schedules=schedules,
            grid=grid,
            members=members,
        )

    def sizes(self, grid: PipelineGrid, depths: tuple[int, ...]) -> list[float]:
        """Return the relative micro-batch size of each pipeline, in proportion to its rate; 0 for an idle pipeline."""
        pace = [1 / self._alone(depth, grid.micro_batches) if depth else 0.0 for depth in depths]
        total = self.scenario.micro_batches / grid.micro_batches
        return [total * each / sum(pace) if each else 0.0 for each in pace]

    def _makespan(self, depth: int, micro_batches: int) -> float:
        profile = dataclasses.replace(self._profile(depth, 1.0), reduce=0.0, step=0.0, gather=0.0)
        return simulate(one_f_one_b(Shape(1, depth, micro_batches)), profile).makespan

    def _profile(self, depth: int, size: float) -> Profile:
        profile = self.scenario.profile(self.scenario.cut(depth), self._hosts(depth))
        scaled: dict[str, Any] = {name: [each * size for each in profile.per_stage(name, depth)] for name in _SCALED}
        return dataclasses.replace(profile, **scaled)

    def _hosts(self, depth: int) -> int:
        return max(1, len(self.scenario.node_of) // depth)

    def _fits(self, depth: int, grid: PipelineGrid) -> bool:
        scenario = self.scenario
        if not max(1, scenario.least_ranks) <= depth <= len(scenario.layers):
            return False
        split, size = scenario.cut(depth), depth / grid.ranks
        return scenario.fullest_of_1f1b(split, grid.micro_batches, self._hosts(depth), size).fits

    def _schedules(self, kinds: list[tuple[int, float]], grid: PipelineGrid) -> list[TimedSchedule]:
        return [(self.grids.schedule(depth, grid.micro_batches), self._profile(depth, size)) for depth, size in kinds]

    # ---- copies

    def _held(self, state: ElasWaveConfiguration) -> dict[int, range]:
        held: dict[int, range] = {}
        for row in state.members:
            if self._fits(len(row), state.grid):
                places = ranges(self.scenario.cut(len(row)))
                held |= {slot: range(first, last) for slot, (first, last) in zip(row, places, strict=True)}
        return held

    def _lost(self, state: ElasWaveConfiguration, failed: Nodes) -> bool:
        gone = set(self.scenario.slots(failed))
        remaining = {layer for slot, layers in self._held(state).items() if slot not in gone for layer in layers}
        return len(remaining) < len(self.scenario.layers)

    def _copied(self, before: ElasWaveConfiguration, after: ElasWaveConfiguration) -> float:
        had = self._held(before)
        return sum(
            self.scenario.layers[layer].state
            for slot, layers in self._held(after).items()
            for layer in layers
            if layer not in had.get(slot, ())
        )
