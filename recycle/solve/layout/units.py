"""Units: costs of the smallest movable parts of the model, and how many a worker may hold."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate, pairwise
from math import ceil

import numpy as np

from recycle.ir.schedule import Schedule
from recycle.job import PricedJob
from recycle.job.cut import units_of
from recycle.job.pricing import profile_of_layout
from recycle.job.shape import Worker
from recycle.plans.hosting import UnitRange, joined
from recycle.solve.problem import TOLERANCE
from recycle.solve.problem_arrays import Floats

Parts = tuple[UnitRange, ...]
"""Units of a worker: disjoint ranges in order."""


def ranges_from_cut(cut: Sequence[int]) -> list[UnitRange]:
    """Return the range of each part, given the number of units per part."""
    return list(pairwise([0, *accumulate(cut)]))


def count_units(parts: Parts) -> int:
    return sum(end - begin for begin, end in parts)


def count_shared(some: Parts, others: Parts) -> int:
    """Return the number of units in both."""
    return sum(max(0, min(b, d) - max(a, c)) for a, b in some for c, d in others)


@dataclass(frozen=True, eq=False)
class Units:
    """The units of a job's model, first to last.

    Attributes:
        cut: units of each fault-free stage.
        prices: [units] each, costs of a unit by the names of `Profile`; missing names cost 0.
        has_bytes: "static" is bytes of parameters, gradients and optimizer state; otherwise 1 for each unit.
        most_static: limit of `static` per worker: `[memory] state_limit` times that of the largest fault-free worker.
        chunks: fault-free stages of each worker.
        held: present units of workers that may differ from the fault-free layout.
    """

    cut: tuple[int, ...]
    prices: Mapping[str, Floats]
    has_bytes: bool
    most_static: float
    chunks: int = 1
    held: Mapping[Worker, Parts] = field(default_factory=dict)

    @classmethod
    def from_job(cls, job: PricedJob, within: Schedule | None = None) -> Units:
        """Create the units of a job in a layout (`Shape.cut`). Raises JobError if the layers do not divide."""
        shape, whole = job.shape, units_of(job)
        held = {worker: within.unit_runs(worker) for worker in within.live} if within and within.shape.cut else {}
        count = sum(whole)
        single = profile_of_layout(job, job.prices, replace(shape, cut=(1,) * count))
        prices = {name: np.array(single.per_stage(name, count)) for name in _PRICES}
        has_bytes = bool(prices["static"].any())
        static = prices["static"] if has_bytes else np.ones(count)
        units = cls(whole, prices | {"static": static}, has_bytes, 0.0, shape.chunks, held)
        heaviest = max(units.static_of(parts) for parts in units.fault_free)
        return replace(units, most_static=float(job.memory.state_limit * heaviest) * (1 + TOLERANCE))

    def __len__(self) -> int:
        return sum(self.cut)

    @cached_property
    def fault_free(self) -> tuple[Parts, ...]:
        """Units of each rank in the fault-free layout."""
        ranges, ranks = ranges_from_cut(self.cut), len(self.cut) // self.chunks
        return tuple(joined(ranges[rank::ranks]) for rank in range(ranks))

    def present_parts(self, worker: Worker) -> Parts:
        """Return the units that a worker has before any copies."""
        return self.held.get(worker, self.fault_free[worker.rank])

    def static_of(self, parts: Parts) -> float:
        return float(sum(self.static[begin:end].sum() for begin, end in parts))

    def price(self, name: str) -> Floats:
        """Return [units], a cost of each unit."""
        return self.prices.get(name, np.zeros(len(self)))

    @cached_property
    def seconds(self) -> Floats:
        """[units], F + I + W of one micro-batch."""
        return self.price("forward") + self.price("backward_input") + self.price("backward_weight")

    @cached_property
    def update_seconds(self) -> Floats:
        """[units], reduce and optimizer step."""
        return self.price("reduce") + self.price("step")

    @property
    def static(self) -> Floats:
        """[units], bytes of parameters, gradients and optimizer state; 1 each if the profile has no bytes."""
        return self.prices["static"]

    def in_blocks(self, most: int, others: Iterable[int] = ()) -> tuple[Units, list[int]]:
        """Return (the model in at most `most` blocks of neighboring units, offset of each block and of the end).

        Fault-free stages have equally many blocks, at least one. Blocks also end before the units in `others`.
        """
        each, cut_points = max(1, most // len(self.cut)), {0, *others}
        for begin, end in ranges_from_cut(self.cut):
            count = min(each, end - begin)
            cut_points |= {begin + (end - begin) * (i + 1) // count for i in range(count)}
        ends = sorted(cut_points)
        prices = {name: np.add.reduceat(price, ends[:-1]) for name, price in self.prices.items()}
        cut = tuple(sum(begin <= at < end for at in ends) for begin, end in ranges_from_cut(self.cut))
        return replace(self, cut=cut, prices=prices, held={}), ends

    def bound(self, micro_batches: int, speeds: list[float]) -> float:
        """Return a lower bound on the period of any layout of live workers with these speed factors.

        This is the larger of two terms: all work and updates spread evenly over all workers, and the path of one
        micro-batch. The path has F and I of all units on the fastest worker, and W and update of the first unit.
        """
        if not speeds:
            return 0.0
        pace, fastest = sum(1 / speed for speed in speeds), min(speeds)
        work = micro_batches * float(self.seconds.sum())
        bounds = [work / pace, (work + float(self.update_seconds.sum()) * fastest) / pace]
        path = float((self.price("forward") + self.price("backward_input")).sum()) * fastest
        bounds.append(path + float(self.price("backward_weight")[0]) * fastest + float(self.update_seconds[0]))
        if np.ptp(self.seconds) <= TOLERANCE * self.seconds.max() and fastest == max(speeds):
            each = micro_batches * len(self) / len(speeds)
            bounds.append(ceil(each - 1e-6) * float(self.seconds.min()) * fastest)
        return max(bounds)


_PRICES = (
    *("forward", "backward_input", "backward_weight", "reduce", "step"),
    *("static", "message", "activation", "workspace"),
)
