"""Drift: compares the workers' measured times with the profile that the plan in use was made for.

Three quantities are estimated from times without waits (docs/guides/profile.md has the numbers):

    speed of a worker   time per micro-batch relative to the hosts of its stage (their lower median)
    time of a stage     for F, I and W each: relative to the profile, as a share of the median stage and kind
    price of a link     the lower quartile of its messages' durations

An estimate is accepted when more than half of the last N iterations depart from the plan on one side by more than a
threshold; it is their median, and the reference of the next plan.

A link is slow if its messages take `FACTOR` times as long as in the profile and as on the median link. The excess must
be at least `SHARE` of a typical instruction, and the receiver must have waited.

Limits: an unused worker or link cannot be measured; it is tried again after `RETRY` windows, then after twice as many.
A link that delays fewer than three quarters of its messages is not found, nor are links inside reductions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import chain
from statistics import fmean, median
from typing import Any

import numpy as np
import numpy.typing as npt

from recycle.exec.leader.metrics import ComputeTimes, Floats, Groups, Integers, column, worker_indices
from recycle.exec.protocol import Report
from recycle.ir.kinds import kind_of_token
from recycle.job import PricedJob
from recycle.job.profile import Link, Profile
from recycle.job.shape import Shape, Worker

LEAST_SECONDS = 1e-3
"""Mean seconds of an instruction below which times are not trusted: noise of interpreter and machine dominates.

Re-routing a micro-batch of shorter instructions saves less than a new generation costs.
"""
RETRY = 4
"""Windows after which an unused slow worker or link is tried again; doubled each time that it is still slow."""
FACTOR = 2.0
"""Ratio of measured to planned message time from which a link counts as slow.

Message times scatter more than compute times, and routing around a link pays only if the link is far slower.
"""
SHARE = 0.25
"""Least excess of a message's duration, as a share of a typical instruction, for a plan to avoid the link."""
LEAST_MESSAGE_SECONDS = 2e-3
"""Seconds below which messages and waits are not trusted."""
FEW_LINKS = 4
"""Least number of links for their median to count as usual."""
MOST_LINKS = 64
"""Most links that are watched at once."""

TIMES = ("backward_input", "backward_weight", "forward")
"""The attributes of Profile that are compared."""
_IsBeyond = Callable[[npt.ArrayLike, npt.ArrayLike], npt.NDArray[np.bool_]]


class Windows:
    """The last N measurements of many quantities, one row each; `is_beyond` compares a measurement with a reference."""

    def __init__(self, rows: int, iterations: int, is_beyond: _IsBeyond) -> None:
        self._values, self._is_beyond = np.full((rows, iterations), math.nan), is_beyond
        self._next = np.zeros(rows, np.int64)
        self._idle = np.full(rows, -math.inf)
        self._patience = np.full(rows, float(RETRY * iterations))

    def add(self, rows: Integers, values: Floats) -> None:
        """Add one measurement to each of these rows; other rows stay idle for this iteration."""
        self._idle += 1
        self._idle[rows] = 0
        self._values[rows, self._next[rows]] = values
        self._next[rows] = (self._next[rows] + 1) % self._values.shape[1]

    def departed(self, planned: Floats, usual: Floats) -> dict[int, float]:
        """Return row -> new estimate, for rows that departed from the plan.

        The estimate is the median of the measurements beyond the plan, if more than half of a window is on one side. An
        idle row that is due for a retry gets its usual value, and twice the wait before the next retry.
        """
        estimates: dict[int, float] = {}
        values = self._values
        for beyond in (self._is_beyond(values, planned[:, None]), self._is_beyond(planned[:, None], values)):
            for row in np.flatnonzero(2 * beyond.sum(axis=1) > values.shape[1]).tolist():
                estimates[row] = median(values[row, beyond[row]].tolist())
                if not self._is_beyond(estimates[row], usual[row]):
                    self._patience[row] = RETRY * values.shape[1]
        for row in np.flatnonzero((planned != usual) & (self._idle >= self._patience)).tolist():
            estimates[row] = float(usual[row])
            self._patience[row] *= 2
            self._values[row], self._idle[row] = math.nan, 0
        return estimates

    def is_usual(self, row: int, usual: float) -> bool:
        """Return whether a whole window is measured and no measurement is beyond the usual value."""
        values = self._values[row]
        return not (np.isnan(values) | self._is_beyond(values, usual)).any()

    def forget(self, row: int) -> None:
        """Reuse the row for another quantity, without measurements."""
        self._values[row], self._idle[row] = math.nan, -math.inf
        self._patience[row] = RETRY * self._values.shape[1]


