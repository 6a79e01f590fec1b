"""Drift: what the workers' own clocks say, held against the profile that the plan in use was made for.

With each commit come the seconds that every worker's F, I, W and B took on its own clock, without any wait for peers.
Of these two things are estimated, both as ratios, so that neither a job's unit of time nor what slows all alike counts:

    speed of a worker   its time per micro-batch over that of its stage's hosts (their lower median)
    time of a stage     of F, I and W each: over the profile's, as a share of the middle one of all stages and kinds

An estimate stands when more than half of the last N iterations depart from what the plan counts on, on one side, by
more than the threshold; it is then the median of these. So a single odd iteration never counts, a change is seen after
N / 2 + 1 iterations, and what a new plan was made for is the new reference: the same threshold lies between it and the
next plan, whichever way the times go. See docs/profile.md for the numbers. What messages take is in link_drift.py.

Limits: a worker that runs nothing any more cannot be measured. It is tried again at full speed after `RETRY` windows,
then after twice as many, and so on. Times are a process's wall clock: on a device that runs ahead of it, or on cores
that several workers share, they are not compute alone.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from itertools import chain
from statistics import median, median_low
from typing import Any

import numpy as np
import numpy.typing as npt

from recycle.exec.leader.compute_times import ComputeTimes
from recycle.exec.leader.link_drift import LinkChange, LinkMonitor
from recycle.ir.kinds import kind_of_token
from recycle.job import PricedJob
from recycle.profile import Profile
from recycle.shape import Shape, Worker

LEAST_SECONDS = 1e-3
"""Mean time of an instruction from which a worker's clock is believed: below, it is the interpreter's and the
machine's own noise, and re-routing a micro-batch saves less than a new generation costs for a long time."""
RETRY = 4
"""Windows after which a slow worker without work is tried again; each time it is slow again, twice as many."""

TIMES = ("forward", "backward_input", "backward_weight")
_Key = tuple[str, int]
"""(attribute of Profile, stage)."""


@dataclass
class _Watched:
    """The last ratios of one thing, as far as it was measured."""

    ratios: deque[float]

    def add_iteration(self, ratio: float) -> None:
        """It was measured in one more iteration."""
        self.ratios.append(ratio)

    def departed(self, planned: float, threshold: float) -> float | None:
        """The median of the ratios beyond `planned` on one side, when they are more than half of a whole window."""
        limit = 1 + threshold
        above = [ratio for ratio in self.ratios if ratio > planned * limit]
        below = [ratio for ratio in self.ratios if ratio * limit < planned]
        for beyond in (above, below):
            if 2 * len(beyond) > (self.ratios.maxlen or 0):
                return median(beyond)
        return None


class _Speeds:
    """The last ratios of all workers, a row each.

    Attributes:
        idle: iterations since the worker was measured last.
        patience: after how many of them a slow one is tried again.
    """

    def __init__(self, workers: int, iterations: int) -> None:
        self._ratios = np.full((workers, max(1, iterations)), math.nan)
        self._next = np.zeros(workers, np.int64)
        self._unmeasured = RETRY * iterations
        self._is_known = np.zeros(workers, bool)
        self.idle, self.patience = np.zeros(workers, np.int64), np.full(workers, self._unmeasured)

    def add_iteration(self, places: npt.NDArray[np.int64], ratios: npt.NDArray[np.float64]) -> None:
        """These workers were measured in one more iteration."""
        self._ratios[places, self._next[places]] = ratios
        self._next[places] = (self._next[places] + 1) % self._ratios.shape[1]
        self.idle[places], self._is_known[places] = 0, True

    def rest(self, places: npt.NDArray[np.int64]) -> None:
        """These workers were not measured in an iteration."""
        self.idle[places[self._is_known[places]]] += 1

    def forget(self, place: int) -> None:
        """Nothing is known of the worker."""
        self.restart(place)
        self.patience[place], self._is_known[place] = self._unmeasured, False

    def restart(self, place: int) -> None:
        """What was measured of the worker does not count any more."""
        self._ratios[place], self._next[place], self.idle[place] = math.nan, 0, 0

    def departed(self, planned: npt.NDArray[np.float64], threshold: float) -> dict[int, float]:
        """As `_Watched.departed`, of those that have, by their place."""
        away, limit = self._ratios / planned[:, None], 1 + threshold
        found: dict[int, float] = {}
        for beyond in (away * limit < 1, away > limit):
            for place in np.flatnonzero(2 * beyond.sum(axis=1) > self._ratios.shape[1]).tolist():
                found[place] = median(self._ratios[place][beyond[place]].tolist())
        return found


