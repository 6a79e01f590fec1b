"""What a configuration delivers under failures, in closed form.

A node that fails costs a pause and the iteration in progress, one that returns a pause. Between these, the iteration
takes the period for the number of dead nodes, which spares replace first; the others are spread over the stages where
they cost least: with k of D hosts dead, the others of a stage run up to ceil(D m / (D - k)) micro-batches. A failure
that takes all hosts of a stage, or of a shard of the optimizer's state, costs a restart and the work since the last
checkpoint; the interval follows Young's rule (CACM 17(9), 1974).

The number of dead nodes at a time is the sum of two: those of single failures, binomial, and those of failures that
take several nodes, compound Poisson. Both follow from the rate, which varies between nodes with a gamma distribution,
and the lognormal repair time, as in `systems.failure_generator`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import groupby, pairwise
from math import ceil, comb, exp, expm1, inf, log, sqrt
from statistics import NormalDist
from typing import Annotated

import msgspec
import numpy as np
from msgspec import Meta

from recycle.systems.failure_generator import Generator
from recycle.systems.failures import FailureTrace
from recycle.systems.recycle import rank_loads
from recycle.systems.scenario import Scenario

DAY = 86400.0
_POINTS = 24
_P90 = NormalDist().inv_cdf(0.9)


class FailureModel(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Failures of nodes; `systems.failure_generator` has the sources of the defaults.

    Attributes:
        rate: failures per 1,000 node-days.
        repair_median, repair_p90 (hours): time until a node returns.
        burst: share of failures that take several nodes (a switch, a rack's power).
        burst_nodes: most nodes that such a failure takes.
        spread: shape of the distribution of rates over nodes; smaller means more failures from few nodes.
        announced: share of failures with a notice, such as maintenance: no detection, no lost work.
        corrupt: share of the others that are silent corruption.
        slow: periods in which a node is slow, per 1,000 node-days.
        slow_factor: how much longer a slow node takes.
        slow_hours (hours): mean length of such a period.
    """

    rate: Annotated[float, Meta(ge=0, le=1e6)] = 4.2
    repair_median: Annotated[float, Meta(gt=0, le=1e6)] = 20.0
    repair_p90: Annotated[float, Meta(gt=0, le=1e6)] = 312.0
    burst: Annotated[float, Meta(ge=0, le=1)] = 0.05
    burst_nodes: Annotated[int, Meta(ge=2, le=10_000)] = 8
    spread: Annotated[float, Meta(ge=1e-3, le=1e6)] = 1.0
    announced: Annotated[float, Meta(ge=0, le=1)] = 0.0
    corrupt: Annotated[float, Meta(ge=0, le=1)] = Generator.corrupt
    slow: Annotated[float, Meta(ge=0, le=1e6)] = Generator.slow
    slow_factor: Annotated[float, Meta(ge=1, le=1e3)] = Generator.slow_factor
    slow_hours: Annotated[float, Meta(gt=0, le=1e6)] = Generator.slow_hours

    def __post_init__(self) -> None:
        if self.repair_p90 < self.repair_median:
            raise ValueError(f"repair_p90 {self.repair_p90:g} is below repair_median {self.repair_median:g}")

    def generator(self, days: float, seed: int) -> Generator:
        return Generator(days=days, seed=seed, **msgspec.structs.asdict(self))