@dataclass
class Departure:
    """The measured profile, the changes as text, and the links that are slow now, as events name them."""

    profile: Profile
    causes: list[str] = field(default_factory=list)
    slow_links: list[dict[str, Any]] = field(default_factory=list)

    def note(self, cause: str, **changes: Any) -> None:
        self.profile = replace(self.profile, **changes)
        self.causes.append(cause)


class _Links:
    def __init__(self, shape: Shape, profile: Profile, iterations: int) -> None:
        self._shape, self._profile = shape, profile
        self._bytes = max(profile.per_stage("message", shape.stages))
        self._instruction = fmean(chain.from_iterable(profile.per_stage(name, shape.stages) for name in TIMES))
        self._unit = 1.0
        self._rows: dict[int, int] = {}
        self._windows = Windows(MOST_LINKS, iterations, self._is_beyond)

    def observe(self, reports: Mapping[Worker, Report], planned: Profile, unit: float) -> None:
        self._unit, ranks, workers = unit, self._shape.ranks, self._shape.worker_count
        links = [link for report in reports.values() for link in report.links]
        own = np.repeat(worker_indices(reports, ranks), [len(report.links) for report in reports.values()])
        peer = column(links, "pipeline", np.int64) * ranks + column(links, "rank", np.int64)
        waits = (peer * workers + own)[column(links, "waited", np.float64) >= LEAST_MESSAGE_SECONDS]
        is_sent = column(links, "sent", np.int64) > 0
        codes, prices = (own * workers + peer)[is_sent], column(links, "seconds", np.float64)[is_sent] / unit
        expected = self._prices(self._profile, codes)
        usual = _lower_median(prices) if len(prices) >= FEW_LINKS else 0.0
        excess = np.maximum(0.0, usual - expected)  # the excess common to all messages is not this link's
        prices = np.maximum(expected, prices - excess)
        is_slow = np.isin(codes, waits) & self._is_beyond(prices, np.maximum(expected, usual))
        for code in codes[is_slow].tolist():
            if code not in self._rows and len(self._rows) < MOST_LINKS:
                self._rows[code] = min(set(range(MOST_LINKS)).difference(self._rows.values()))
        places = np.flatnonzero(np.isin(codes, list(self._rows)))
        codes, prices, expected, is_slow = codes[places], prices[places], expected[places], is_slow[places]
        counted_on = self._prices(planned, codes)
        is_clear = is_slow | ~self._is_beyond(prices, np.maximum(counted_on, expected))
        rows = np.array([self._rows[code] for code in codes.tolist()], np.int64)
        self._windows.add(rows[is_clear], prices[is_clear])
        for place in np.flatnonzero(is_clear & (counted_on == expected)).tolist():
            if self._windows.is_usual(rows[place], expected[place]):
                self._forget(int(codes[place]))

    def _prices(self, profile: Profile, codes: Integers) -> Floats:
        sender, receiver = np.divmod(codes, self._shape.worker_count)
        return profile.copy_seconds(self._shape, sender, receiver, self._bytes)

    def _is_beyond(self, price: npt.ArrayLike, reference: npt.ArrayLike) -> npt.NDArray[np.bool_]:
        price, reference = np.asarray(price), np.asarray(reference)
        least = max(SHARE * self._instruction, LEAST_MESSAGE_SECONDS / self._unit)
        return np.asarray((price > FACTOR * reference) & (price - reference > least))

    def forget(self, worker: int) -> None:
        for code in [code for code in self._rows if worker in divmod(code, self._shape.worker_count)]:
            self._forget(code)

    def _forget(self, code: int) -> None:
        self._windows.forget(self._rows.pop(code))

    def depart(self, departure: Departure) -> None:
        codes, rows = np.array(list(self._rows), np.int64), list(self._rows.values())
        counted_on, usual = np.full((2, MOST_LINKS), math.nan)
        counted_on[rows], usual[rows] = self._prices(departure.profile, codes), self._prices(self._profile, codes)
        departed = self._windows.departed(counted_on, usual)
        for code, row in sorted(self._rows.items()):
            if row not in departed:
                continue
            price, base = departed[row], float(usual[row])
            sender, receiver = map(self._shape.worker_at, divmod(code, self._shape.worker_count))
            pair, links = f"{sender}>{receiver}", dict(departure.profile.links)
            messages = f"messages from {sender} to {receiver} take"
            links.pop(pair, None)
            if self._is_beyond(price, base):
                factor, seconds = _rounded(price / base) if base else None, price * self._unit
                links[pair] = Link(_rounded(price)) if factor is None else self._slowed(sender, receiver, factor)
                ends = {"worker": str(sender), "peer": str(receiver)}
                departure.slow_links.append({**ends, "seconds": round(seconds, 6), "factor": factor})
                how = f"{seconds:.3g} s" if factor is None else f"{factor:.3g} times as long as the profile says"
                departure.note(f"{messages} {how}", links=links)
            elif counted_on[row] != base:
                if pair in self._profile.links:
                    links[pair] = self._profile.links[pair]
                departure.note(f"{messages} as long as the profile says again", links=links)

    def _slowed(self, sender: Worker, receiver: Worker, factor: float) -> Link:
        usual = self._profile.link_between(self._shape, sender, receiver)
        bandwidth = None if usual.bandwidth is None else _rounded(usual.bandwidth / factor)
        return Link(_rounded(factor * usual.latency), bandwidth)


