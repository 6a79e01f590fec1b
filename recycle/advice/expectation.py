"""What a configuration delivers under failures, in closed form.

A node that fails costs a pause and half an iteration, one that returns a pause. Between these, the iteration takes the
period for the number of dead nodes, which spares replace first; the others are spread over the stages where they cost
least: with k of D hosts dead, the others of a stage run up to ceil(D m / (D - k)) micro-batches. A failure that takes
all hosts of a stage, or of a shard of the optimizer's state, costs a restart and half a checkpoint interval, whose
length follows Young's rule (CACM 17(9), 1974).

The number of dead nodes at a time is Poisson-distributed. Its mean follows from the rate, which varies between nodes
with a gamma distribution, and the lognormal repair time, as in `systems.failure_generator`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain, pairwise
from math import ceil, comb, expm1, inf, log, sqrt
from statistics import NormalDist
from typing import Annotated

import msgspec
import numpy as np
from msgspec import Meta

from recycle.job import PricedJob
from recycle.systems.failure_generator import Generator
from recycle.systems.failures import FailureTrace
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
    """

    rate: Annotated[float, Meta(ge=0, le=1e6)] = 4.2
    repair_median: Annotated[float, Meta(gt=0, le=1e6)] = 20.0
    repair_p90: Annotated[float, Meta(gt=0, le=1e6)] = 312.0
    burst: Annotated[float, Meta(ge=0, le=1)] = 0.05
    burst_nodes: Annotated[int, Meta(ge=2, le=10_000)] = 8
    spread: Annotated[float, Meta(gt=0, le=1e6)] = 1.0

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
        events: failures per second; several nodes may fail in one.
        failed: nodes that fail, per second.
    """

    shares: tuple[float, ...]
    events: float
    failed: float

    @classmethod
    def of_model(cls, model: FailureModel, nodes: int, days: float) -> DeadNodes:
        """Return the expectation for a cluster that begins with all nodes alive."""
        rate = model.rate / 1000 / DAY
        means = [
            nodes * _share_down(model, rate, at * days * DAY / _POINTS) for at in (k + 0.5 for k in range(_POINTS))
        ]
        most = min(nodes, ceil(max(means) + 8 * sqrt(max(means)) + 8))
        shares = np.mean([_poisson(mean, most) for mean in means], axis=0)
        failed = rate * nodes * (1 - sum(means) / _POINTS / nodes)
        largest = min(model.burst_nodes, nodes)
        per_event = 1 if largest < 2 else 1 - model.burst + model.burst * (2 + largest) / 2
        return cls(tuple((shares / shares.sum()).tolist()), failed / per_event, failed)

    @classmethod
    def of_trace(cls, trace: FailureTrace) -> DeadNodes:
        seconds = np.zeros(trace.nodes + 1)
        for (since, alive), (until, _) in pairwise([*trace.alive(), (trace.end, 0)]):
            seconds[trace.nodes - alive] += until - since
        most = int(np.flatnonzero(seconds)[-1]) + 1 if seconds.any() else 1
        events = sum(bool(change.failed) for change in trace.changes)
        end = trace.end or 1.0
        return cls(tuple((seconds[:most] / end).tolist()), events / end, trace.failures / end)


def _share_down(model: FailureModel, rate: float, after: float) -> float:
    """Return the share of nodes that are down at a time, over nodes with gamma-distributed rates."""
    mu, sigma = log(model.repair_median * 3600), log(model.repair_p90 / model.repair_median) / _P90 or 1e-9
    steps = np.linspace(0.0, after, 513)[1:]
    gone = np.array([NormalDist(mu, sigma).cdf(log(step)) for step in steps])
    down = after - float(gone.mean()) * after  # integral of the share not yet repaired
    weights = [(k + 0.5) / 64 for k in range(64)]
    if model.spread == 1.0:
        weights = [-log(1 - weight) for weight in weights]
    else:
        draws = np.sort(np.random.default_rng(0).gamma(model.spread, 1 / model.spread, 4096))
        weights = [float(draws[int(weight * 4096)]) for weight in weights]
    return sum(weight * rate * down / (1 + weight * rate * down) for weight in weights) / len(weights)


def _poisson(mean: float, most: int) -> np.ndarray:
    counts = np.arange(most + 1)
    logs = np.concatenate([[0.0], np.cumsum(np.log(np.maximum(mean, 1e-300) / counts[1:]))])
    return np.exp(logs - mean)


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


def loads_per_rank(job: PricedJob) -> list[list[float]]:
    """Return, for 1 to D - 1 dead hosts, the seconds of an iteration of each rank's fullest other host."""
    shape, prices = job.shape, job.prices

    def per_rank(*names: str) -> list[float]:
        stages = [sum(each) for each in zip(*(prices.per_stage(name, shape.stages) for name in names), strict=True)]
        return [sum(stages[s] for s in shape.stages_of_rank(rank)) for rank in range(shape.ranks)]

    each = per_rank("forward", "backward_input", "backward_weight")
    once = per_rank("reduce", "step", "gather")
    micro_batches = [ceil(shape.global_micro_batches / hosts) for hosts in range(shape.pipelines - 1, 0, -1)]
    return [[count * a + b for a, b in zip(each, once, strict=True)] for count in micro_batches]


def expect(scenario: Scenario, period: float, dead: DeadNodes, model: FailureModel, spares: int) -> Expectation:
    """Return what a scenario with a fault-free period of `period` seconds and `spares` spare nodes delivers."""
    job, nodes = scenario.job, scenario.nodes
    used = nodes / (nodes + spares)
    per_node = len(scenario.node_of) / nodes
    least, workers_down = (
        sorted(chain.from_iterable(loads_per_rank(job))),
        [ceil(max(0, k - spares) * per_node) for k in range(len(dead.shares))],
    )
    periods = [max(period, [period, *least, inf][min(down, len(least) + 1)]) for down in workers_down]
    speed = sum(share * period / each for share, each in zip(dead.shares, periods, strict=True))
    stopped = sum(share for share, each in zip(dead.shares, periods, strict=True) if each == inf)
    events, failed = dead.events * used, dead.failed * used
    copied = scenario.copy_seconds(scenario.state_per_worker)
    fatal = _fatal_share(scenario, model)
    checkpoints = scenario.checkpoints(nodes, max(fatal, 1e-9))
    every, stall = (inf, 0.0) if checkpoints is None else (checkpoints.every, checkpoints.stall)
    pauses, spared = scenario.pauses, min(1.0, spares / max(1, len(dead.shares) - 1))
    lost = {
        "detect": events * pauses.detect,
        "plan": events * pauses.plan,
        "rebuild": (events + failed) * pauses.rebuild,
        "copy": failed * copied * (1 + spared),
        "redone": events * (1 - fatal) * period / 2 + (events * fatal * every / 2 if events and fatal else 0.0),
        "restart": events * fatal * scenario.restart().restart,
        "checkpoint": stall / (every + stall) if stall else 0.0,
    }
    running = max(0.0, 1 - sum(lost.values()))
    lost |= {"degraded": running * (1 - speed - stopped), "stopped": stopped}
    fault_free = scenario.samples / period
    return Expectation(fault_free * running * speed, fault_free, lost, events * fatal)


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
