"""Drift: what the workers' own clocks say, held against the profile that the plan in use was made for.

With each commit come the seconds that every worker's F, I, W and B took on its own clock, without any wait for peers.
Of these two things are estimated, both as ratios, so that neither a job's unit of time nor what slows all alike counts:

    speed of a worker   its time per micro-batch over that of its stage's hosts (their lower median)
    time of a stage     of F, I and W each: over the profile's, as a share of the middle one of all stages and kinds

An estimate stands when more than half of the last N iterations depart from what the plan counts on, on one side, by
more than the threshold; it is then the median of these. So a single odd iteration never counts, a change is seen after
N / 2 + 1 iterations, and what a new plan was made for is the new reference: the same threshold lies between it and the
next plan, whichever way the times go. See docs/profile.md for the numbers.

Limits: a worker that runs nothing any more cannot be measured. It is tried again at full speed after `RETRY` windows,
then after twice as many, and so on. Times are a process's wall clock: on a device that runs ahead of it, or on cores
that several workers share, they are not compute alone.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from statistics import median, median_low
from typing import Any

from recycle.exec.membership.messages import Computed
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
    patience: int
    idle: int = 0

    def take(self, ratio: float) -> None:
        """It was measured in one more iteration."""
        self.ratios.append(ratio)
        self.idle = 0

    def departed(self, planned: float, threshold: float) -> float | None:
        """The median of the ratios beyond `planned` on one side, when they are more than half of a whole window."""
        limit = math.log1p(threshold)
        for side in (1, -1):
            beyond = [ratio for ratio in self.ratios if side * math.log(ratio / planned) > limit]
            if 2 * len(beyond) > (self.ratios.maxlen or 0):
                return median(beyond)
        return None


@dataclass
class DriftMonitor:
    """Watches the times of one run.

    Args:
        shape: of the job.
        profile: the job's own, by whose ratios kinds and stages are weighed against each other.
        threshold: departure from what is planned for that counts, as a share.
        iterations: N, the window.
        stages_too: whether the profile's times are measured ones, so that those of stages can be compared with them.
    """

    shape: Shape
    profile: Profile
    threshold: float
    iterations: int
    stages_too: bool
    _speeds: dict[Worker, _Watched] = field(default_factory=dict)
    _times: dict[_Key, _Watched] = field(default_factory=dict)

    @classmethod
    def of(cls, job: PricedJob) -> DriftMonitor:
        """As the job's `[membership]` says."""
        limits = job.membership
        stages_too = job.seconds_per_unit is not None
        return cls(job.shape, job.prices, limits.drift, limits.drift_iterations, stages_too)

    def observe(self, compute: Mapping[Worker, Sequence[Computed]]) -> None:
        """Take what the live workers report of one iteration."""
        costs = {worker: cost for worker, times in compute.items() if (cost := self._cost(times)) is not None}
        for rank in range(self.shape.ranks):
            hosts = [worker for worker in costs if worker.rank == rank]
            usual = median_low([costs[worker] for worker in hosts]) if hosts else 1.0
            for worker in hosts:
                self._speeds.setdefault(worker, self._unmeasured()).take(costs[worker] / usual)
        for worker in compute:
            if worker not in costs and worker in self._speeds:
                self._speeds[worker].idle += 1
        if self.stages_too:
            self._observe_stages(compute)

    def _cost(self, times: Sequence[Computed]) -> float | None:
        """Seconds over what the profile says of the same instructions; None when there are none, or too short ones."""
        count, seconds = sum(one.count for one in times), sum(one.seconds for one in times)
        expected = sum(one.count * self._per_stage[name][one.stage] for one in times for name in _parts(one))
        if not count or expected <= 0 or seconds < LEAST_SECONDS * count:
            return None
        return seconds / expected

    @cached_property
    def _per_stage(self) -> dict[str, list[float]]:
        return {name: self.profile.per_stage(name, self.shape.stages) for name in TIMES}

    def _observe_stages(self, compute: Mapping[Worker, Sequence[Computed]]) -> None:
        found: dict[_Key, list[float]] = {}
        for one in (one for times in compute.values() for one in times):
            cost = self._cost([one])
            for name in _parts(one) if cost is not None else ():
                found.setdefault((name, one.stage), []).append(cost or 0.0)
        if len(found) < len(TIMES) * self.shape.stages:
            return
        usual = {at: median_low(costs) for at, costs in found.items()}
        scale = median_low(usual.values())
        for at, cost in usual.items():
            self._times.setdefault(at, self._unmeasured()).take(cost / scale)

    def _unmeasured(self) -> _Watched:
        return _Watched(deque(maxlen=self.iterations), patience=RETRY * self.iterations)

    def forget(self, worker: Worker) -> None:
        """The worker's process has ended; another one in its place starts unmeasured."""
        self._speeds.pop(worker, None)

    def departed(self, planned: Profile, live: Iterable[Worker]) -> tuple[Profile, str] | None:
        """The profile that the last iterations show and what has changed in words; None when `planned` still holds.

        What has not departed stays as planned for.
        """
        speed, changes = dict(planned.speed), list[str]()
        for worker in sorted(live):
            watched = self._speeds.get(worker)
            now = None if watched is None else self._speed(watched, planned.speed_of(worker))
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
        if not changes:
            return None
        changed = {name: values for name, values in times.items() if values != planned.per_stage(name, len(values))}
        return replace(planned, speed=speed, **changed), "; ".join(changes)

    def _speed(self, watched: _Watched, planned: float) -> float | None:
        """A new factor for a worker; 1 when it is closer to that than half the threshold."""
        if planned != 1.0 and watched.idle >= watched.patience:
            watched.patience *= 2
            watched.idle = 0
            watched.ratios.clear()
            return 1.0
        ratio = watched.departed(planned, self.threshold)
        if ratio is None:
            return None
        if abs(math.log(ratio)) > math.log1p(self.threshold / 2):
            return _rounded(ratio)
        watched.patience = RETRY * self.iterations
        return 1.0


def _rounded(value: float) -> float:
    """Three digits: no plan depends on more, and nobody reads more."""
    return float(f"{value:.3g}")


def _parts(computed: Computed) -> tuple[str, ...]:
    """The attributes of Profile that the instructions' time is made of."""
    return tuple(name for name in kind_of_token(computed.token).row.seconds if name in TIMES)