class DriftMonitor:
    """Watches the times of one run.

    Compares stage times with the profile if these are measured in seconds, or if `compares_stages`.
    """

    def __init__(self, job: PricedJob, compares_stages: bool = False) -> None:
        self._shape, self._profile, iterations = job.shape, job.prices, job.membership.drift_iterations
        self._threshold = job.membership.drift
        self._compares_stages = compares_stages or job.seconds_per_unit is not None
        self._per_stage = {name: np.array(self._profile.per_stage(name, self._shape.stages)) for name in TIMES}
        self._speeds = Windows(self._shape.worker_count, iterations, self._is_beyond)
        self._times = Windows(len(TIMES) * self._shape.stages, iterations, self._is_beyond)
        self._links = _Links(self._shape, self._profile, iterations)

    def _is_beyond(self, ratio: npt.ArrayLike, reference: npt.ArrayLike) -> npt.NDArray[np.bool_]:
        return np.asarray(np.asarray(ratio) > np.asarray(reference) * (1 + self._threshold))

    def observe(self, times: ComputeTimes, planned: Profile, *, by_stage: bool = False) -> None:
        """Take the reports of one iteration, and the profile of the plan in use.

        With `by_stage`, workers of a rank host different stages: compare each only with the other hosts of its stages.
        """
        count, size = times.count, len(times.workers)
        expected = _of_hosts(times) if by_stage else count * self._expected(times)
        counts = expected > 0
        by_worker = [np.bincount(times.owner, values * counts, size) for values in (count, times.seconds, expected)]
        cost, is_measured = _costs(*(sums.astype(np.float64) for sums in by_worker))
        places, cost = worker_indices(times.workers, self._shape.ranks)[is_measured], cost[is_measured]
        if by_stage:
            self._speeds.add(places, cost)
            return
        hosts = Groups.by(places % self._shape.ranks, cost)
        self._speeds.add(places, cost / hosts.median[hosts.group])
        if len(cost):
            self._links.observe(times.reports, planned, _lower_median(cost))
        if self._compares_stages:
            self._observe_stages(times, *_costs(count, times.seconds, expected))

    def _expected(self, times: ComputeTimes) -> Floats:
        none = np.zeros(self._shape.stages)
        table = [sum((self._per_stage[name] for name in _parts(token)), start=none) for token in times.tokens]
        return np.array(table).reshape(-1, self._shape.stages)[times.kind, times.stage]

    def _observe_stages(self, times: ComputeTimes, cost: Floats, is_measured: npt.NDArray[np.bool_]) -> None:
        medians = []
        for name in TIMES:
            rows = is_measured & np.array([name in _parts(token) for token in times.tokens], bool)[times.kind]
            medians.append(Groups.by(times.stage[rows], cost[rows]).median)
        usual = np.concatenate(medians)
        if len(usual) == len(TIMES) * self._shape.stages:  # all are measured
            self._times.add(np.arange(len(usual)), usual / _lower_median(usual))

    def forget(self, worker: Worker) -> None:
        """Forget a worker whose process has ended; its successor starts unmeasured."""
        index = self._shape.worker_index(worker)
        self._speeds.forget(index)
        self._links.forget(index)

    def departed(self, planned: Profile) -> Departure | None:
        """Return the departures of the last iterations from `planned`; None if `planned` still holds."""
        departure, stages = Departure(planned), self._shape.stages
        usual = np.ones(self._shape.worker_count)
        factors = usual.copy()
        for name, factor in planned.speed.items():
            factors[self._shape.worker_index(Worker.parse(name))] = factor
        for index, ratio in sorted(self._speeds.departed(factors, usual).items()):
            is_near = abs(math.log(ratio)) <= math.log1p(self._threshold / 2)
            worker, factor = str(self._shape.worker_at(index)), 1.0 if is_near else _rounded(ratio)
            speed = {name: known for name, known in departure.profile.speed.items() if name != worker}
            if factor != 1.0:
                speed[worker] = factor
            departure.note(f"worker {worker} takes {factor:.3g} times as long as its peers", speed=speed)
        base = np.concatenate([self._per_stage[name] for name in TIMES])
        counted_on = np.concatenate([planned.per_stage(name, stages) for name in TIMES])
        ratios = np.divide(counted_on, base, out=np.full(len(base), math.nan), where=base > 0)
        for row, ratio in sorted(self._times.departed(ratios, ratios).items()):
            kind, stage = divmod(row, stages)
            name, times = TIMES[kind], departure.profile.per_stage(TIMES[kind], stages)
            times[stage] = _rounded(ratio * float(base[row]))
            departure.note(f"{name} of stage {stage} takes {ratio:.3g} times what the profile says", **{name: times})
        self._links.depart(departure)
        return departure if departure.causes else None


def _of_hosts(times: ComputeTimes) -> Floats:
    """Return the lower median over the stage's hosts, the row's worker included; 0 in rows without another host."""
    rows, expected = times.count > 0, np.zeros(len(times.count))
    count = times.count[rows]
    keys = (times.stage * len(times.tokens) + times.kind)[rows]
    hosts = Groups.by(keys, times.seconds[rows] / count)
    expected[rows] = count * hosts.median[hosts.group] * (hosts.sizes[hosts.group] > 1)
    return expected


def _costs(count: Floats, seconds: Floats, expected: Floats) -> tuple[Floats, npt.NDArray[np.bool_]]:
    is_measured = (count > 0) & (expected > 0) & (seconds >= LEAST_SECONDS * count)
    return np.divide(seconds, expected, out=np.zeros(len(seconds)), where=is_measured), is_measured


def _lower_median(values: Floats) -> float:
    return float(np.quantile(values, 0.5, method="lower"))


def _rounded(value: float) -> float:
    """No plan depends on more than three digits."""
    return float(f"{value:.3g}")


@cache
def _parts(token: str) -> tuple[str, ...]:
    return tuple(name for name in kind_of_token(token).row.seconds if name in TIMES)
