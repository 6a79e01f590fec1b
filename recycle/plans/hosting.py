"""Hosting: the units of each stage of the model, and the units that each worker hosts.

A unit is the smallest part of the model that can move: unit 0 is the embedding, unit l + 1 is layer l, unit L + 1 the
head. A stage is a range of units, so a schedule determines the units of each worker.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from recycle.ir.schedule import Schedule, placement_of
from recycle.job.cut import units_of
from recycle.job.sections import Sections
from recycle.job.shape import Worker

UnitRange = tuple[int, int]
"""(first unit, end), end exclusive."""


@dataclass(frozen=True)
class Hosts:
    """The units and stages that each worker hosts, units as the fewest ranges, in order.

    `count` is the number of units of the model, `cut` the layers of each stage if they differ from the job's.
    """

    count: int
    units: Mapping[Worker, tuple[UnitRange, ...]]
    stages: Mapping[Worker, tuple[int, ...]]
    cut: tuple[int, ...] = ()

    @classmethod
    def of(cls, job: Sections, stages: Mapping[Worker, tuple[int, ...]], cut: tuple[int, ...] = ()) -> Hosts:
        """Build from the stages of each worker, for a job or another cut of its model. Raises JobError."""
        ranges = stage_units(layers_of(job, cut))
        units = {worker: joined(ranges[stage] for stage in hosted) for worker, hosted in stages.items()}
        return cls(ranges[-1][1], units, stages, cut)

    @classmethod
    def of_schedule(cls, job: Sections, schedule: Schedule) -> Hosts:
        """Build for the live workers of a schedule."""
        stages = {worker: tuple(sorted(schedule.stages_of(worker))) for worker in schedule.live}
        return cls.of(job, stages, schedule.shape.cut)

    @classmethod
    def at_start(cls, job: Sections, schedule: Schedule | None) -> Hosts:
        """Build for the processes at the start of a run, from the run's own schedule if it has one.

        A worker without stages hosts the stages of its peers if all workers of each rank host the same, else none.
        """
        shape = job.shape
        if schedule is None:
            return cls.of(job, dict(zip(shape.workers(), placement_of(shape), strict=True)))
        stages = {worker: tuple(sorted(schedule.stages_of(worker))) for worker in schedule.live}
        if (by_rank := stages_by_rank(schedule)) is not None:
            stages |= {worker: by_rank[worker.rank] for worker in shape.workers() if worker.rank in by_rank}
        return cls.of(job, stages, schedule.shape.cut)

    def hosts_of_stages(self) -> dict[int, list[Worker]]:
        """Return the hosts of each stage, sorted."""
        hosts: dict[int, list[Worker]] = {}
        for worker in sorted(self.stages):
            for stage in self.stages[worker]:
                hosts.setdefault(stage, []).append(worker)
        return hosts


def is_same(hosts: Hosts, first: Hosts) -> bool:
    """Return whether each worker of `hosts` hosts the same stages of the same cut as in `first`."""
    return hosts.cut == first.cut and all(first.stages.get(worker) == stages for worker, stages in hosts.stages.items())


def layers_of(job: Sections, cut: Sequence[int] = ()) -> list[int]:
    """Return the layers of each stage of a job, or of a cut. Raises JobError as `units_of`."""
    return list(cut or units_of(job))


def stage_units(layers: Sequence[int]) -> list[UnitRange]:
    """Return the units of each stage, given the number of layers of each."""
    ends = [0, *(end + 1 for end in accumulate(layers))]
    ends[-1] += 1
    return [(begin or 1, end) if stage else (0, end) for stage, (begin, end) in enumerate(pairwise(ends))]


def layers_in(units: UnitRange, count: int) -> tuple[int, int]:
    """Convert a range of units, of `count` in the model, to a range of layers (first, end)."""
    begin, end = units
    return max(begin, 1) - 1, max(min(end, count - 1), 1) - 1


def unit_name(unit: int, count: int) -> str:
    """Return the name of a unit, of `count` in the model, such as "layer 3"."""
    return {0: "the embedding", count - 1: "the head"}.get(unit, f"layer {unit - 1}")


def joined(ranges: Iterable[UnitRange]) -> tuple[UnitRange, ...]:
    """Merge ranges into the fewest ranges, in order; drop empty ranges."""
    merged: list[UnitRange] = []
    for begin, end in sorted(each for each in ranges if each[0] < each[1]):
        if merged and begin <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        else:
            merged.append((begin, end))
    return tuple(merged)


def without(ranges: Sequence[UnitRange], others: Sequence[UnitRange]) -> tuple[UnitRange, ...]:
    """Return the units of `ranges` that are in none of `others`; both must be sorted."""
    remaining: list[UnitRange] = []
    for begin, end in ranges:
        for first, last in others:
            if first < end and begin < last:
                remaining.append((begin, first))
                begin = max(begin, last)
        remaining.append((begin, end))
    return joined(remaining)


def stages_by_rank(schedule: Schedule) -> dict[int, tuple[int, ...]] | None:
    """Return the stages of each rank; None if live workers of a rank differ or the model is repartitioned."""
    if schedule.shape.cut:
        return None
    by_rank: dict[int, tuple[int, ...]] = {}
    for worker in schedule.live:
        stages = tuple(sorted(schedule.stages_of(worker)))
        if by_rank.setdefault(worker.rank, stages) != stages:
            return None
    return by_rank
