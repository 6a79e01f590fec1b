"""Hosting: which units of the model a stage is made of, and which units each worker of a schedule hosts.

A unit is the smallest part of the model that can move: the embedding, a layer, the head. They are numbered along the
model: 0 is the embedding, l + 1 is layer l, L + 1 the head. A stage is a range of them, so whoever knows a schedule
knows what each of its workers needs to hold, however the schedule cuts the model; nobody derives it in another way.

Limits: the embedding goes with the first stage and the head with the last.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from recycle.ir.schedule import Schedule, loop_placement
from recycle.job.cut import units_of
from recycle.job.sections import Sections
from recycle.job.shape import Worker

UnitRange = tuple[int, int]
"""Units from the first up to but without the last."""


@dataclass(frozen=True)
class Hosts:
    """Who hosts what.

    Attributes:
        count: of the model's units.
        units: of each worker, in as few ranges as can be, in order.
        stages: of each worker.
        cut: layers of each of these stages, where the model is not cut as the job says (`Shape.cut`).
    """

    count: int
    units: Mapping[Worker, tuple[UnitRange, ...]]
    stages: Mapping[Worker, tuple[int, ...]]
    cut: tuple[int, ...] = ()

    @classmethod
    def of(cls, job: Sections, stages: Mapping[Worker, tuple[int, ...]], cut: tuple[int, ...] = ()) -> Hosts:
        """Of workers that host these stages of a job, or of a cut of its model. Raises JobError as `layers_of`."""
        ranges = stage_units(layers_of(job, cut))
        units = {worker: joined(ranges[stage] for stage in mine) for worker, mine in stages.items()}
        return cls(ranges[-1][1], units, stages, cut)

    @classmethod
    def of_schedule(cls, job: Sections, schedule: Schedule) -> Hosts:
        """Of the live workers of a schedule."""
        stages = {worker: tuple(sorted(schedule.stages_of(worker))) for worker in schedule.live}
        return cls.of(job, stages, schedule.shape.cut)

    @classmethod
    def at_start(cls, job: Sections, schedule: Schedule | None) -> Hosts:
        """Of the processes that begin a run: what its own schedule gives them, if there is one.

        A worker that this leaves out hosts what its peers do where all workers of a rank host the same, and nothing
        where they do not: it then copies what the plan of its first generation gives it.
        """
        shape = job.shape
        if schedule is None:
            return cls.of(job, dict(zip(shape.workers(), loop_placement(shape), strict=True)))
        stages = {worker: tuple(sorted(schedule.stages_of(worker))) for worker in schedule.live}
        if (by_rank := stages_by_rank(schedule)) is not None:
            stages |= {worker: by_rank[worker.rank] for worker in shape.workers() if worker.rank in by_rank}
        return cls.of(job, stages, schedule.shape.cut)

    def hosts_of_stages(self) -> dict[int, list[Worker]]:
        """Of each stage who hosts it, in order."""
        found: dict[int, list[Worker]] = {}
        for worker in sorted(self.stages):
            for stage in self.stages[worker]:
                found.setdefault(stage, []).append(worker)
        return found


def is_same(hosts: Hosts, first: Hosts) -> bool:
    """Whether each worker of `hosts` hosts what it does by `first`, in the same stages."""
    return hosts.cut == first.cut and all(first.stages.get(worker) == of for worker, of in hosts.stages.items())


def layers_of(job: Sections, cut: Sequence[int] = ()) -> list[int]:
    """Layers of each stage of a job, or of the stages of a cut. Raises JobError as `units_of`."""
    return list(cut or units_of(job))


def stage_units(layers: Sequence[int]) -> list[UnitRange]:
    """The units of each stage, given how many layers each has."""
    ends = [0, *(end + 1 for end in accumulate(layers))]
    ends[-1] += 1
    return [(begin or 1, end) if stage else (0, end) for stage, (begin, end) in enumerate(pairwise(ends))]


def layers_in(units: UnitRange, count: int) -> tuple[int, int]:
    """The layers of a range of units, from the first up to but without the last.

    Args:
        count: of all units.
    """
    begin, end = units
    return max(begin, 1) - 1, max(min(end, count - 1), 1) - 1


def unit_name(unit: int, count: int) -> str:
    """A unit in words.

    Args:
        count: of all units.
    """
    return {0: "the embedding", count - 1: "the head"}.get(unit, f"layer {unit - 1}")


def joined(ranges: Iterable[UnitRange]) -> tuple[UnitRange, ...]:
    """The same units in as few ranges as can be, in order; empty ranges are left out."""
    found: list[UnitRange] = []
    for begin, end in sorted(each for each in ranges if each[0] < each[1]):
        if found and begin <= found[-1][1]:
            found[-1] = found[-1][0], max(end, found[-1][1])
        else:
            found.append((begin, end))
    return tuple(found)


def without(ranges: Sequence[UnitRange], others: Sequence[UnitRange]) -> tuple[UnitRange, ...]:
    """The units of `ranges` that are in none of `others`, both in order."""
    left: list[UnitRange] = []
    for begin, end in ranges:
        for first, last in others:
            if first < end and begin < last:
                left.append((begin, first))
                begin = max(begin, last)
        left.append((begin, end))
    return joined(left)


def stages_by_rank(schedule: Schedule) -> dict[int, tuple[int, ...]] | None:
    """Stages of each rank, whose live workers host the same; None where they do not, or the model is cut anew."""
    if schedule.shape.cut:
        return None
    found: dict[int, tuple[int, ...]] = {}
    for worker in schedule.live:
        stages = tuple(sorted(schedule.stages_of(worker)))
        if found.setdefault(worker.rank, stages) != stages:
            return None
    return found
