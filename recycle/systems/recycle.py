"""ReCycle: live peers run the micro-batches of dead workers (Gandhi et al., SOSP '24, arXiv 2405.14009).

The planner's list scheduler gives the period of a failure vector. Vectors planned ahead get a search with a fixed
number of steps, unless the problem is large. A plan for more dead workers also serves, with idle workers. Live workers
change stage to reach the best vector for their number if copying pays before the next failure is due.

A node that joins takes a position of the stage with most dead workers and copies from a peer. If a stage has no live
worker, or a shard (docs/guides/sharded-optimizer.md) no owner, all workers restart from a checkpoint. The iteration in
progress is repeated. Plans are ready when a failure occurs, so planning takes the time in `[pauses]`. With a sharded
optimizer the pause includes copies of the dead workers' shards.

Shape and optimizer mode have the shortest fault-free period that fits. A staggered optimizer keeps the previous state
on device or host; the copy to the host counts fully as part of the step. A barrier keeps no state.

Limits: needs bubbles; with many micro-batches and few pipelines a dead worker costs its share. Delayed weight gradients
keep activations alive. Additional shards of live hosts are not counted against their memory.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import cached_property, partial
from math import ceil, inf
from typing import ClassVar, Literal, NamedTuple

from msgspec.structs import replace

from recycle.errors import JobError
from recycle.job import PricedJob
from recycle.job.profile import Profile
from recycle.job.sections import ANALYTIC
from recycle.job.shape import Worker
from recycle.plans import Plan, Vector, arrange, dead_roles, plan_key
from recycle.solve.bounds import closed_form
from recycle.solve.effort import Effort
from recycle.solve.normalize import StageBounds, cheapest
from recycle.solve.planner import plan_vector
from recycle.solve.problem import Problem
from recycle.solve.search.initial_orders import find_initial_order
from recycle.solve.template import template_problem
from recycle.systems.grids import CheckpointedSystem
from recycle.systems.setting import FATAL_SHARE, Setting
from recycle.systems.system import Change, DoesNotFit, Loss, Nodes, Running, State, Stopped, Timed

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


@dataclass(frozen=True, kw_only=True)
class RecycleRunning(Running):
    """An active plan.

    Attributes:
        slots: slot of each occupied position.
        vector: of the plan; at each rank at least the number of dead workers.
    """

    slots: dict[Worker, int]
    vector: Vector


class _Way(NamedTuple):
    """Optimizer mode: staggered or not, and where the state before a staggered step is kept."""

    staggered: bool
    undo: Literal["device", "host"]


class ReCycle(CheckpointedSystem[RecycleRunning]):
    """ReCycle on a setting. Adaptive Pipelining is always on; the other two techniques are optional.

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
        setting: Setting,
        *,
        decoupled: bool = True,
        staggered: bool = True,
        move: bool = True,
    ) -> None:
        super().__init__(setting)
        self.move = move
        self.techniques = {"decoupled": decoupled, "reroute": True, "move": move}
        self.setting, self.job = self._best(self.setting, staggered)
        self.profile = self.job.prices
        self._periods: dict[Vector, float] = {}
        self._normal: dict[int, Vector | None] = {}
        self._plans: dict[Vector, Plan] = {}

    def _planned(self, setting: Setting, way: _Way) -> PricedJob:
        techniques = self.techniques | {"staggered": way.staggered}
        planner = replace(setting.job.planner, **techniques)
        if setting.job.times.profile == ANALYTIC:  # their bytes and seconds follow from the techniques
            train = replace(setting.job.train, undo=way.undo)
            return setting.job.with_sections(planner=planner, train=train)
        return replace(setting.job, planner=planner)

    def _ways(self, setting: Setting, staggered: bool) -> list[_Way]:
        own = _Way(staggered, setting.job.train.undo)
        if setting.job.times.profile != ANALYTIC or not staggered:
            return [own]
        return list(dict.fromkeys([own, _Way(True, "device"), _Way(True, "host"), _Way(False, "device")]))

    def _best(self, setting: Setting, staggered: bool) -> tuple[Setting, PricedJob]:
        ways = self._ways(setting, staggered)
        best, least = (setting, self._planned(setting, ways[0])), inf
        workers = len(setting.node_of)
        for ranks in range(1, min(len(setting.layers), workers) + 1):
            pipelines = workers // ranks
            try:
                shaped = setting if ranks == setting.shape.ranks else setting.reshaped(pipelines, ranks)
            except JobError:
                continue
            load = setting.micro_batches / pipelines * max(setting.seconds_per_stage(ranks))
            if pipelines == 1 and ranks != setting.shape.ranks:
                continue
            for job in (self._planned(shaped, way) for way in ways):
                if load >= least or _misfit(shaped, job) is not None:
                    continue
                if (period := _period(Problem.from_job(job))) < least:
                    best, least = (shaped, job), period
        return best

    # ---- the protocol

    def begin(self, live: Nodes) -> State | DoesNotFit:
        return _misfit(self.setting, self.job) or self._placed(live)

    def survive(self, state: RecycleRunning, live: Nodes, failed: Nodes, joined: Nodes) -> Change | None:
        setting = self.setting
        gone = frozenset(setting.slots(failed))
        slots = {position: slot for position, slot in state.slots.items() if slot not in gone}
        has_hosts = len({position.rank for position in slots}) == setting.shape.ranks
        if not has_hosts or self._loses_shard(state.slots, gone):
            return None
        free = sorted(set(setting.slots(state.live)).difference(state.slots.values(), gone)) + setting.slots(joined)
        return self._adapted(live, state, slots, free)

    def _adapted(self, live: Nodes, before: RecycleRunning, slots: dict[Worker, int], free: list[int]) -> Change:
        touched = len(slots) < len(before.slots)
        restored, busiest = self._restored(before.slots, slots)
        slots, received = self._filled(slots, free)
        slots, moved, seconds = self._normalized(slots)
        after = self._running(live, slots)
        if after.slots == before.slots:
            return Change(state=after, event="spare")
        return Change(
            state=after,
            pause=dataclasses.replace(
                self.setting.pause(detected=touched),
                copy=seconds + self.setting.copy_seconds(max([*received, *busiest], default=0.0)),
            ),
            loss=Loss.ITERATION if touched else Loss.NOTHING,
            bytes=moved + sum(received) + sum(restored),
            event="re-route" if touched else "join",
        )

    def _loses_shard(self, slots: dict[Worker, int], gone: Collection[int]) -> bool:
        shape = self.setting.shape
        return any(
            self.setting.loses_shard([slots.get(Worker(k, rank)) for k in range(shape.pipelines)], gone)
            for rank in range(shape.ranks)
        )

    def _restored(self, before: dict[Worker, int], after: dict[Worker, int]) -> tuple[list[float], list[float]]:
        shape, restored, busiest = self.setting.shape, list[float](), list[float]()
        for rank, owned in enumerate(self._owned):
            died = sum(position.rank == rank for position in before.keys() - after.keys())
            left = sum(position.rank == rank for position in after)
            if died and owned and left >= self.setting.copies:
                shard = owned / self.setting.copies
                shards = died * self.setting.copies * shape.pipelines // (died + left)
                restored.append(shards * shard)
                busiest.append(ceil(shards / left) * shard)
        return restored, busiest

    def _schedules(self, vector: Vector) -> list[Timed]:
        made = self._plans.get(vector) or plan_vector(self.job, vector, True)
        return [(made.schedule, self.profile)]

    def period(self, vector: Vector) -> float:
        """Return the period of a vector's plan, in the job's unit of time, after a search if planned ahead."""
        if vector not in self._periods:
            problem = Problem.from_job(self.job, dead_roles(self.job.shape, vector), self.profile)
            self._periods[vector] = _period(problem)
        return self._periods[vector]

    def serving(self, vector: Vector) -> Vector | None:
        """Return the vector of the best plan so far that serves `vector`; None without one."""
        fitting = [v for v in self._periods if all(a >= b for a, b in zip(v, vector, strict=True))]
        return min(fitting, key=lambda v: (self._periods[v], v), default=None)

    def normal(self, dead: int) -> Vector | None:
        """Return the normal vector for a number of dead workers; None if they are too many."""
        if dead not in self._normal:
            bounds = self._bounds
            values = sorted({bound for row in bounds.rows for bound in row})
            room = next((room for room in map(bounds.room, values) if sum(room) >= dead), None)
            costs: list[Callable[[int, int], float]] = [
                lambda rank, k: k * k + _LEAN * rank * k,
                lambda rank, k: k * k - _LEAN * rank * k,
                lambda rank, k: _FIRST * (k > 0) + k * k,
            ]
            found = dict.fromkeys(cheapest(room, dead, cost) for cost in costs) if room is not None else {}
            best = min((v for v in found if v is not None), key=self.period, default=None)
            self._normal[dead] = best if best is None else self._ahead(best)
        return self._normal[dead]

    def _ahead(self, vector: Vector) -> Vector:
        size = 3 * self.job.shape.stages * self.job.shape.global_micro_batches
        if self._is_searched(vector) and size <= SEARCHED_UP_TO and vector not in self._plans:
            key = plan_key(self.job, vector)
            made = _SEARCHED.get(key) or plan_vector(self.job, vector, steps=SEARCH_STEPS)
            _SEARCHED[key] = made
            if made.period < self.period(vector):
                self._plans[vector], self._periods[vector] = made, made.period
        return vector

    def _is_searched(self, vector: Vector) -> bool:
        return sum(vector) <= self.job.planner.ahead

    # ---- where workers sit

    def _running(self, live: Nodes, slots: dict[Worker, int]) -> RecycleRunning:
        setting = self.setting
        here = self._vector(slots)
        vector = self.serving(here)
        normal = self.normal(sum(here)) if self.move else None
        aim = self._bounds.bound_of(here) if normal is None else self.period(normal)
        if vector is None or self.period(vector) > NEAR * aim:
            self.period(here if self.move else self._ahead(here))
            vector = self.serving(here)
        assert vector is not None
        fatal = FATAL_SHARE if setting.shape.pipelines > 1 and setting.copies != 1 else 1.0
        return RecycleRunning(
            live=live,
            period=self.period(vector),
            samples=setting.samples,
            idle=len(setting.slots(live)) - len(slots) + sum(vector) - sum(here),
            checkpoints=setting.checkpoints(len(live), fatal),
            layout=f"{setting.shape.pipelines} x {setting.shape.ranks}",
            schedules=partial(self._schedules, vector),
            slots=slots,
            vector=vector,
        )

    def _vector(self, slots: dict[Worker, int]) -> Vector:
        shape = self.setting.shape
        hosts = Counter(position.rank for position in slots)
        return tuple(shape.pipelines - hosts[rank] for rank in range(shape.ranks))

    def _placed(self, live: Nodes) -> State:
        shape = self.setting.shape
        slots = {shape.worker_at(slot): slot for slot in self.setting.slots(live)}
        if len(slots) < shape.ranks:
            return Stopped(live=live, reason=f"{len(slots)} live worker(s) cannot host {shape.ranks} stages")
        for rank in sorted(set(range(shape.ranks)) - {position.rank for position in slots}):
            hosts = Counter(position.rank for position in slots)
            giver = max(slots, key=lambda position: (hosts[position.rank], position))
            slots[Worker(giver.pipeline, rank)] = slots.pop(giver)
        return self._running(live, self._normalized(slots, copied=False)[0])

    def _filled(self, slots: dict[Worker, int], free: list[int]) -> tuple[dict[Worker, int], list[float]]:
        shape, slots, received = self.setting.shape, dict(slots), []
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

    def _normalized(self, slots: dict[Worker, int], copied: bool = True) -> tuple[dict[Worker, int], float, float]:
        shape = self.setting.shape
        here = self._vector(slots)
        target = self.normal(sum(here)) if self.move else None
        if target is None or target == here:
            return slots, 0.0, 0.0
        # move towards the normal vector, or any that its period serves, with the fewest moves
        best = self.period(target)
        served = self.serving(here)
        if served is not None and self.period(served) <= best * (1 + _TOLERANCE):
            return slots, 0.0, 0.0
        vacant = frozenset(shape.workers()) - slots.keys()
        arranged = arrange(shape, vacant, target, self._copying)
        if copied and arranged.seconds > CHEAP * best * (iterations := self._iterations_until_change()):
            gain = max(self._bounds.bound_of(here) - best, 0.0) or self.period(here) - best
            if gain * iterations <= arranged.seconds:
                return slots, 0.0, 0.0
        slots = dict(slots)
        for move in arranged.moves:
            slots[Worker.parse(move.role)] = slots.pop(Worker.parse(move.worker))
        slots = {position: slot for position, slot in slots.items() if position not in arranged.vacant}
        return slots, sum(move.bytes for move in arranged.moves), arranged.seconds

    def _iterations_until_change(self) -> float:
        setting = self.setting
        if not setting.failure_rate:
            return self.job.planner.iterations_between_changes
        return 1 / (setting.failure_rate * setting.nodes * self.period((0,) * setting.shape.ranks))

    @cached_property
    def _state(self) -> list[float]:
        return self._per_rank(self.setting.state_per_stage())

    @cached_property
    def _owned(self) -> list[float]:
        return self._per_rank(self.setting.owned_per_stage())

    def _per_rank(self, per_stage: list[float]) -> list[float]:
        ranks = self.setting.shape.ranks
        return [sum(per_stage[rank::ranks]) for rank in range(ranks)]

    @cached_property
    def _copying(self) -> Profile:
        return Profile(
            latency=self.setting.latency, bandwidth=self.setting.bandwidth, static=self.setting.state_per_stage()
        )

    @cached_property
    def _bounds(self) -> StageBounds:
        return StageBounds(self.job, self.job.shape.pipelines - 1)


def _period(problem: Problem) -> float:
    if not problem.dead and problem.peers_are_alike:
        problem = template_problem(problem, problem.shape.micro_batches)
    policies = max(1, min(POLICIES, OPERATIONS // problem.size))
    return find_initial_order(problem, Effort(closed_form(problem)), policies).best.period


def _misfit(setting: Setting, job: PricedJob) -> DoesNotFit | None:
    shape, profile = setting.shape, job.prices
    activation = profile.per_stage("activation", shape.stages)
    worker = setting.fullest(
        [
            profile.fixed_bytes(range(rank, shape.stages, shape.ranks), shape.stages)
            + shape.chunks * max(activation[rank :: shape.ranks])
            for rank in range(shape.ranks)
        ]
    )
    if worker.fits:
        return None
    reason = f"rank {worker.rank} needs {worker.needed:.6g} bytes for one micro-batch and may hold {worker.cap:.6g}"
    return worker.misfit(reason)
