"""ReCycle: live peers run the micro-batches of dead workers (Gandhi et al., SOSP '24, arXiv 2405.14009).

The planner's list scheduler gives the period of a failure vector. Vectors planned ahead get a search with a fixed
number of steps, unless the problem is large. A plan for more dead workers also serves, with idle workers. Live workers
change stage to reach the best vector for their number if copying pays before the next failure is due.

A node that joins takes a position of the stage with most dead workers and copies from a peer. If a stage has no live
worker, or a shard (docs/guides/sharded-optimizer.md) no owner, all workers restart from a checkpoint. The pause
includes copies of the dead workers' shards. Plans are ready when a failure occurs.

Shape and optimizer mode have the shortest fault-free period that fits. A staggered optimizer keeps the previous state
on device or host; the copy to the host counts fully as part of the step.

Limits: needs bubbles; with many micro-batches and few pipelines a dead worker costs its share. Additional shards of
live hosts are not counted against their memory.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import cache, cached_property, partial
from math import ceil, inf
from typing import ClassVar, Literal

import numpy as np
from msgspec.structs import replace

from recycle.errors import JobError
from recycle.job import PricedJob
from recycle.job.profile import Profile
from recycle.job.sections import ANALYTIC
from recycle.job.shape import Worker
from recycle.plans import Plan, Vector, arrange, dead_roles, plan_key
from recycle.solve.bounds import closed_form
from recycle.solve.effort import Effort, Incumbent
from recycle.solve.normalize import StageBounds, cheapest
from recycle.solve.planner import plan_vector
from recycle.solve.problem import Problem
from recycle.solve.search.initial_orders import find_initial_order
from recycle.solve.template import template_problem
from recycle.systems.grids import CheckpointedSystem
from recycle.systems.scenario import Scenario
from recycle.systems.system import ActiveConfiguration, Change, DoesNotFit, Loss, Nodes, State, Stopped, TimedSchedule

POLICIES, OPERATIONS = 4, 20_000
"""Policies of the list scheduler per vector, as in `recycle plan --quick`; fewer on large problems, at least one."""
SEARCH_STEPS, SEARCHED_UP_TO = 50, 4_000
"""Search steps for plans made ahead, and maximum number of operations for the search."""
NEAR = 1.05
"""Ratio to the aim up to which a plan for more dead workers is used."""
CHEAP = 0.002
"""Share of the time until the next failure that copying may take without comparing the alternative."""
_SEARCHED: dict[str, Plan] = {}
"""Plans by cache key, kept for the process: the same plan serves every trace."""
_FIRST, _LEAN = float(1 << 20), 1e-6
_TOLERANCE = 1e-9


_OptimizerMode = tuple[bool, Literal["device", "host"]]
"""(whether it is staggered, where the state before a staggered step is kept)."""


@dataclass(frozen=True, kw_only=True)
class PlanConfiguration(ActiveConfiguration):
    """An active plan: the slot of each occupied position, and its vector, at each rank at least the dead workers."""

    slots: dict[Worker, int]
    vector: Vector


class ReCycle(CheckpointedSystem[PlanConfiguration]):
    """ReCycle on a scenario. Adaptive Pipelining is always on; the other two techniques are optional.

    Args:
        decoupled: Decoupled BackProp; otherwise the backward pass is one operation.
        staggered: Staggered Optimizer, if it pays; otherwise all stages step together.
        move: live workers may change stage.
    """

    name = "recycle"
    copies: ClassVar[int | None] = None
    counts_reads = True

    def __init__(
        self,
        scenario: Scenario,
        *,
        decoupled: bool = True,
        staggered: bool = True,
        move: bool = True,
    ) -> None:
        super().__init__(scenario)
        self.techniques = {"decoupled": decoupled, "reroute": True, "move": move}
        self.scenario, self.job = self._choose_grid(self.scenario, staggered)
        self.profile = self.job.prices
        self._periods: dict[Vector, float] = {}
        self.normal_vector = cache(self._normal_vector)
        self._plans: dict[Vector, Plan] = {}

    def _with_mode(self, scenario: Scenario, mode: _OptimizerMode) -> PricedJob:
        staggered, undo = mode
        planner = replace(scenario.job.planner, **self.techniques, staggered=staggered)
        if scenario.job.times.profile == ANALYTIC:  # their bytes and seconds follow from the techniques
            train = replace(scenario.job.train, undo=undo)
            return scenario.job.with_sections(planner=planner, train=train)
        return replace(scenario.job, planner=planner)

    def _optimizer_modes(self, scenario: Scenario, staggered: bool) -> list[_OptimizerMode]:
        own = staggered, scenario.job.train.undo
        if scenario.job.times.profile != ANALYTIC or not staggered:
            return [own]
        return list(dict.fromkeys([own, (True, "device"), (True, "host"), (False, "device")]))

    def _choose_grid(self, scenario: Scenario, staggered: bool) -> tuple[Scenario, PricedJob]:
        modes = self._optimizer_modes(scenario, staggered)
        best, least = (scenario, self._with_mode(scenario, modes[0])), inf
        workers = len(scenario.node_of)
        for ranks in range(1, min(len(scenario.layers), workers) + 1):
            pipelines = workers // ranks
            try:
                shaped = scenario if ranks == scenario.shape.ranks else scenario.with_shape(pipelines, ranks)
            except JobError:
                continue
            load = scenario.micro_batches / pipelines * max(scenario.seconds_per_stage(ranks))
            if pipelines == 1 and ranks != scenario.shape.ranks:
                continue
            for job in (self._with_mode(shaped, mode) for mode in modes):
                if load >= least or _misfit(shaped, job) is not None:
                    continue
                if (period := first_period(Problem.from_job(job))) < least:
                    best, least = (shaped, job), period
        return best

    # ---- the protocol

    def begin(self, live: Nodes) -> State | DoesNotFit:
        return _misfit(self.scenario, self.job) or self._place(live)

    def survive(self, state: PlanConfiguration, live: Nodes, failed: Nodes, joined: Nodes) -> Change | None:
        scenario = self.scenario
        gone = frozenset(scenario.slots(failed))
        slots = {position: slot for position, slot in state.slots.items() if slot not in gone}
        has_hosts = len({position.rank for position in slots}) == scenario.shape.ranks
        if not has_hosts or self._loses_shard(state.slots, gone):
            return None
        free = sorted(set(scenario.slots(state.live)).difference(state.slots.values(), gone)) + scenario.slots(joined)
        touched = len(slots) < len(state.slots)
        restored, busiest = self._shard_copies(state.slots, slots)
        slots, received = self._fill_positions(slots, free)
        slots, moved, seconds = self._normalize(slots)
        after = self._configuration(live, slots)
        if after.slots == state.slots:
            return Change(state=after, event="spare")
        return Change(
            state=after,
            pause=dataclasses.replace(
                scenario.pause(detected=touched),
                copy=seconds + scenario.copy_seconds(max([*received, busiest])),
            ),
            loss=Loss.ITERATION if touched else Loss.NOTHING,
            bytes=moved + sum(received) + restored,
            event="re-route" if touched else "join",
        )

    def pace(self, state: PlanConfiguration, slow: Mapping[int, float]) -> float:
        """Return the factor of the period if slow workers give micro-batches to their peers, as far as that helps."""
        hosts = np.zeros(self.scenario.shape.ranks)
        for position, slot in state.slots.items():
            hosts[position.rank] += 1 / slow.get(self.scenario.node_of[slot], 1.0)
        return max(1.0, float(rank_loads(self.job, hosts).max()) / state.period)

    def unnoticed(self, state: PlanConfiguration) -> float:
        return self.scenario.replayed * state.period

    def _loses_shard(self, slots: dict[Worker, int], gone: Collection[int]) -> bool:
        hosts = range(self.scenario.shape.pipelines)
        return any(
            self.scenario.loses_shard([slots.get(Worker(k, rank)) for k in hosts], gone)
            for rank in {position.rank for position, slot in slots.items() if slot in gone}
        )

    def _shard_copies(self, before: dict[Worker, int], after: dict[Worker, int]) -> tuple[float, float]:
        """Return the bytes of shards that are copied, in all and to the busiest worker."""
        shape, restored, busiest = self.scenario.shape, 0.0, 0.0
        owned_of_rank = self._per_rank(self.scenario.owned_per_stage())
        hosts = Counter(position.rank for position in after)
        for rank, died in sorted(Counter(position.rank for position in before.keys() - after.keys()).items()):
            owned, survivors = owned_of_rank[rank], hosts[rank]
            if owned and survivors >= self.scenario.copies:
                shard = owned / self.scenario.copies
                shards = died * self.scenario.copies * shape.pipelines // (died + survivors)
                restored += shards * shard
                busiest = max(busiest, ceil(shards / survivors) * shard)
        return restored, busiest

    def _schedules(self, vector: Vector) -> list[TimedSchedule]:
        plan = self._plans.get(vector) or plan_vector(self.job, vector, True)
        return [(plan.schedule, self.profile)]

    def period(self, vector: Vector) -> float:
        """Return the period of a vector's plan, in the job's unit of time, after a search if planned ahead."""
        if vector not in self._periods:
            problem = Problem.from_job(self.job, dead_roles(self.job.shape, vector), self.profile)
            self._periods[vector] = first_period(problem)
        return self._periods[vector]

    def serving_vector(self, vector: Vector) -> Vector | None:
        """Return the vector of the best plan so far that serves `vector`; None without one."""
        fitting = [v for v in self._periods if all(a >= b for a, b in zip(v, vector, strict=True))]
        return min(fitting, key=lambda v: (self._periods[v], v), default=None)

    def _normal_vector(self, dead: int) -> Vector | None:
        thresholds = self._bounds.thresholds(dead)
        if not thresholds:
            return None
        room = self._bounds.room(thresholds[0])
        costs: list[Callable[[int, int], float]] = [
            lambda rank, k: k * k + _LEAN * rank * k,
            lambda rank, k: k * k - _LEAN * rank * k,
            lambda rank, k: _FIRST * (k > 0) + k * k,
        ]
        candidates = dict.fromkeys(cheapest(room, dead, cost) for cost in costs)
        best = min((v for v in candidates if v is not None), key=self.period, default=None)
        return None if best is None else self._search_ahead(best)

    def _search_ahead(self, vector: Vector) -> Vector:
        size = 3 * self.job.shape.stages * self.job.shape.global_micro_batches
        if self._is_searched(vector) and size <= SEARCHED_UP_TO and vector not in self._plans:
            key = plan_key(self.job, vector)
            plan = _SEARCHED.get(key) or plan_vector(self.job, vector, steps=SEARCH_STEPS)
            _SEARCHED[key] = plan
            if plan.period < self.period(vector):
                self._plans[vector], self._periods[vector] = plan, plan.period
        return vector

    def _is_searched(self, vector: Vector) -> bool:
        return sum(vector) <= self.job.planner.ahead

    # ---- where workers sit

    def _configuration(self, live: Nodes, slots: dict[Worker, int]) -> PlanConfiguration:
        scenario = self.scenario
        dead_vector = self._vector(slots)
        vector = self.serving_vector(dead_vector)
        normal = self.normal_vector(sum(dead_vector)) if self.job.planner.move else None
        aim = self._bounds.bound_of(dead_vector) if normal is None else self.period(normal)
        if vector is None or self.period(vector) > NEAR * aim:
            self.period(dead_vector if self.job.planner.move else self._search_ahead(dead_vector))
            vector = self.serving_vector(dead_vector)
        assert vector is not None
        return PlanConfiguration(
            live=live,
            period=self.period(vector),
            samples=scenario.samples,
            idle=len(scenario.slots(live)) - len(slots) + sum(vector) - sum(dead_vector),
            checkpoints=scenario.checkpoints(len(live), scenario.fatal_share),
            layout=f"{scenario.shape.pipelines} x {scenario.shape.ranks}",
            schedules=partial(self._schedules, vector),
            slots=slots,
            vector=vector,
        )

    def _vector(self, slots: dict[Worker, int]) -> Vector:
        shape = self.scenario.shape
        hosts = Counter(position.rank for position in slots)
        return tuple(shape.pipelines - hosts[rank] for rank in range(shape.ranks))

    def _place(self, live: Nodes) -> State:
        shape = self.scenario.shape
        slots = {shape.worker_at(slot): slot for slot in self.scenario.slots(live)}
        if len(slots) < shape.ranks:
            return Stopped(live=live, reason=f"{len(slots)} live worker(s) cannot host {shape.ranks} stages")
        for rank in sorted(set(range(shape.ranks)) - {position.rank for position in slots}):
            hosts = Counter(position.rank for position in slots)
            giver = max(slots, key=lambda position: (hosts[position.rank], position))
            slots[Worker(giver.pipeline, rank)] = slots.pop(giver)
        return self._configuration(live, self._normalize(slots, copied=False)[0])

    def _fill_positions(self, slots: dict[Worker, int], free: list[int]) -> tuple[dict[Worker, int], list[float]]:
        shape, slots, received = self.scenario.shape, dict(slots), []
        for slot in free:
            dead = self._vector(slots)
            if not any(dead):
                break
            home = shape.worker_at(slot)
            rank = max(range(shape.ranks), key=lambda rank: (dead[rank], rank == home.rank, -rank))
            vacant = [Worker(k, rank) for k in range(shape.pipelines) if Worker(k, rank) not in slots]
            slots[home if home in vacant else vacant[0]] = slot
            received.append(self._state[rank])
        return slots, received

    def _normalize(self, slots: dict[Worker, int], copied: bool = True) -> tuple[dict[Worker, int], float, float]:
        shape = self.scenario.shape
        dead_vector = self._vector(slots)
        target = self.normal_vector(sum(dead_vector)) if self.job.planner.move else None
        if target is None or target == dead_vector:
            return slots, 0.0, 0.0
        # move towards the normal vector, or any that its period serves, with the fewest moves
        best = self.period(target)
        served = self.serving_vector(dead_vector)
        if served is not None and self.period(served) <= best * (1 + _TOLERANCE):
            return slots, 0.0, 0.0
        vacant = frozenset(shape.workers()) - slots.keys()
        arranged = arrange(shape, vacant, target, self._copying)
        if copied and arranged.seconds > CHEAP * best * (iterations := self._iterations_until_change()):
            gain = max(self._bounds.bound_of(dead_vector) - best, 0.0) or self.period(dead_vector) - best
            if gain * iterations <= arranged.seconds:
                return slots, 0.0, 0.0
        slots = dict(slots)
        for move in arranged.moves:
            slots[Worker.parse(move.role)] = slots.pop(Worker.parse(move.worker))
        slots = {position: slot for position, slot in slots.items() if position not in arranged.vacant}
        return slots, sum(move.bytes for move in arranged.moves), arranged.seconds

    def _iterations_until_change(self) -> float:
        scenario = self.scenario
        if not scenario.failure_rate:
            return self.job.planner.iterations_between_changes
        return 1 / (scenario.failure_rate * scenario.nodes * self.period((0,) * scenario.shape.ranks))

    @cached_property
    def _state(self) -> list[float]:
        return self._per_rank(self.scenario.state_per_stage())

    def _per_rank(self, per_stage: list[float]) -> list[float]:
        shape = self.scenario.shape
        return [sum(per_stage[s] for s in shape.stages_of_rank(rank)) for rank in range(shape.ranks)]

    @cached_property
    def _copying(self) -> Profile:
        return Profile(
            latency=self.scenario.latency, bandwidth=self.scenario.bandwidth, static=self.scenario.state_per_stage()
        )

    @cached_property
    def _bounds(self) -> StageBounds:
        return StageBounds(self.job, self.job.shape.pipelines - 1)


def rank_loads(job: PricedJob, hosts: np.ndarray) -> np.ndarray:
    """Return the seconds of an iteration of each rank's fullest host.

    Args:
        hosts: number of live hosts of each rank's stages, in the last dimension; a slow one counts as less than one.
    """
    shape, prices = job.shape, job.prices

    def per_rank(*names: str) -> np.ndarray:
        stages = [sum(each) for each in zip(*(prices.per_stage(name, shape.stages) for name in names), strict=True)]
        return np.array([sum(stages[s] for s in shape.stages_of_rank(rank)) for rank in range(shape.ranks)])

    each = per_rank("forward", "backward_input", "backward_weight")
    micro_batches = np.ceil(shape.global_micro_batches / hosts - _TOLERANCE)
    return np.asarray(micro_batches * each + per_rank("reduce", "step", "gather"))


def first_period(problem: Problem) -> float:
    return first_order(problem).period


def first_order(problem: Problem) -> Incumbent:
    """Return the order of the list scheduler; of one pipeline if all are alike."""
    if not problem.dead and problem.peers_are_alike:
        problem = template_problem(problem, problem.shape.micro_batches)
    policies = max(1, min(POLICIES, OPERATIONS // problem.size))
    return find_initial_order(problem, Effort(closed_form(problem)), policies).best


def _misfit(scenario: Scenario, job: PricedJob) -> DoesNotFit | None:
    shape, profile = scenario.shape, job.prices
    activation = profile.per_stage("activation", shape.stages)
    worker = scenario.fullest(
        [
            profile.fixed_bytes(stages, shape.stages) + shape.chunks * max(activation[s] for s in stages)
            for stages in map(shape.stages_of_rank, range(shape.ranks))
        ]
    )
    if worker.fits:
        return None
    reason = f"rank {worker.rank} needs {worker.needed:.6g} bytes for one micro-batch and may hold {worker.cap:.6g}"
    return worker.does_not_fit(reason)
