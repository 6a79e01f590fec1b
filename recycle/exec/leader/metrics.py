"""Builds the metrics line of a committed step, and holds the workers' compute times of an iteration as columns."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import attrgetter
from typing import Any

import numpy as np
import numpy.typing as npt

from recycle.exec.protocol import Commit, GenerationRecord, Report
from recycle.job import PricedJob
from recycle.job.shape import Worker

MOST_LISTED = 256
"""Most workers whose times are listed one by one; beyond, only the workers furthest from their peers are listed."""
Integers = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Groups:
    """Values in groups.

    Attributes:
        keys: keys of the groups, ascending.
        least, median, most, sizes: one value per group; the median of an even number is the lower middle value.
        group: index of each value's group.
    """

    keys: Integers
    least: Floats
    median: Floats
    most: Floats
    sizes: Integers
    group: Integers

    @classmethod
    def by(cls, keys: Integers, values: Floats) -> Groups:
        """Group values by key; keys are at least 0."""
        order = np.lexsort((values, keys))
        begins = np.flatnonzero(np.diff(keys[order], prepend=-1))
        sizes, ordered = np.diff(begins, append=len(order)), values[order]
        group = np.empty(len(order), np.int64)
        group[order] = np.repeat(np.arange(len(begins)), sizes)
        least, median, most = (ordered[place] for place in (begins, begins + (sizes - 1) // 2, begins + sizes - 1))
        return cls(keys[order][begins], least, median, most, sizes, group)


@dataclass(frozen=True, eq=False)
class ComputeTimes:
    """Compute times: one row per worker, stage and kind of instruction.

    Attributes:
        reports: worker -> report of its first process.
        workers: all reporting workers, also those without rows.
        owner: index in `workers`.
        tokens, kind: names of kinds, and the row's index in them.
        count, seconds: number of instructions, and their total duration.
    """

    reports: Mapping[Worker, Report]
    workers: Sequence[Worker]
    owner: Integers
    stage: Integers
    tokens: Sequence[str]
    kind: Integers
    count: Floats
    seconds: Floats

    @classmethod
    def from_reports(cls, reports: Mapping[Worker, Report]) -> ComputeTimes:
        rows = [row for report in reports.values() for row in report.compute]
        token = [row.token for row in rows]
        tokens = sorted(set(token))
        kinds = {token: kind for kind, token in enumerate(tokens)}
        return cls(
            reports,
            list(reports),
            np.repeat(np.arange(len(reports)), [len(report.compute) for report in reports.values()]),
            column(rows, "stage", np.int64),
            tokens,
            np.fromiter(map(kinds.__getitem__, token), np.int64, len(rows)),
            column(rows, "count", np.float64),
            column(rows, "seconds", np.float64),
        )

    def line(self) -> dict[str, Any]:
        """Return the compute times for a metrics line.

        `compute`: worker -> `<stage><F|I|W|B>` -> mean seconds. With more than `MOST_LISTED` workers, only the workers
        whose instructions deviate most from the median of their kind and stage; then also `compute_spread`:
        `<stage><F|I|W|B>` -> least, median and most of the means over all workers.
        """
        listed, spread = sorted(self.workers), {}
        if len(self.workers) > MOST_LISTED:
            mean = np.divide(self.seconds, self.count, out=np.zeros(len(self.count)), where=self.count > 0)
            groups = Groups.by(self.stage * len(self.tokens) + self.kind, mean)
            keys = (divmod(key, len(self.tokens)) for key in groups.keys.tolist())
            figures = np.column_stack((groups.least, groups.median, groups.most)).round(6).tolist()
            spread = {f"{stage}{self.tokens[kind]}": row for (stage, kind), row in zip(keys, figures, strict=True)}
            usual = groups.median[groups.group]
            ratio = np.divide(mean, usual, out=np.ones(len(mean)), where=(mean > 0) & (usual > 0))
            furthest = np.zeros(len(self.workers))
            np.maximum.at(furthest, self.owner, np.abs(np.log(ratio)))
            listed = sorted(self.workers[place] for place in np.argsort(-furthest, kind="stable")[:MOST_LISTED])
        compute = {
            str(worker): {
                f"{row.stage}{row.token}": round(row.seconds / max(row.count, 1), 6)
                for row in self.reports[worker].compute
            }
            for worker in listed
        }
        return {"compute": compute, "compute_spread": spread} if spread else {"compute": compute}


def worker_indices(workers: Iterable[Worker], ranks: int) -> Integers:
    """Return `Shape.worker_index` of many workers."""
    pairs = np.fromiter(chain.from_iterable(workers), np.int64).reshape(-1, 2)
    return np.asarray(pairs[:, 0] * ranks + pairs[:, 1])


def column(rows: Sequence[object], name: str, kind: type[np.generic]) -> npt.NDArray[Any]:
    """Return an attribute of all rows as an array."""
    return np.fromiter(map(attrgetter(name), rows), kind, len(rows))


WINDOW_SECONDS, WINDOW_STEPS = 10.0, 4
"""Throughput is averaged over the last steps that took this many seconds together, and over at least this many steps.

