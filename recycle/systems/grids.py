"""Common parts of systems: restarts from checkpoints, and grids.

CheckpointedSystem: adapts what survives of a configuration; if that is not possible, or training is stopped, all
processes restart from a checkpoint. A subclass defines `begin` and `survive`.

PipelineGrids: fault-free pipelines of equal depth under a known schedule family. A grid of D pipelines of P ranks
shares the job's global batch: some pipelines run ceil(N / D) micro-batches, the others floor(N / D); the former
determine the period. The simulation uses the layers' times, with all stages stepping together ("barrier") as in
training frameworks. 1F1B then takes (M + P - 1)(F + B) on even stages without communication.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from itertools import accumulate
from math import ceil, inf
from typing import ClassVar, Generic, TypeVar, cast

from recycle.ir.families import FAMILIES
from recycle.ir.schedule import Schedule
from recycle.ir.simulate import simulate
from recycle.job.layers import stage_sums
from recycle.job.shape import Shape
from recycle.systems.scenario import FATAL_SHARE, FullestWorker, Scenario
from recycle.systems.system import ActiveConfiguration, Change, DoesNotFit, Loss, Nodes, State, Stopped, TimedSchedule


@dataclass(frozen=True)
class PipelineGrid:
    """Fault-free pipelines of one depth.

    Attributes:
        pipelines, ranks: D and P.
        micro_batches: of the fullest pipelines.
        period: seconds per iteration.
        fullest: worker with the least free memory.
    """

    pipelines: int
    ranks: int
    micro_batches: int
    period: float
    fullest: FullestWorker

    @property
    def slots(self) -> int:
        return self.pipelines * self.ranks


@dataclass(frozen=True, kw_only=True)
class GridConfiguration(ActiveConfiguration):
    """Some or all pipelines of a grid; `used` is the slot of each position, pipeline by pipeline."""

    grid: PipelineGrid
    used: tuple[int, ...]


class PipelineGrids:
    """All grids of a scenario under a family of `FAMILIES` with one chunk per rank; caches periods.

    Args:
        fatal_share: share of failures that need a checkpoint.
    """

    def __init__(self, scenario: Scenario, family: str = "1f1b", fatal_share: float = FATAL_SHARE) -> None:
        self.scenario, self.family, self.fatal_share = scenario, family, fatal_share
        self.grid = cache(self._grid)
        self.best = cache(self._best)

    def schedule(self, ranks: int, micro_batches: int) -> Schedule:
        schedule = FAMILIES[self.family](Shape(1, ranks, micro_batches), optimizer="barrier")
        return replace(schedule, gathers=True) if self.scenario.copies else schedule  # stepped shards are gathered

    def _grid(self, pipelines: int, ranks: int) -> PipelineGrid:
        most = ceil(self.scenario.micro_batches / pipelines)
        profile = self.scenario.profile(self.scenario.cut(ranks), pipelines)
        timeline = simulate(self.schedule(ranks, most), profile)
        held = [0.0 if peak is None else peak for peak in timeline.peak_bytes]
        return PipelineGrid(pipelines, ranks, most, timeline.period, self.scenario.fullest(held))

    def _best(self, slots: int) -> PipelineGrid | None:
        best, shortest = None, inf
        for estimate, ranks in sorted((self._estimate(slots, ranks), ranks) for ranks in self._depths(slots)):
            if estimate >= shortest:
                break
            grid = self.grid(slots // ranks, ranks)
            if grid.fullest.fits and grid.period < shortest:
                best, shortest = grid, grid.period
        return best

    def _estimate(self, slots: int, ranks: int) -> float:
        stages = self.scenario.seconds_per_stage(ranks)
        forward_seconds = stage_sums(self.scenario.stages(self.scenario.cut(ranks)), "forward")
        most = ceil(self.scenario.micro_batches / (slots // ranks))
        starts = accumulate(stages if self.family == "1f1b" else forward_seconds, initial=0.0)
        return max(start + most * seconds for start, seconds in zip(starts, stages, strict=False))

    def fastest(self) -> PipelineGrid | DoesNotFit:
        slots = len(self.scenario.node_of)
        return self.best(slots) or self.does_not_fit(slots)

    def does_not_fit(self, slots: int) -> DoesNotFit:
        """Describe why no grid fits on `slots` slots, by the grid that exceeds memory least."""
        least = min(self.scenario.least_ranks, len(self.scenario.layers), slots)
        leanest = min((self.grid(1, ranks) for ranks in self._depths(slots, least)), key=lambda g: g.fullest.excess)
        _, needed, rank, cap = leanest.fullest
        held = f"rank {rank} of {leanest.ranks} holds {needed:.6g} bytes and may hold {cap:.6g}"
        return leanest.fullest.does_not_fit(held)

    def _depths(self, slots: int, least: int | None = None) -> range:
        return range(least or self.scenario.least_ranks, min(slots, len(self.scenario.layers)) + 1)

    def configuration(
        self, live: Nodes, grid: PipelineGrid, used: tuple[int, ...], reconsider: bool = False
    ) -> GridConfiguration:
        """Return pipelines of a grid on these slots, each with its micro-batches of the whole grid."""
        scenario, pipelines = self.scenario, len(used) // grid.ranks
        samples = scenario.samples * pipelines / grid.pipelines
        return GridConfiguration(
            live=live,
            period=grid.period,
            samples=samples,
            dropped=scenario.samples - samples,
            idle=len(scenario.slots(live)) - len(used),
            checkpoints=scenario.checkpoints(len(live), self.fatal_share),
            reconsider=reconsider,
            layout=f"{pipelines} x {grid.ranks}",
            schedules=partial(self.schedules, grid),
            grid=grid,
            used=used,
        )

    def schedules(self, grid: PipelineGrid) -> list[TimedSchedule]:
        profile = self.scenario.profile(self.scenario.cut(grid.ranks), grid.pipelines)
        loads = sorted({grid.micro_batches, self.scenario.micro_batches // grid.pipelines} - {0}, reverse=True)
        return [(self.schedule(grid.ranks, load), profile) for load in loads]


R = TypeVar("R", bound=ActiveConfiguration)


class CheckpointedSystem(ABC, Generic[R]):
    """Implements `recycle.systems.system.System` with restarts from checkpoints.

    Attributes:
        copies: hosts of each part of a sharded optimizer's state: 0 for all of it on every host, None for the job's.
        counts_reads: `Change.bytes` includes the reads of a restart.
        fatal_share: share of failures that need a checkpoint.
    """

    name: ClassVar[str]
    copies: ClassVar[int | None] = 0
    counts_reads: ClassVar[bool] = False
    fatal_share = FATAL_SHARE

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario if self.copies is None else scenario.with_copies(self.copies)

    @abstractmethod
    def begin(self, live: Nodes) -> State | DoesNotFit:
        """See `System.begin`."""

    @abstractmethod
    def survive(self, state: R, live: Nodes, failed: Nodes, joined: Nodes) -> Change | None:
        """See `System.change`; `live` are the nodes after the change. None if a checkpoint is needed."""

    def change(self, state: State, failed: Nodes, joined: Nodes) -> Change:
        live = state.live - failed | joined
        survived = None if isinstance(state, Stopped) else self.survive(cast("R", state), live, failed, joined)
        return survived or self.restart(live, failed)

    def pace(self, state: R, slow: Mapping[int, float]) -> float:
        """Return the factor of the period with slow nodes, given with theirs: here all workers wait for the slowest."""
        return max(slow.values())

    def unnoticed(self, state: R) -> float:
        """Return the seconds of training to undo after silent corruption.

        0 if nothing compares results: all workers then read a checkpoint that is older than `[pauses] notice`.
        """
        return 0.0

    def restart(self, live: Nodes, failed: Nodes, event: str = "") -> Change:
        state = self.begin(live)
        if isinstance(state, DoesNotFit):
            state = state.stopped(live)
        is_running = isinstance(state, ActiveConfiguration)
        return Change(
            state=state,
            pause=self.scenario.restart(detected=bool(failed)),
            loss=Loss.CHECKPOINT,
            bytes=self.scenario.state if is_running and self.counts_reads else 0.0,
            event=event or ("restart" if is_running else "stop"),
        )

    @property
    def setting(self) -> Scenario:
        """Former name of `scenario`."""
        return self.scenario

    @cached_property
    def grids(self) -> PipelineGrids:
        return PipelineGrids(self.scenario, fatal_share=self.fatal_share)
