"""PipelineGrids: pipelines of equal depth with nobody dead, under a known schedule family; what most systems run.

A grid of D pipelines of P ranks shares the job's global batch: some pipelines run ceil(N / D) micro-batches, the
others floor(N / D), and the period is that of the fuller ones. It is simulated on the layers' times with all stages
stepping together ("barrier"), as training frameworks do: 1F1B then takes (M + P - 1)(F + B) on even stages without
communication.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from math import ceil

from recycle.ir.families import FAMILIES
from recycle.ir.simulate import Timeline, simulate
from recycle.shape import Shape
from recycle.systems.setting import Setting
from recycle.systems.system import DoesNotFit, Timed


@dataclass(frozen=True)
class PipelineGrid:
    """Fault-free pipelines of one depth.

    Attributes:
        pipelines, ranks: D and P.
        micro_batches: of the pipelines that have most.
        period: seconds per iteration.
        needed, cap: bytes on the worker that exceeds its memory most, or comes closest to it, and what it may hold.
        rank: of that worker.
    """

    pipelines: int
    ranks: int
    micro_batches: int
    period: float
    needed: float
    cap: float
    rank: int

    @property
    def fits(self) -> bool:
        return self.needed - self.cap <= 1e-9 * self.cap

    @property
    def slots(self) -> int:
        return self.pipelines * self.ranks

    def misfit(self) -> DoesNotFit:
        """That it does not fit, in words."""
        return DoesNotFit(
            needed=self.needed,
            cap=self.cap,
            reason=f"rank {self.rank} of {self.ranks} holds {self.needed:.6g} bytes and may hold {self.cap:.6g}",
        )


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

    def _grid(self, pipelines: int, ranks: int) -> PipelineGrid:
        """The grid of D pipelines of P ranks."""
        setting = self.setting
        most = ceil(setting.micro_batches / pipelines)
        timeline = self._timeline(ranks, most, pipelines)
        caps = [setting.cap(rank, ranks) for rank in range(ranks)]
        held = [0.0 if peak is None else peak for peak in timeline.peak_bytes]
        rank = max(range(ranks), key=lambda r: (held[r] - caps[r], held[r]))
        return PipelineGrid(pipelines, ranks, most, timeline.period, held[rank], caps[rank], rank)

    def _simulated(self, ranks: int, micro_batches: int, pipelines: int) -> Timeline:
        schedule = FAMILIES[self.family](Shape(1, ranks, micro_batches), optimizer="barrier")
        return simulate(self.setting.gathering(schedule), self.setting.profile(self.setting.cut(ranks), pipelines))

    def _best(self, slots: int) -> PipelineGrid | None:
        """The fastest grid that fits on so many slots; None where none does."""
        depths = sorted(self._depths(slots), key=lambda ranks: self._estimate(slots, ranks))
        best: PipelineGrid | None = None
        for ranks in depths:
            if best is not None and self._estimate(slots, ranks) >= best.period:
                break
            grid = self.grid(slots // ranks, ranks)
            if grid.fits and (best is None or grid.period < best.period):
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

    def leanest(self, slots: int) -> PipelineGrid:
        """The grid that needs least memory beyond what there is; for the words of a misfit. `slots` hold one."""
        least = min(self.setting.least_ranks, len(self.setting.layers), slots)
        return min(
            (self.grid(1, ranks) for ranks in self._depths(slots, least)), key=lambda grid: grid.needed - grid.cap
        )

    def _depths(self, slots: int, least: int | None = None) -> range:
        return range(least or self.setting.least_ranks, min(slots, len(self.setting.layers)) + 1)

    def schedules(self, grid: PipelineGrid) -> list[Timed]:
        """One pipeline of each load that occurs."""
        profile = self.setting.profile(self.setting.cut(grid.ranks), grid.pipelines)
        loads = sorted({grid.micro_batches, self.setting.micro_batches // grid.pipelines} - {0}, reverse=True)
        return [
            (self.setting.gathering(FAMILIES[self.family](Shape(1, grid.ranks, load), optimizer="barrier")), profile)
            for load in loads
        ]