Commits come in bursts, so the time between two of them says little.
"""


def finite_or_none(number: float) -> float | None:
    return number if math.isfinite(number) else None


class Throughput:
    """The mean duration of a step over a window of recent steps."""

    def __init__(self) -> None:
        self._steps: deque[float] = deque()

    @property
    def is_empty(self) -> bool:
        return not self._steps

    def mean_after(self, seconds: float) -> float:
        """Add a step of `seconds` and return the mean seconds of a step."""
        self._steps.append(seconds)
        while len(self._steps) > WINDOW_STEPS and sum(self._steps) - self._steps[0] >= WINDOW_SECONDS:
            self._steps.popleft()
        return max(sum(self._steps) / len(self._steps), 1e-9)

    def start_over(self) -> None:
        self._steps.clear()


class MetricsLines:
    """Builds the metrics lines of a run; times are on the leader's clock."""

    def __init__(self, job: PricedJob, started: float, now: float) -> None:
        self._job, self._started = job, started
        self._last_commit, self._last_generation = now, 0
        self._running_since: float | None = None
        self.throughput = Throughput()

    def start_pipeline(self, now: float) -> None:
        """Note that the next iteration starts with an empty pipeline, after the start-up or an evaluation."""
        self._last_commit, self._last_generation = now, 0

    def start_generation(self, now: float) -> None:
        """Note that a generation begins to run."""
        self._running_since = now

    def line(
        self, now: float, commit: Commit, record: GenerationRecord, live: int, compute: dict[str, Any]
    ) -> dict[str, Any]:
        """Return a step's metrics line, with the result of its evaluation if known; `compute` has the compute times."""
        seconds, is_first = now - self._last_commit, record.generation != self._last_generation
        self._last_commit, self._last_generation = now, record.generation
        job, unit, period = self._job, self._job.seconds_per_unit, record.periods.get(commit.mode, 0.0)
        tokens, count = job.sequences_in(commit.step) * job.model.sequence, job.micro_batches_in(commit.step)
        # The first iteration of a generation starts with an empty pipeline, so its time says nothing about the plan.
        is_comparable = not is_first and period > 0 and count == job.shape.micro_batches
        running, self._running_since = self._running_since, None
        counted = now - running if running is not None and self.throughput.is_empty else seconds
        line: dict[str, Any] = {
            "step": commit.step,
            "time": round(now - self._started, 6),
            "loss": finite_or_none(commit.loss),
            "grad_norm": finite_or_none(commit.grad_norm),
            "mode": commit.mode,
            "tokens_per_second": round(tokens / self.throughput.mean_after(counted), 1),
            "live_workers": len(record.live) or live,
            "plan": record.plan,
            "period": period,
            "generation": record.generation,
            "period_error": round(seconds / (period * unit) - 1, 6) if unit is not None and is_comparable else None,
            **compute,
        }
        if running is not None:
            line["began"] = round(running - self._started, 6)
        if record.evaluated is not None and record.evaluated.step == commit.step:
            line["eval_loss"] = finite_or_none(record.evaluated.loss)
        return line

    def with_evaluation(self, line: dict[str, Any], now: float, loss: float) -> dict[str, Any]:
        seconds = round(now - self._started - line["time"], 6)
        return line | {"eval_loss": finite_or_none(loss), "eval_seconds": seconds}
