"""What the systems here have in common: restarts from checkpoints, and grids, which most of them run.

CheckpointedSystem: a change is met with what survives of the configuration; where too little does, or nothing runs, all
processes start again from a checkpoint. A subclass says what it runs on live nodes (`begin`) and how it goes on
(`survive`).

PipelineGrids: pipelines of equal depth with nobody dead, under a known schedule family.

A grid of D pipelines of P ranks shares the job's global batch: some pipelines run ceil(N / D) micro-batches, the
others floor(N / D), and the period is that of the fuller ones. It is simulated on the layers' times with all stages
stepping together ("barrier"), as training frameworks do: 1F1B then takes (M + P - 1)(F + B) on even stages without
communication.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cache, cached_property, partial
from itertools import accumulate
from math import ceil
from typing import ClassVar, Generic, TypeVar, cast

from recycle.ir.families import FAMILIES
from recycle.ir.schedule import Schedule
from recycle.ir.simulate import Timeline, simulate
from recycle.job.shape import Shape
from recycle.systems.setting import FATAL_SHARE, Fullest, Setting
from recycle.systems.system import Change, DoesNotFit, Loss, Nodes, Running, State, Stopped, Timed


@dataclass(frozen=True)
class PipelineGrid:
    """Fault-free pipelines of one depth.

    Attributes:
        pipelines, ranks: D and P.
        micro_batches: of the pipelines that have most.
        period: seconds per iteration.
        fullest: worker.
    """

    pipelines: int
    ranks: int
    micro_batches: int
    period: float
    fullest: Fullest

    @property
    def slots(self) -> int:
        return self.pipelines * self.ranks


@dataclass(frozen=True, kw_only=True)
class GridRunning(Running):
    """Pipelines of a grid, all or some.

    Attributes:
        used: the slot of each position, pipeline by pipeline. All other slots are idle.
    """

    grid: PipelineGrid
    used: tuple[int, ...]


class PipelineGrids:
    """All grids of a setting under one family; periods are kept.

    Args:
        family: a name of `FAMILIES` with one chunk per rank.
    """

    def __init__(self, setting: Setting, family: str = "1f1b") -> None:
        self.setting = setting
        self.family = family
        self.grid = cache(self._grid)
        self.best = cache(self._best)
        self._timeline = cache(self._simulated)

    def schedule(self, ranks: int, micro_batches: int) -> Schedule:
        """One pipeline, whose stages step together."""
        return self.setting.gathering(FAMILIES[self.family](Shape(1, ranks, micro_batches), optimizer="barrier"))

    def _grid(self, pipelines: int, ranks: int) -> PipelineGrid:
        """The grid of D pipelines of P ranks."""
        most = ceil(self.setting.micro_batches / pipelines)
        timeline = self._timeline(ranks, most, pipelines)
        held = [0.0 if peak is None else peak for peak in timeline.peak_bytes]
        return PipelineGrid(pipelines, ranks, most, timeline.period, self.setting.fullest(held))

    def _simulated(self, ranks: int, micro_batches: int, pipelines: int) -> Timeline:
        profile = self.setting.profile(self.setting.cut(ranks), pipelines)
        return simulate(self.schedule(ranks, micro_batches), profile)

    def _best(self, slots: int) -> PipelineGrid | None:
        """The fastest grid that fits on so many slots; None where none does."""
        depths = sorted(self._depths(slots), key=lambda ranks: self._estimate(slots, ranks))
        best: PipelineGrid | None = None
        for ranks in depths:
            if best is not None and self._estimate(slots, ranks) >= best.period:
                break
            grid = self.grid(slots // ranks, ranks)
            if grid.fullest.fits and (best is None or grid.period < best.period):
                best = grid
        return best

    def _estimate(self, slots: int, ranks: int) -> float:
        """A lower bound of a grid's period: all work of a stage, and one micro-batch's way through the stages before it
        and back; where the backward pass is split there may be work beside its way back."""
        stages = self.setting.seconds_per_stage(ranks)
        there = [sum(layer.forward for layer in stage) for stage in self.setting.stages(self.setting.cut(ranks))]
        most = ceil(self.setting.micro_batches / (slots // ranks))
        ways = accumulate(stages if self.family == "1f1b" else there, initial=0.0)
        return max(before + most * own for before, own in zip(ways, stages, strict=False))

    def whole(self) -> PipelineGrid | DoesNotFit:
        """The fastest grid on all slots."""
        slots = len(self.setting.node_of)
        return self.best(slots) or self.misfit(slots)

    def misfit(self, slots: int) -> DoesNotFit:
        """That no grid fits on so many slots, by the one that needs least memory beyond what there is."""
        least = min(self.setting.least_ranks, len(self.setting.layers), slots)
        leanest = min((self.grid(1, ranks) for ranks in self._depths(slots, least)), key=lambda g: g.fullest.excess)
        _, needed, rank, cap = leanest.fullest
        held = f"rank {rank} of {leanest.ranks} holds {needed:.6g} bytes and may hold {cap:.6g}"
        return leanest.fullest.misfit(held)

    def _depths(self, slots: int, least: int | None = None) -> range:
        return range(least or self.setting.least_ranks, min(slots, len(self.setting.layers)) + 1)

    def running(
        self,
        live: Nodes,
        grid: PipelineGrid,
        used: tuple[int, ...],
        fatal_share: float = FATAL_SHARE,
        reconsider: bool = False,
    ) -> GridRunning:
        """Pipelines of a grid on these slots, each with the micro-batches that it has where the grid is whole."""
        setting, pipelines = self.setting, len(used) // grid.ranks
        samples = setting.samples * pipelines / grid.pipelines
        return GridRunning(
            live=live,
            period=grid.period,
            samples=samples,
            dropped=setting.samples - samples,
            idle=len(setting.slots(live)) - len(used),
            checkpoints=setting.checkpoints(len(live), fatal_share),
            reconsider=reconsider,
            layout=f"{pipelines} x {grid.ranks}",
            schedules=partial(self.schedules, grid),
            grid=grid,
            used=used,
        )

    def schedules(self, grid: PipelineGrid) -> list[Timed]:
        """One pipeline of each load that occurs."""
        profile = self.setting.profile(self.setting.cut(grid.ranks), grid.pipelines)
        loads = sorted({grid.micro_batches, self.setting.micro_batches // grid.pipelines} - {0}, reverse=True)
        return [(self.schedule(grid.ranks, load), profile) for load in loads]


R = TypeVar("R", bound=Running)


class CheckpointedSystem(ABC, Generic[R]):
    """Implements `recycle.systems.system.System`.

    Attributes:
        copies: hosts of each part of the optimizer's state, where the job shards it: 0 for all of it on every host,
            None for as many as the job says.
        counts_reads: whether `Change.bytes` has what a restart reads.
    """

    name: ClassVar[str]
    copies: ClassVar[int | None] = 0
    counts_reads: ClassVar[bool] = False

    def __init__(self, setting: Setting) -> None:
        self.setting = setting if self.copies is None else setting.with_copies(self.copies)

    @abstractmethod
    def begin(self, live: Nodes) -> State | DoesNotFit:
        """See `System.begin`."""

    @abstractmethod
    def survive(self, state: R, live: Nodes, failed: Nodes, joined: Nodes) -> Change | None:
        """See `System.change`; `live` are the nodes after it. None where a checkpoint is needed."""

    def change(self, state: State, failed: Nodes, joined: Nodes) -> Change:
        live = state.live - failed | joined
        survived = None if isinstance(state, Stopped) else self.survive(cast("R", state), live, failed, joined)
        return survived or self.restart(live, failed)

    def restart(self, live: Nodes, failed: Nodes, event: str = "") -> Change:
        """Everybody starts again from the last checkpoint."""
        state = self.begin(live)
        if isinstance(state, DoesNotFit):
            state = state.stopped(live)
        is_running = isinstance(state, Running)
        return Change(
            state=state,
            pause=self.setting.restart(detected=bool(failed)),
            loss=Loss.CHECKPOINT,
            bytes=self.setting.state if is_running and self.counts_reads else 0.0,
            event=event or ("restart" if is_running else "stop"),
        )

    @cached_property
    def grids(self) -> PipelineGrids:
        return PipelineGrids(self.setting)
