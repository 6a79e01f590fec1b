"""Units: what the smallest parts of the model that can move cost, and how many of them a worker may hold."""

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
"""The units of a worker: ranges in order, with units between them."""


def ranges_of(cut: Sequence[int]) -> list[UnitRange]:
    """The units of each part, given how many each has."""
    return list(pairwise([0, *accumulate(cut)]))


def count_of(parts: Parts) -> int:
    """How many units they are."""
    return sum(end - begin for begin, end in parts)


def common(some: Parts, others: Parts) -> int:
    """How many units are in both."""
    return sum(max(0, min(b, d) - max(a, c)) for a, b in some for c, d in others)


@dataclass(frozen=True, eq=False)
class Units:
    """The units of a job's model, first to last.

    Attributes:
        whole: units of each fault-free stage.
        prices: [units] each, what a unit costs alone, by the names of `Profile`; what is left out is 0.
        has_bytes: whether "static" is bytes of parameters, gradients and optimizer state; else 1 for each unit.
        most_static: what a worker may hold of it: `[memory] state_limit` times what the heaviest fault-free one holds.
        chunks: fault-free stages of each worker: rank r has the stages r, r + P, ...
        held: what workers have by now, of those that may have something else than fault-free ones.
    """

    whole: tuple[int, ...]
    prices: Mapping[str, Floats]
    has_bytes: bool
    most_static: float
    chunks: int = 1
    held: Mapping[Worker, Parts] = field(default_factory=dict)

    @classmethod
    def of(cls, job: PricedJob, within: Schedule | None = None) -> Units:
        """Of a job. Raises JobError where layers do not divide.

        Args:
            within: its live workers have what they host by it, where it cuts the model (`Shape.cut`).
        """
        shape, whole = job.shape, units_of(job)
        held = {worker: within.unit_runs(worker) for worker in within.live} if within and within.shape.cut else {}
        count = sum(whole)
        single = profile_of_layout(job, job.prices, replace(shape, cut=(1,) * count))
        prices = {name: np.array(single.per_stage(name, count)) for name in _PRICES}
        has_bytes = bool(prices["static"].any())
        static = prices["static"] if has_bytes else np.ones(count)
        made = cls(whole, prices | {"static": static}, has_bytes, 0.0, shape.chunks, held)
        heaviest = max(made.static_of(parts) for parts in made.given)
        return replace(made, most_static=float(job.memory.state_limit * heaviest) * (1 + TOLERANCE))

    def __len__(self) -> int:
        return sum(self.whole)

    @cached_property
    def given(self) -> tuple[Parts, ...]:
        """The units of each rank's fault-free workers."""
        ranges, ranks = ranges_of(self.whole), len(self.whole) // self.chunks
        return tuple(joined(ranges[rank::ranks]) for rank in range(ranks))

    def held_before(self, worker: Worker) -> Parts:
        """The units that a worker has before anything is copied."""
        return self.held.get(worker, self.given[worker.rank])

    def static_of(self, parts: Parts) -> float:
        """`static` of all of a worker's units."""
        return float(sum(self.static[begin:end].sum() for begin, end in parts))

    def price(self, name: str) -> Floats:
        """[units], what each costs alone."""
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
        """[units], bytes of parameters, gradients and optimizer state; 1 each where the profile knows none."""
        return self.prices["static"]

    def in_blocks(self, most: int, others: Iterable[int] = ()) -> tuple[Units, list[int]]:
        """(the model in blocks of neighbouring units, where each block begins and the last ends).

        Every fault-free stage has as many blocks as keep their number within `most`, at least one, as even as can be.

        Args:
            others: further units before which a block ends.
        """
        each, found = max(1, most // len(self.whole)), {0, *others}
        for begin, end in ranges_of(self.whole):
            count = min(each, end - begin)
            found |= {begin + (end - begin) * (i + 1) // count for i in range(count)}
        ends = sorted(found)
        prices = {name: np.add.reduceat(price, ends[:-1]) for name, price in self.prices.items()}
        whole = tuple(sum(begin <= at < end for at in ends) for begin, end in ranges_of(self.whole))
        return replace(self, whole=whole, prices=prices, held={}), ends

    def bound(self, micro_batches: int, speeds: list[float]) -> float:
        """A period that no layout of live workers can fall below.

        The larger of all work and updates spread evenly over all of them, and the way of one micro-batch: its F and I
        through all units on the fastest worker, and the W and update of the first unit. Where all units take the same
        on all workers, whole micro-batches of whole units are assigned to them.

        Args:
            micro_batches: of an iteration.
            speeds: factor on compute times of each live worker.
        """
        if not speeds:
            return 0.0
        pace, fastest = sum(1 / speed for speed in speeds), min(speeds)
        work = micro_batches * float(self.seconds.sum())
        bounds = [work / pace, (work + float(self.update_seconds.sum()) * fastest) / pace]
        way = float((self.price("forward") + self.price("backward_input")).sum()) * fastest
        bounds.append(way + float(self.price("backward_weight")[0]) * fastest + float(self.update_seconds[0]))
        if np.ptp(self.seconds) <= TOLERANCE * self.seconds.max() and fastest == max(speeds):
            each = micro_batches * len(self) / len(speeds)
            bounds.append(ceil(each - 1e-6) * float(self.seconds.min()) * fastest)
        return max(bounds)


_PRICES = (
    *("forward", "backward_input", "backward_weight", "reduce", "step"),
    *("static", "message", "activation", "workspace"),
)
