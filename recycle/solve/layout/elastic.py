"""Plan an elastic layout: the best of re-routing and of the candidate hostings.

Every hosting is list-scheduled, which includes warm-up, tail and hand-overs; the best are simulated. The simulator
gives all figures, on the schedule of all workers.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import msgspec

from recycle.errors import PlanError
from recycle.ir.check import check
from recycle.ir.schedule import Schedule
from recycle.ir.simulate import simulate
from recycle.job import PricedJob
from recycle.job.pricing import byte_limit, profile_of_layout
from recycle.job.shape import Worker, node_of
from recycle.plans import Move, Plan
from recycle.solve.effort import Deadline, Pace
from recycle.solve.layout.hostings import Hosting, hosting_as_held, hostings
from recycle.solve.layout.hosts import moves_to
from recycle.solve.layout.route_search import best_order
from recycle.solve.layout.routes import Routes, joint_schedule
from recycle.solve.layout.units import Parts, Units
from recycle.solve.problem_arrays import Operations

LISTED_SHARE = 0.5
"""Share of the remaining time for list-scheduling hostings."""
SIMULATED, LARGE = 3, 50_000
"""Number of hostings to simulate besides the one with the fewest copies; one above `LARGE` legs."""
CLOSE = 1.01
"""Plans within this factor of the shortest period are equally good; the fewest copies then decide."""


@dataclass(frozen=True, eq=False)
class Listed:
    """A hosting with its routes, their order, and an upper estimate of the period."""

    hosting: Hosting
    routes: Routes
    programs: Sequence[Operations]
    period: float
    copied: int


def elastic_plan(
    job: PricedJob, failed: Iterable[Worker], fixed: Plan, limit: Deadline, within: Schedule | None = None
) -> Plan:
    """Return the best plan for `job` without `failed`, never worse than `fixed`, in the names of its processes.

    `lower_bound` holds for every layout, `fixed_bound` for the job's stages.

    Args:
        fixed: plan with the job's stages.
        limit: no further hosting is tried after it.
        within: current layout of the live workers (`Units.of`), from which copies are counted.
    """
    maker = Maker(job, frozenset(failed), within)
    if maker.units.held and not fixed.moves:
        fixed = replace(fixed, moves=maker.moves_to({worker: maker.units.given[worker.rank] for worker in maker.live}))
    plans = [fixed]
    if fixed.gap_to(maker.bound) > 0:
        listed = maker.listed(fixed.period, limit.part(LISTED_SHARE))
        pace = Pace(limit)
        for turn, one in enumerate(_of_interest(listed)):
            over = pace.is_over()
            if not (turn and over) and one.hosting.seconds < min(made.period for made in plans):
                plans += filter(None, [maker.plan(one)])
    shortest = min(made.period for made in plans)
    near = [made for made in plans if made.period <= shortest * CLOSE]
    best = min(near, key=lambda made: (_copied(made), made.period))
    return replace(best, lower_bound=maker.bound, fixed_bound=fixed.lower_bound)


def listed_plan(
    job: PricedJob, failed: Iterable[Worker], deadline: Deadline, within: Schedule | None = None
) -> Plan | None:
    """Return the best hosting's plan by list scheduling alone; None without any. Arguments as in `elastic_plan`.

    Raises:
        PlanError, JobError: as in `solve.planner.plan`.
    """
    begun = time.perf_counter()
    maker = Maker(job, frozenset(failed), within)
    plans = map(maker.plan, maker.listed(float("inf"), deadline))
    made = next((made for made in plans if made is not None), None)
    return made and replace(made, seconds=round(time.perf_counter() - begun, 3))


def rerouted_within(job: PricedJob, within: Schedule, failed: Iterable[Worker], deadline: Deadline) -> Plan:
    """Plan `job` without `failed` in the layout of a schedule: each live worker hosts the same units as there.

    Args:
        within: a schedule with a cut model (`Shape.cut`). Workers that are dead there and not in `failed` have returned
            and host the units of their original stages.

    Raises:
        PlanError: a unit has no live host, or too little memory is left for the order.
    """
    begun = time.perf_counter()
    maker = Maker(job, frozenset(failed))
    held = {w: parts for w in within.live if w not in maker.failed and (parts := within.unit_runs(w))}
    held |= {w: maker.units.given[w.rank] for w in within.failed - maker.failed}
    hosting = hosting_as_held(maker.units, job.shape, held, job.prices)
    if hosting is None:
        raise PlanError("in the layout at hand a unit of the model has no live host")
    listed = maker.listed_one(hosting, float("inf"), deadline)
    made = None if listed is None else maker.plan(listed)
    if made is None:
        raise PlanError("[memory] limit: too little for the layout at hand without the dead workers")
    return replace(made, moves=(), seconds=round(time.perf_counter() - begun, 3))


def _of_interest(listed: Sequence[Listed]) -> Sequence[Listed]:
    if not listed or len(listed[0].routes) > LARGE:
        return listed[:1]
    near = [one for one in listed if one.period <= listed[0].period * CLOSE]
    least = min(near, key=lambda one: one.copied)
    return [*listed[:SIMULATED], *([least] if least not in listed[:SIMULATED] else [])]


def _copied(made: Plan) -> int:
    return sum(move.units[1] - move.units[0] for move in made.moves if move.units)


class Maker:
    """Makes plans of hostings for one job and one set of dead workers."""

    def __init__(self, job: PricedJob, failed: frozenset[Worker], within: Schedule | None = None) -> None:
        self.job, self.units, self.failed = job, Units.of(job, within), failed
        self.live = [worker for worker in job.shape.workers() if worker not in failed]
        self.split = job.planner.decoupled
        self.room = byte_limit(job, job.prices)

    @property
    def bound(self) -> float:
        """Lower bound on the period of any layout."""
        speeds = [self.job.prices.speed_of(worker) for worker in self.live]
        return self.units.bound(self.job.shape.global_micro_batches, speeds)

    def moves_to(self, wanted: Mapping[Worker, Parts]) -> tuple[Move, ...]:
        """Return the copies that give each worker the units in `wanted`, with their sources."""
        return moves_to(self.units, self.job.shape, self.live, wanted, self.job.prices)[0]

    def listed(self, below: float, deadline: Deadline) -> list[Listed]:
        """Return the hostings with list schedules below a period, shortest period first."""
        per_node = self.job.cluster.workers_per_node
        nodes = node_of(self.job.shape, per_node) if per_node > 1 and self.job.shape.pipelines > 1 else {}
        found: list[Listed] = []
        for hosting in hostings(self.units, self.job.shape, self.live, self.job.prices, nodes, below):
            one = self.listed_one(hosting, below, deadline.part(0.5))
            if one is not None:
                found.append(one)
            if deadline.is_over and found:
                break
        return sorted(found, key=lambda one: (one.period, one.copied))

    def listed_one(self, hosting: Hosting, below: float, deadline: Deadline) -> Listed | None:
        """Return a hosting with its best order; None if its period is not below the given one."""
        routes = hosting.routes()
        order = best_order(
            routes,
            self.units,
            self.job.prices,
            self.job.shape,
            self._caps(routes),
            deadline,
            split=self.split,
            in_bytes=self.room is not None,
            staggered=self.job.planner.staggered,
        )
        if order is None or order.period >= below:
            return None
        return Listed(hosting, routes, order.programs, order.period, hosting.copied(self.units))

    def _caps(self, routes: Routes) -> list[float]:
        if self.room is None:
            limits = self.job.limits
            return [float("inf") if limits is None else limits[worker.rank] for worker in routes.workers]
        units, workspace = self.units, self.units.price("workspace")
        return [
            self.room
            - (units.static_of(parts) if units.has_bytes else 0.0)
            - max(float(workspace[begin:end].max()) for begin, end in parts)
            for parts in routes.parts
        ]

    def plan(self, one: Listed) -> Plan | None:
        """Return the plan; None if its schedule exceeds a memory limit."""
        job = self.job
        schedule = joint_schedule(
            job.shape,
            one.routes,
            one.programs,
            one.routes.names(job.shape),
            sorted(self.failed),
            "staggered" if job.planner.staggered else "barrier",
            split=self.split,
            tied=bool(job.ties),
        )
        ties = job.ties_among(schedule.shape.stages)
        wanted = one.hosting.wanted
        layout = {str(worker): [end for part in parts for end in part] for worker, parts in sorted(wanted.items())}
        gathers = job.train.sharded_optimizer
        schedule = replace(schedule, ties=ties, gathers=gathers).with_metadata(planner="recycle", layout=layout)
        profile = profile_of_layout(job, job.prices, schedule.shape)
        timeline = simulate(schedule, profile)
        limits = job.limits
        findings = check(schedule, profile=profile, limits=limits if self.room is None else None, byte_limit=self.room)
        if any(finding.severity == "error" for finding in findings):
            return None
        return Plan(
            schedule=schedule,
            makespan=timeline.makespan,
            period=timeline.period,
            lower_bound=self.bound,
            seconds=0.0,
            profile=job.prices.digest(),
            limits=None if limits is None else tuple(limits),
            planner=msgspec.to_builtins(job.planner),
            moves=self.moves_to(wanted),
        )