@dataclass
class DriftMonitor:
    """Watches the times of one run.

    Args:
        shape: of the job.
        profile: the job's own, by whose ratios kinds and stages are weighed against each other.
        threshold: departure from what is planned for that counts, as a share.
        iterations: N, the window.
        stages_too: whether the profile's times are measured ones, so that those of stages can be compared with them.

    Attributes:
        slow_links: those that the last call of `departed` has found to be slow.
    """

    shape: Shape
    profile: Profile
    threshold: float
    iterations: int
    stages_too: bool
    slow_links: list[LinkChange] = field(default_factory=list)
    _speeds: _Speeds = field(init=False)
    _times: dict[_Key, _Watched] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._speeds = _Speeds(self.shape.worker_count, self.iterations)
        self._links = LinkMonitor(self.shape, self.profile, self.iterations)

    @classmethod
    def of(cls, job: PricedJob) -> DriftMonitor:
        """As the job's `[membership]` says."""
        limits = job.membership
        stages_too = job.seconds_per_unit is not None
        return cls(job.shape, job.prices, limits.drift, limits.drift_iterations, stages_too)

    def observe(self, times: ComputeTimes, *, by_stage: bool = False) -> None:
        """Take what the live workers report of one iteration.

        Args:
            by_stage: workers of a rank do not host the same: each is held against the other hosts of its stages, one by
                one, and stages are not compared with the profile.
        """
        count, size = times.count, len(times.workers)
        expected = _of_hosts(times) if by_stage else count * self._expected(times)
        counts = expected > 0
        cost, is_measured = _costs(
            *(np.bincount(times.owner, of * counts, size).astype(np.float64) for of in (count, times.seconds, expected))
        )
        places = self._places(times.workers)
        usual = 1.0 if by_stage else _usual(places[is_measured] % self.shape.ranks, cost[is_measured])
        self._speeds.add_iteration(places[is_measured], cost[is_measured] / usual)
        self._speeds.rest(places[~is_measured])
        if not by_stage and is_measured.any():
            self._links.observe(times.links, median_low(cost[is_measured].tolist()))
        if self.stages_too and not by_stage:
            self._observe_stages(times)

    def _expected(self, times: ComputeTimes) -> npt.NDArray[np.float64]:
        """What the profile says of one instruction, of each row."""
        each = np.zeros(len(times.kind))
        for kind, token in enumerate(times.tokens):
            rows = times.kind == kind
            each[rows] = sum(np.asarray(self._per_stage[name])[times.stage[rows]] for name in _parts(token))
        return each

    def _places(self, workers: Sequence[Worker]) -> npt.NDArray[np.int64]:
        pairs = np.fromiter(chain.from_iterable(workers), np.int64, 2 * len(workers)).reshape(-1, 2)
        return np.asarray(pairs[:, 0] * self.shape.ranks + pairs[:, 1])

    @cached_property
    def _per_stage(self) -> dict[str, list[float]]:
        return {name: self.profile.per_stage(name, self.shape.stages) for name in TIMES}

    def _observe_stages(self, times: ComputeTimes) -> None:
        cost, is_measured = _costs(times.count, times.seconds, times.count * self._expected(times))
        usual: dict[_Key, float] = {}
        for name in TIMES:
            has_it = np.array([name in _parts(token) for token in times.tokens], bool)[times.kind]
            rows = np.flatnonzero(is_measured & has_it)
            stages, firsts = np.unique(times.stage[rows], return_index=True)
            medians = _usual(times.stage[rows], cost[rows])[firsts]
            usual |= {(name, stage): median for stage, median in zip(stages.tolist(), medians.tolist(), strict=True)}
        if len(usual) < len(TIMES) * self.shape.stages:
            return
        scale = median_low(usual.values())
        for at, of in usual.items():
            self._times.setdefault(at, self._unmeasured()).add_iteration(of / scale)

    def _unmeasured(self) -> _Watched:
        return _Watched(deque(maxlen=self.iterations))

    def forget(self, worker: Worker) -> None:
        """The worker's process has ended; another one in its place starts unmeasured."""
        self._speeds.forget(self._place(worker))
        self._links.forget(worker)

    def _place(self, worker: Worker) -> int:
        return worker.pipeline * self.shape.ranks + worker.rank

    def departed(self, planned: Profile, live: Iterable[Worker]) -> tuple[Profile, str] | None:
        """The profile that the last iterations show and what has changed in words; None when `planned` still holds.

        What has not departed stays as planned for.
        """
        speed, changes = dict(planned.speed), list[str]()
        factors = np.ones(self.shape.worker_count)
        slow = [Worker.parse(worker) for worker in planned.speed]
        factors[self._places(slow)] = list(planned.speed.values())
        departed = self._speeds.departed(factors, self.threshold)
        suspects = {Worker(*divmod(place, self.shape.ranks)) for place in departed} | set(slow)
        for worker in sorted(suspects & set(live)):
            now = self._speed(self._place(worker), planned.speed_of(worker), departed)
            if now is not None:
                speed.pop(str(worker), None)
                if now != 1.0:
                    speed[str(worker)] = now
                changes.append(f"worker {worker} takes {now:.3g} times as long as its peers")
        times: dict[str, Any] = {name: planned.per_stage(name, self.shape.stages) for name in TIMES}
        for (name, stage), watched in sorted(self._times.items()):
            base = self.profile.per_stage(name, self.shape.stages)[stage]
            ratio = watched.departed(times[name][stage] / base, self.threshold) if base > 0 else None
            if ratio is not None:
                times[name][stage] = _rounded(ratio * base)
                changes.append(f"{name} of stage {stage} takes {ratio:.3g} times what the profile says")
        moved = self._links.departed(planned, set(live))
        self.slow_links = [link for link in moved if link.price is not None]
        changes += map(str, moved)
        if not changes:
            return None
        planned = self._links.priced(planned, moved)
        changed = {name: values for name, values in times.items() if values != planned.per_stage(name, len(values))}
        return replace(planned, speed=speed, **changed), "; ".join(changes)

    def _speed(self, place: int, planned: float, departed: Mapping[int, float]) -> float | None:
        """A new factor for a worker; 1 when it is closer to that than half the threshold."""
        speeds = self._speeds
        if planned != 1.0 and speeds.idle[place] >= speeds.patience[place]:
            speeds.patience[place] *= 2
            speeds.restart(place)
            return 1.0
        if (ratio := departed.get(place)) is None:
            return None
        if abs(math.log(ratio)) > math.log1p(self.threshold / 2):
            return _rounded(ratio)
        speeds.patience[place] = RETRY * self.iterations
        return 1.0


