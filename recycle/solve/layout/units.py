"""Units: what the smallest parts of the model that can move cost, and how many of them a worker may hold."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from recycle.cut import profile_of_cut, units_of
from recycle.errors import PlanError
from recycle.job import PricedJob
from recycle.solve.problem import TOLERANCE, Floats


@dataclass(frozen=True)
class Units:
    """The units of a job's model, first to last.

    Attributes:
        whole: units of each fault-free stage, by rank.
        seconds: [units], F + I + W of one micro-batch.
        update_seconds: [units], reduce and optimizer step.
        static: [units], bytes of parameters, gradients and optimizer state; 1 each where the profile knows none.
        has_bytes: whether `static` are bytes.
        most_static: what a worker may hold of `static`: `[memory] state_limit` times the largest fault-free stage.
    """

    whole: tuple[int, ...]
    seconds: Floats
    update_seconds: Floats
    static: Floats
    has_bytes: bool
    most_static: float

    @classmethod
    def of(cls, job: PricedJob) -> Units:
        """Of a job. Raises PlanError where it has several chunks per worker, JobError where layers do not divide."""
        shape = job.shape
        if shape.chunks > 1:
            raise PlanError(
                f'[planner] layout: "elastic" layouts are planned for one chunk per worker, the job has {shape.chunks};'
                " set [shape] chunks = 1"
            )
        whole = units_of(job)
        single = profile_of_cut(job.prices, replace(shape, cut=(1,) * sum(whole)), whole)
        count = sum(whole)
        prices = {name: np.array(single.per_stage(name, count)) for name in (*_COMPUTE, "reduce", "step", "static")}
        static = prices["static"] if prices["static"].any() else np.ones(count)
        ends = np.cumsum(whole)
        heaviest = max(static[end - size : end].sum() for end, size in zip(ends, whole, strict=True))
        return cls(
            whole,
            sum((prices[name] for name in _COMPUTE), np.zeros(count)),
            prices["reduce"] + prices["step"],
            static,
            bool(prices["static"].any()),
            float(job.memory.state_limit * heaviest) * (1 + TOLERANCE),
        )

    def __len__(self) -> int:
        return len(self.seconds)

    def bound(self, micro_batches: int, speeds: list[float]) -> float:
        """A period that no layout of live workers can fall below: all work and updates, evenly on all of them.

        Args:
            micro_batches: of an iteration.
            speeds: factor on compute times of each live worker.
        """
        pace = sum(1 / speed for speed in speeds)
        work = micro_batches * float(self.seconds.sum())
        return max(work / pace, (work + float(self.update_seconds.sum()) * min(speeds)) / pace if speeds else 0.0)


_COMPUTE = ("forward", "backward_input", "backward_weight")