@dataclass(frozen=True)
class DeadNodes:
    """Failures of a cluster over a time.

    Attributes:
        shares: shares[k] is the share of the time with k dead nodes.
        events, unexpected: failures per second, and those without a notice; several nodes may fail in one.
        failed: nodes that fail, per second.
        corrupt: failures per second that are silent corruption.
        slow: mean number of slow nodes.
    """

    shares: tuple[float, ...]
    events: float
    unexpected: float
    failed: float
    corrupt: float = 0.0
    slow: float = 0.0

    @classmethod
    def of_model(cls, model: FailureModel, nodes: int, days: float) -> DeadNodes:
        """Return the expectation for a cluster that begins with all nodes alive."""
        rate, largest = model.rate / 1000 / DAY, min(model.burst_nodes, nodes)
        burst = model.burst if largest > 1 else 0.0
        per_event = 1 - burst + burst * (2 + largest) / 2
        in_bursts = burst * (2 + largest) / 2 / per_event
        times = (np.arange(_POINTS) + 0.5) * days * DAY / _POINTS
        down = [_share_down(model, rate, time) for time in times]
        mean = nodes * max(down)
        most = min(nodes, ceil(mean + (8 + 8 * burst) * (sqrt(largest * mean) + largest)))
        z = np.exp(-2j * np.pi * np.arange(2 * most + 2) / (2 * most + 2))  # of generating functions
        shares = np.zeros(len(z))
        for time, share in zip(times, down, strict=True):
            single = (1 + share * (1 - in_bursts) * (z - 1)) ** nodes
            several = _several_down(model, largest, time, z) if burst else 0.0 * z
            slope = nodes * share * in_bursts / (model.spread * nodes)
            shares += np.fft.ifft(single * (1 - slope * several) ** (-model.spread * nodes)).real / _POINTS
        shares[most] += shares[most + 1 :].sum()
        shares = np.maximum(shares[: most + 1], 0.0)
        failed = rate * nodes * (1 - sum(down) / _POINTS)
        events = failed / per_event
        unexpected, slow = events * (1 - model.announced), nodes * model.slow / 1000 * model.slow_hours / 24
        corrupt = unexpected * model.corrupt
        return cls(tuple((shares / shares.sum()).tolist()), events, unexpected, failed, corrupt, slow)

    @classmethod
    def of_trace(cls, trace: FailureTrace) -> DeadNodes:
        seconds = np.zeros(trace.nodes + 1)
        for (since, alive), (until, _) in pairwise([*trace.alive(), (trace.end, 0)]):
            seconds[trace.nodes - alive] += until - since
        most = int(np.flatnonzero(seconds)[-1]) + 1 if seconds.any() else 1
        failures = [change for change in trace.changes if change.failed]
        unexpected = sum(not change.is_announced(change.failed) for change in failures)
        end = trace.end or 1.0
        shares = tuple((seconds[:most] / end).tolist())
        corrupt = sum(change.is_corruption(change.failed) for change in failures)
        slow = sum(min(period.end, end) - period.begin for period in trace.slow) / end
        return cls(shares, len(failures) / end, unexpected / end, trace.failures / end, corrupt / end, slow)


def _repair(model: FailureModel) -> tuple[float, float]:
    """Return mean and standard deviation of the logarithm of the repair time in seconds."""
    return log(model.repair_median * 3600), log(model.repair_p90 / model.repair_median) / _P90 or 1e-9


def _share_down(model: FailureModel, rate: float, after: float) -> float:
    """Return the share of nodes that are down at a time, over nodes with gamma-distributed rates."""
    mu, sigma = _repair(model)
    repaired = NormalDist(mu, sigma).cdf(log(after))
    ended = min(after, exp(min(mu + sigma**2 / 2, 700.0)) * NormalDist(mu + sigma**2, sigma).cdf(log(after)))
    down = rate * (ended + after * (1 - repaired))  # of a node with the mean rate, were it never down
    weights = -np.log(1 - (np.arange(64) + 0.5) / 64)
    if model.spread != 1.0:
        weights = np.sort(np.random.default_rng(0).gamma(model.spread, 1 / model.spread, 4096))[32::64]
    return float(np.mean(weights * down / (1 + weights * down)))


def _several_down(model: FailureModel, largest: int, after: float, z: np.ndarray) -> np.ndarray:
    """Return the generating function of the nodes down from failures of 2 to `largest` nodes, less 1, per mean node."""
    ages = after * ((np.arange(48) + 0.5) / 48) ** 4
    weights = ages**0.75
    mu, sigma = _repair(model)
    down = np.array([1 - NormalDist(mu, sigma).cdf(log(age)) for age in ages])
    each = 1 + down[:, None] * (z - 1)
    rest = np.where(abs(1 - each) < 1e-9, 1.0, 1 - each)
    sums = np.where(rest == 1.0, largest - 1.0, each**2 * (1 - each ** (largest - 1)) / rest)  # of powers 2 to largest
    nodes = (largest - 1) * (largest + 2) / 2
    return np.asarray(weights @ (sums - (largest - 1)) / ((weights @ down) * nodes))


@dataclass(frozen=True)
class Expectation:
    """What a configuration delivers.

    Attributes:
        samples_per_second: of the whole time, with failures.
        fault_free: the same without failures and checkpoints.
        lost: cause -> share of the time; with the effective share they add up to 1.
        restarts: expected restarts from a checkpoint, per second.
    """

    samples_per_second: float
    fault_free: float
    lost: Mapping[str, float]
    restarts: float

    @property
    def effective(self) -> float:
        """Effective training time ratio."""
        return self.samples_per_second / self.fault_free


def kept_share(rate: float, interval: float) -> float:
    """Return the share of work that counts if each failure repeats what was done since the last end of an interval.

    Source: Daly, FGCS 22(3), 2006, for failures at exponential distances: x / (e^x - 1) with x = rate * interval.

    Args:
        rate: failures per second.
        interval: seconds.
    """
    expected = min(rate * interval, 700.0)
    return expected / expm1(expected) if expected else 1.0


