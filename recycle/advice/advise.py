"""Advice: rank candidates, let the planner price the best, and simulate them over failures."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from math import inf
from typing import NamedTuple

import msgspec
import numpy as np
from msgspec.structs import replace

from recycle.advice.candidates import (
    MICRO_BATCHES,
    Candidate,
    candidates,
    job_of,
    least_period,
    most_samples,
    sequences,
)
from recycle.advice.expectation import DeadNodes, Expectation, FailureModel, expect
from recycle.errors import JobError
from recycle.ir.instruction import Offload
from recycle.ir.simulate import timeline_of
from recycle.job import Job, PricedJob
from recycle.job.profile import Profile
from recycle.job.rules import require_possible
from recycle.job.sections import AUTO
from recycle.plans import Vector, with_updates_of
from recycle.solve.normalize import StageBounds
from recycle.solve.offload import GROWTHS, ROOMS, with_offloads
from recycle.solve.problem import Problem
from recycle.solve.template import template_problem
from recycle.systems.cluster import Outcome, run
from recycle.systems.comparison import Comparison, make_system, references
from recycle.systems.failures import FailureTrace, NodeChange
from recycle.systems.recycle import ReCycle, first_order, first_period, rank_loads
from recycle.systems.scenario import Scenario

LEAST_PLANNED = 20
"""Candidates that the planner may price, however few are returned."""
Progress = Callable[[str, int, int], None]
"""Called with the phase, what is done, and the total."""


@dataclass(frozen=True)
class Advice:
    """A configuration and what it delivers; `job` is ready to be written.

    Attributes:
        period: of the planner's first plan, in seconds.
        spares: nodes that the configuration leaves free.
        copied: bytes of activations that the fullest worker copies to the host in an iteration, and back.
        simulated: outcomes of the simulation, one per seed.
    """

    candidate: Candidate
    job: PricedJob
    period: float
    spares: int
    expected: Expectation
    copied: float = 0.0
    simulated: tuple[Outcome, ...] = ()

    @property
    def scenario(self) -> Scenario:
        return Scenario.of(self.job)

    @property
    def memory(self) -> float:
        """Bytes of the fullest worker: what every schedule needs, and as many micro-batches as may be under way."""
        shape, prices, limits = self.job.shape, self.job.prices, self.job.limits
        activation = prices.per_stage("activation", shape.stages)
        held = []
        for rank in range(shape.ranks):
            own = shape.stages_of_rank(rank)
            most = shape.chunks * min(shape.micro_batches, shape.ranks) if limits is None else limits[rank]
            under_way = min(
                most, shape.chunks * min(shape.micro_batches, shape.ranks - rank + (shape.chunks - 1) * shape.ranks)
            )
            held.append(prices.fixed_bytes(own, shape.stages) + under_way * max(activation[s] for s in own))
        return max(held)


@dataclass(frozen=True)
class Setting:
    """Input of the advice.

    Attributes:
        gpus, per_node: GPUs, and GPUs of a node.
        days: length of the run.
        failures: their rates; `trace` replaces them.
    """

    job: Job
    gpus: int
    per_node: int
    days: float
    failures: FailureModel
    trace: FailureTrace | None = None

    @property
    def nodes(self) -> int:
        return self.gpus // self.per_node

    def dead(self) -> DeadNodes:
        return (
            DeadNodes.of_trace(self.trace) if self.trace else DeadNodes.of_model(self.failures, self.nodes, self.days)
        )

    def traces(self, seeds: Iterable[int]) -> list[FailureTrace]:
        if self.trace:
            return [self.trace.fitted(self.nodes)]
        return [self.failures.generator(self.days, seed).trace(self.nodes) for seed in seeds]


class _Bound(NamedTuple):
    """A candidate in the queue: first by its upper bound of samples per second, negated.

    The bound follows from the work of the layers, then from `period` of the priced job, then from `advice`.
    """

    rate: float
    micro_batch: int
    number: int
    candidate: Candidate
    job: PricedJob | None = None
    period: float = 0.0
    copied: float = 0.0
    advice: Advice | None = None
    is_planned: bool = False


class _Loads(StageBounds):
    """Periods with k dead workers in a rank: the fault-free one, or the load of the rank's fullest worker."""

    def __init__(self, job: PricedJob, fault_free: float) -> None:
        hosts = np.arange(job.shape.pipelines - 1, 0, -1.0)[:, None]
        self.rows = [[fault_free, *row] for row in rank_loads(job, hosts).clip(fault_free).T.tolist()]


