"""Plan an elastic layout: list-schedule re-routing and the candidate hostings, and simulate the best."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf

import msgspec

from recycle.errors import PlanError
from recycle.ir.check import check
from recycle.ir.schedule import Schedule
from recycle.ir.simulate import simulate
from recycle.job import PricedJob
from recycle.job.pricing import byte_limit, profile_of_layout
from recycle.job.shape import Worker, node_of
from recycle.plans import Move, Plan
from recycle.solve.constants import CLOSE, LARGE_LAYOUT, LISTED_SHARE, SIMULATED
from recycle.solve.effort import Deadline, Pace
from recycle.solve.layout.hostings import Hosting, hosting_from_layout, hostings
from recycle.solve.layout.hosts import plan_copies
from recycle.solve.layout.route_search import best_order
from recycle.solve.layout.routes import Routes, joint_schedule
from recycle.solve.layout.units import Parts, Units
from recycle.solve.problem import Order


@dataclass(frozen=True, eq=False)
class ListedHosting:
    """A hosting with its routes, their order, and an upper estimate of the period."""

    hosting: Hosting
    routes: Routes
    programs: Order
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
        within: current layout of the live workers (`Units.from_job`), from which copies are counted.
    """
    planner = LayoutPlanner(job, frozenset(failed), within)
    if planner.units.held and not fixed.moves:
        fixed = replace(
            fixed, moves=planner.plan_copies({worker: planner.units.fault_free[worker.rank] for worker in planner.live})
        )
    plans = [fixed]
    if fixed.gap_to(planner.bound) > 0:
        listed = planner.list_hostings(fixed.period, limit.part(LISTED_SHARE))
        pace = Pace(limit)
        for turn, candidate in enumerate(_of_interest(listed)):
            over = pace.is_over()
            if not (turn and over) and candidate.hosting.seconds < min(plan.period for plan in plans):
                plans += filter(None, [planner.plan(candidate)])
    shortest = min(plan.period for plan in plans)
    near = [plan for plan in plans if plan.period <= shortest * CLOSE]
    best = min(near, key=lambda plan: (_copied(plan), plan.period))
    return replace(best, lower_bound=planner.bound, fixed_bound=fixed.lower_bound, certificate=None)


def quick_elastic_plan(
    job: PricedJob, failed: Iterable[Worker], deadline: Deadline, within: Schedule | None = None
) -> Plan | None:
    """Return the best hosting's plan by list scheduling alone; None without any. Arguments as in `elastic_plan`.

    Raises as `solve.planner.plan`.
    """
    begun = time.perf_counter()
    planner = LayoutPlanner(job, frozenset(failed), within)
    plans = map(planner.plan, planner.list_hostings(inf, deadline))
    plan = next((plan for plan in plans if plan is not None), None)
    return plan and replace(plan, seconds=round(time.perf_counter() - begun, 3))


def reroute_in_layout(job: PricedJob, within: Schedule, failed: Iterable[Worker], deadline: Deadline) -> Plan:
    """Plan `job` without `failed` in the layout of a schedule: each live worker hosts the same units as there.

    Args:
        within: a schedule with a cut model (`Shape.cut`). Workers that are dead there and not in `failed` have returned
            and host the units of their original stages.

    Raises:
        PlanError: a unit has no live host, or too little memory is left for the order.
    """
    begun = time.perf_counter()
    planner = LayoutPlanner(job, frozenset(failed))
    held = {w: parts for w in within.live if w not in planner.failed and (parts := within.unit_runs(w))}
    held |= {w: planner.units.fault_free[w.rank] for w in within.failed - planner.failed}
    hosting = hosting_from_layout(planner.units, job.shape, held, job.prices)
    if hosting is None:
        raise PlanError("a unit of the model has no live host in the current layout; only moving layers can help")
    listed = planner.list_hosting(hosting, inf, deadline)
    plan = None if listed is None else planner.plan(listed)
    if plan is None:
        raise PlanError("[memory] limit: too small for the current layout without the dead workers; raise it")
    return replace(plan, moves=(), seconds=round(time.perf_counter() - begun, 3))


def _of_interest(listed: Sequence[ListedHosting]) -> Sequence[ListedHosting]:
    if not listed or len(listed[0].routes) > LARGE_LAYOUT:
        return listed[:1]
    near = [candidate for candidate in listed if candidate.period <= listed[0].period * CLOSE]
    least = min(near, key=lambda candidate: candidate.copied)
    return [*listed[:SIMULATED], *([least] if least not in listed[:SIMULATED] else [])]


def _copied(plan: Plan) -> int:
    return sum(move.units[1] - move.units[0] for move in plan.moves if move.units)


class LayoutPlanner:
    """Makes plans of hostings for one job and one set of dead workers."""

    def __init__(self, job: PricedJob, failed: frozenset[Worker], within: Schedule | None = None) -> None:
        self.job, self.units, self.failed = job, Units.from_job(job, within), failed
        self.live = [worker for worker in job.shape.workers() if worker not in failed]
        self.split = job.planner.decoupled
        self.room = byte_limit(job, job.prices)

    @property
    def bound(self) -> float:
        """Lower bound on the period of any layout."""
        speeds = [self.job.prices.speed_of(worker) for worker in self.live]
        return self.units.bound(self.job.shape.global_micro_batches, speeds)

    def plan_copies(self, wanted: Mapping[Worker, Parts]) -> tuple[Move, ...]:
        """Return the copies that give each worker the units in `wanted`, with their sources."""
        return plan_copies(self.units, self.job.shape, self.live, wanted, self.job.prices)

    def list_hostings(self, below: float, deadline: Deadline) -> list[ListedHosting]:
        """Return the hostings with list schedules below a period, shortest period first."""
        per_node = self.job.cluster.workers_per_node
        nodes = node_of(self.job.shape, per_node) if per_node > 1 and self.job.shape.pipelines > 1 else {}
        scheduled: list[ListedHosting] = []
        for hosting in hostings(self.units, self.job.shape, self.live, self.job.prices, nodes, below):
            candidate = self.list_hosting(hosting, below, deadline.part(0.5))
            if candidate is not None:
                scheduled.append(candidate)
            if deadline.is_over and scheduled:
                break
        return sorted(scheduled, key=lambda candidate: (candidate.period, candidate.copied))

    def list_hosting(self, hosting: Hosting, below: float, deadline: Deadline) -> ListedHosting | None:
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
        return ListedHosting(hosting, routes, order.programs, order.period, hosting.copied(self.units))

    def _caps(self, routes: Routes) -> list[float]:
        if self.room is None:
            limits = self.job.limits
            return [inf if limits is None else limits[worker.rank] for worker in routes.workers]
        units, workspace = self.units, self.units.price("workspace")
        return [
            self.room
            - (units.static_of(parts) if units.has_bytes else 0.0)
            - max(float(workspace[begin:end].max()) for begin, end in parts)
            for parts in routes.parts
        ]

    def plan(self, listed: ListedHosting) -> Plan | None:
        """Return the plan; None if its schedule exceeds a memory limit."""
        job = self.job
        schedule = joint_schedule(
            job.shape,
            listed.routes,
            listed.programs,
            listed.routes.names(job.shape),
            sorted(self.failed),
            "staggered" if job.planner.staggered else "barrier",
            split=self.split,
            tied=bool(job.ties),
        )
        ties = job.ties_among(schedule.shape.stages)
        wanted = listed.hosting.wanted
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
            moves=self.plan_copies(wanted),
        )