def _of_hosts(times: ComputeTimes) -> npt.NDArray[np.float64]:
    """What the same instructions take on the stage's other hosts (the lower median, the row's own worker among them);
    0 in rows that nothing else can be held against."""
    group = times.stage * len(times.tokens) + times.kind
    mean = np.divide(times.seconds, times.count, out=np.zeros(len(group)), where=times.count > 0)
    rows = np.flatnonzero(times.count > 0)
    _, of, hosts = np.unique(group[rows], return_inverse=True, return_counts=True)
    expected = np.zeros(len(group))
    expected[rows] = times.count[rows] * _usual(group[rows], mean[rows]) * (hosts[of] > 1)
    return expected


def _costs(
    count: npt.NDArray[np.float64], seconds: npt.NDArray[np.float64], expected: npt.NDArray[np.float64]
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.bool_]]:
    """Seconds over what the profile says of the same instructions, and whether that counts: it does not where there
    are none, or too short ones."""
    is_measured = (count > 0) & (expected > 0) & (seconds >= LEAST_SECONDS * count)
    return np.divide(seconds, expected, out=np.zeros(len(seconds)), where=is_measured), is_measured


def _usual(groups: npt.NDArray[np.int64], values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Of each value, the lower median of its group's."""
    order = np.lexsort((values, groups))
    begins = np.flatnonzero(np.diff(groups[order], prepend=-1))
    sizes = np.diff(begins, append=len(order))
    usual = np.empty(len(values))
    usual[order] = np.repeat(values[order][begins + (sizes - 1) // 2], sizes)
    return usual


def _rounded(value: float) -> float:
    """Three digits: no plan depends on more, and nobody reads more."""
    return float(f"{value:.3g}")


@cache
def _parts(token: str) -> tuple[str, ...]:
    """The attributes of Profile that the time of instructions of this kind is made of."""
    return tuple(name for name in kind_of_token(token).row.seconds if name in TIMES)