class _Fixed(ReCycle):
    """ReCycle in a given configuration, with the periods of `_Loads`."""

    def __init__(self, scenario: Scenario, fault_free: float) -> None:
        super().__init__(scenario)
        self.loads = _Loads(self.job, fault_free)
        rows = enumerate(self.loads.rows)
        self._ranks = [
            rank for _, _, rank in sorted((load, k, rank) for rank, row in rows for k, load in enumerate(row) if k)
        ]

    def _choose_grid(self, scenario: Scenario, staggered: bool) -> tuple[Scenario, PricedJob]:
        planner = replace(scenario.job.planner, **self.techniques)
        return scenario, scenario.job.with_sections(planner=planner)

    @property
    def _bounds(self) -> StageBounds:
        return self.loads

    def _normal_vector(self, dead: int) -> Vector | None:
        counts = Counter(self._ranks[:dead])
        return tuple(counts[rank] for rank in range(self.job.shape.ranks)) if dead <= len(self._ranks) else None

    def _is_searched(self, vector: Vector) -> bool:
        return False

    def period(self, vector: Vector) -> float:
        self._periods[vector] = self.loads.bound_of(vector)
        return self._periods[vector]


def advise(
    setting: Setting, count: int = 5, seeds: Sequence[int] = (0, 1, 2), progress: Progress | None = None
) -> list[Advice]:
    """Return the best configurations, by expected samples per second, with their simulations.

    A candidate's rate is bounded by the work of its layers at first, then by its priced job, then by the planner's
    first plan, for as many as can be among the first `count`, up to a limit. Only planned ones are returned, and of
    those that differ only in the size of a micro-batch the best one.

    Raises:
        JobError: no candidate fits into memory, or a key of the job was set to an impossible value.
    """
    require_possible(setting.job)
    report = progress or (lambda phase, done, total: None)
    job, dead, priced, planned, best = setting.job, setting.dead(), 0, 0, dict[Candidate, Advice]()
    most = most_samples(job)
    bounds = [
        _Bound(-most(candidate), -candidate.micro_batch, number, candidate)
        for number, candidate in enumerate(candidates(job, setting.gpus, setting.per_node))
    ]
    total, most_planned = len(bounds), max(LEAST_PLANNED, count * len(MICRO_BATCHES))
    heapify(bounds)
    while bounds and len(best) < count:
        bound = heappop(bounds)
        alike = bound.candidate._replace(micro_batch=0)
        if alike in best or (planned == most_planned and not bound.is_planned):
            continue
        if bound.job is None:
            priced += 1
            if not priced % 50:
                report("candidates", priced, total)
            shaped = job_of(job, bound.candidate, setting.per_node)
            if shaped is not None and (period := least_period(shaped)[0]) < inf:
                heappush(bounds, bound._replace(rate=-sequences(job) / period, job=shaped, period=period))
            continue
        if bound.advice is not None and bound.is_planned:
            best[alike] = bound.advice
            continue
        if bound.advice is not None:
            planned += 1
            period, copied = first_plan(bound.job)
            report("plans", planned, most_planned)
            bound = bound._replace(period=period, copied=copied, is_planned=True)
        assert bound.job is not None
        advice = advice_of(setting, bound.candidate, bound.job, bound.period, dead, bound.copied)
        heappush(bounds, bound._replace(rate=-advice.expected.samples_per_second, advice=advice))
    if not best:
        shown = f"{job.model.layers} layers and a global batch of {sequences(job)} sequences"
        raise JobError(
            f"no configuration of {shown} fits on {setting.gpus} GPUs and uses half of them; give GPUs with more"
            " memory, a larger batch ([shape] micro_batches), or another number of GPUs"
        )
    advised, traces = list(best.values()), setting.traces(seeds)
    for number, advice in enumerate(advised):
        outcomes = simulate(setting, advice, traces)
        advised[number] = dataclasses.replace(advice, simulated=tuple(outcomes))
        report("simulations", number + 1, len(advised))
    return advised