def expect(scenario: Scenario, period: float, dead: DeadNodes, model: FailureModel, spares: int) -> Expectation:
    """Return what a scenario with a fault-free period of `period` seconds and `spares` spare nodes delivers."""
    job, nodes = scenario.job, scenario.nodes
    used = nodes / (nodes + spares)
    per_node = len(scenario.node_of) / nodes
    workers_down = [ceil(max(0, k - spares) * per_node) for k in range(len(dead.shares))]
    hosts = np.arange(job.shape.pipelines - 1, 0, -1.0)[:, None]
    least = np.sort(rank_loads(job, hosts).clip(period), axis=None)
    periods = np.array([period, *least, inf])[np.minimum(workers_down, len(least) + 1)]
    speed = float(np.sum(np.array(dead.shares) * period / periods))
    speed *= _speed_beside_slow(scenario, period, dead.slow * used, model.slow_factor)
    stopped = float(np.sum(dead.shares, where=periods == inf))
    rates = dead.events, dead.unexpected, dead.failed, dead.corrupt
    events, unexpected, failed, corrupt = (each * used for each in rates)
    copied = scenario.copy_seconds(scenario.state_per_worker)
    fatal, unnoticed = _fatal_share(scenario, model), scenario.replayed * period
    undone = 0.0 if unnoticed else corrupt  # by reading a checkpoint
    checkpoints = scenario.checkpoints(nodes, scenario.fatal_share)
    pauses, spared = scenario.pauses, min(1.0, spares / max(1, len(dead.shares) - 1))
    seconds = {
        "detect": unexpected * pauses.detect,
        "plan": events * pauses.plan,
        "rebuild": (events + failed) * pauses.rebuild,
        "copy": failed * copied * (1 + spared),
        "restart": (events * fatal + undone) * scenario.restart().restart,
    }
    paused = sum(seconds.values())
    training = exp(-paused)
    lost = {cause: (1 - training) * each / paused if paused else 0.0 for cause, each in seconds.items()}
    repeated = kept_share(unexpected * (1 - fatal), period)
    if checkpoints is not None:
        repeated *= kept_share(unexpected * fatal + undone, checkpoints.every + checkpoints.stall)
    repeated *= exp(-corrupt * (unnoticed or pauses.notice))
    lost["redone"] = training * (1 - repeated)
    saving = 0.0 if checkpoints is None else checkpoints.stall / (checkpoints.every + checkpoints.stall)
    lost["checkpoint"] = training * repeated * saving
    running = training * repeated * (1 - saving)
    lost |= {"degraded": running * (1 - speed - stopped), "stopped": running * stopped}
    fault_free = scenario.samples / period
    return Expectation(fault_free * running * speed, fault_free, lost, events * fatal + undone)


def _speed_beside_slow(scenario: Scenario, period: float, slow: float, factor: float) -> float:
    """Return the mean speed, relative to `period`, with a Poisson-distributed number of slow nodes of mean `slow`."""
    if not slow:
        return 1.0
    shape, places = scenario.shape, Counter[tuple[int, ...]]()  # workers per rank -> nodes with so many
    for _, slots in groupby(range(len(scenario.node_of)), key=scenario.node_of.__getitem__):
        counts = Counter(shape.worker_at(slot).rank for slot in slots)
        places[tuple(counts[rank] for rank in range(shape.ranks))] += 1
    hosts = shape.pipelines - (1 - 1 / factor) * np.array(list(places))
    speeds = period / rank_loads(scenario.job, hosts).max(axis=1).clip(period)
    none_of = slow / scenario.nodes
    mean = below = exp(-slow)  # the probability of no slow node, then of none with a lower speed
    left = scenario.nodes
    for speed, count in sorted(zip(speeds.tolist(), places.values(), strict=True), reverse=True):
        left -= count
        mean += (exp(-none_of * left) - below) * speed
        below = exp(-none_of * left)
    return mean


def _fatal_share(scenario: Scenario, model: FailureModel) -> float:
    """Return the share of failures that take all hosts of a stage or shard, which are on different nodes."""
    hosts = scenario.copies or scenario.shape.pipelines
    groups = scenario.shape.ranks * (scenario.shape.pipelines if scenario.copies else 1)
    if hosts == 1:
        return 1.0
    nodes, largest = scenario.nodes, min(model.burst_nodes, scenario.nodes)
    sizes = range(2, largest + 1)
    if hosts > largest or not sizes:
        return 0.0
    share = sum(comb(size, hosts) for size in sizes) / len(sizes) / comb(nodes, hosts)
    return model.burst * -expm1(-groups * share)