def advice_of(
    setting: Setting, candidate: Candidate, job: PricedJob, period: float, dead: DeadNodes, copied: float = 0.0
) -> Advice:
    scenario = dataclasses.replace(Scenario.of(job), failure_rate=dead.failed / setting.nodes)
    spares = setting.nodes - scenario.nodes
    return Advice(candidate, job, period, spares, expect(scenario, period, dead, setting.failures, spares), copied)


def simulate(setting: Setting, advice: Advice, traces: Sequence[FailureTrace]) -> list[Outcome]:
    """Run an advised configuration over traces of all nodes, with its spares; plans are made once for all of them."""
    rate = setting.dead().failed / setting.nodes
    scenario = dataclasses.replace(advice.scenario, failure_rate=rate)
    system = _Fixed(scenario, advice.period)
    return [run(system, scenario, with_spares(trace, scenario.nodes)) for trace in traces]


def with_spares(trace: FailureTrace, used: int) -> FailureTrace:
    """Return the trace of the first `used` places of a cluster, whose other nodes replace dead ones.

    A replaced place fails and joins at once. A node that returns is a spare if no place is empty.
    """
    place_of = {node: node for node in trace.up if node < used}
    spare, empty = sorted(trace.up - place_of.keys()), sorted(set(range(used)) - place_of.keys())
    changes = []
    for change in trace.changes:
        failed, joined, causes = set[int](), set[int](), dict[int, str]()
        for node in sorted(change.failed):
            if node in place_of:
                place = place_of.pop(node)
                failed.add(place)
                causes[place] = change.causes.get(node, "")
                empty.append(place)
            else:
                spare.remove(node)
        spare += sorted(change.joined)
        while empty and spare:
            place = empty.pop(0)
            place_of[spare.pop(0)] = place
            joined.add(place)
        if failed or joined:
            changes.append(NodeChange(change.time, frozenset(failed), frozenset(joined), causes))
    up = frozenset(node for node in trace.up if node < used)
    slow = tuple(period for period in trace.slow if period.node < used)
    return FailureTrace(trace.name, used, up, tuple(changes), trace.end, trace.notes, slow)


def first_plan(job: PricedJob) -> tuple[float, float]:
    """Return the period of a first fault-free plan, and the bytes that its fullest worker copies to the host.

    With offloads, the order is one for a looser limit (`solve.offload`): tighter ones are tried until the period grows.
    """
    problem, limits = Problem.from_job(job), job.limits
    if job.memory.offload != AUTO or limits is None:
        return first_period(problem), 0.0
    best, copied = inf, 0.0
    problem, job = template_problem(problem, job.shape.micro_batches), replace(job, grid=replace(job.grid, pipelines=1))
    held = np.array(job.prices.per_stage("activation", job.shape.stages))
    for growth in (inf, *reversed(GROWTHS)):
        looser = dataclasses.replace(problem, cap=tuple(np.floor(growth * np.array(limits)).tolist()))
        schedule = with_updates_of(looser.schedule(first_order(looser).order), job)
        plan = with_offloads(schedule, job.prices, limits, ROOMS[-1])
        period = inf if plan is None else timeline_of(plan, job.prices).period
        if period > best:
            break
        if plan is not None:
            leaves = plan.columns.kind == Offload.kind
            weights = held[plan.columns.stage[leaves]]
            best, copied = period, float(np.bincount(plan.columns.worker[leaves], weights, 1).max())
    return best, copied


CHANGES: dict[str, tuple[str, float]] = {
    "the failure rate doubles": ("failures.rate", 2.0),
    "the slowest tenth of repairs takes twice as long": ("failures.repair_p90", 2.0),
    "twice as many failures take several nodes": ("failures.burst", 2.0),
    "detection takes six times as long": ("pauses.detect", 6.0),
    "kernels reach 0.8 of the assumed speed": ("analytic.achieved", 0.8),
    "links between nodes have half the bandwidth": ("analytic.link_bandwidth", 0.5),
    "links to the host have half the bandwidth": ("memory.host_bandwidth", 0.5),
}
"""Changes of the input for the sensitivity: text -> (key, factor)."""


@dataclass(frozen=True)
class Sensitivity:
    """Samples per second of the first advice after a change of the input, and which of the advised is the best then."""

    change: str
    samples_per_second: float
    best: Candidate


def sensitivity(setting: Setting, advised: Sequence[Advice]) -> list[Sensitivity]:
    """Return the effects of `CHANGES` on the advised configurations, in closed form; the strongest first."""
    result, prices = [], advised[0].job.prices
    for text, (key, factor) in CHANGES.items():
        if "host" in key and not any(each.copied for each in advised):
            continue
        try:
            changed = with_value(setting, key, _value_of(setting, prices, key) * factor)
        except JobError:  # a share above 1
            continue
        dead, rates = changed.dead(), dict[Candidate, float]()
        for advice in advised:
            job = job_of(changed.job, advice.candidate, setting.per_node)
            if job is not None:
                scaled = advice.period * least_period(job)[0] / least_period(advice.job)[0]
                rates[advice.candidate] = advice_of(
                    changed, advice.candidate, job, scaled, dead
                ).expected.samples_per_second
        if rates:
            result.append(Sensitivity(text, rates.get(advised[0].candidate, 0.0), max(rates, key=lambda c: rates[c])))
    return sorted(result, key=lambda each: each.samples_per_second)


def _value_of(setting: Setting, prices: Profile, key: str) -> float:
    section, _, name = key.partition(".")
    links = {"link_bandwidth": prices.bandwidth, "host_bandwidth": prices.host_bandwidth}
    source = setting.failures if section == "failures" else getattr(setting.job, section)
    return float(links.get(name) or getattr(source, name))


def with_value(setting: Setting, key: str, value: object) -> Setting:
    """Return the setting with a key of the job file, or of `failures`, set to a value, of its type or as text.

    Raises:
        JobError: the key does not exist, or the value does not fit.
    """
    section, _, name = key.partition(".")
    source = setting.failures if section == "failures" else getattr(setting.job, section, None)
    if not isinstance(source, msgspec.Struct) or name not in source.__struct_fields__:
        known = ", ".join(f"failures.{field}" for field in FailureModel.__struct_fields__)
        raise JobError(f"--set {key}: no such key: write SECTION.KEY of the job file, or one of {known}")
    try:
        changed = msgspec.convert({**msgspec.to_builtins(source), name: value}, type(source), strict=False)
    except msgspec.ValidationError as error:
        raise JobError(f"--set {key}={value}: {error}") from None
    if section == "failures":
        assert isinstance(changed, FailureModel)
        return dataclasses.replace(setting, failures=changed)
    return dataclasses.replace(setting, job=replace(setting.job, **{section: changed}))


def compare_with(setting: Setting, advice: Advice, systems: Sequence[str], seed: int = 0) -> Comparison:
    """Run other systems and an advised configuration over the same workers, spares and failures.

    The systems choose their grids on these workers. The first outcome is the advised configuration's.
    """
    (trace,) = setting.traces([seed])
    scenario = dataclasses.replace(advice.scenario, failure_rate=trace.rate)
    used = with_spares(trace, scenario.nodes)
    outcomes = simulate(setting, advice, [trace])
    outcomes += [dataclasses.replace(run(make_system(name, scenario), scenario, used), system=name) for name in systems]
    live = used.node_seconds() / (used.nodes * used.end) if used.end else 1.0
    return Comparison(used, references(scenario), live, tuple(outcomes))
