"""Adapt a given schedule: keep its placement and order, and run dead workers' micro-batches on their peers.

For placements that the planner's searches do not know, such as the V. The list scheduler rebuilds the order, with the
schedule's start times as priorities. Limits: does not search. The bound is the work of the busiest rank.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import product

import numpy as np

from recycle.errors import PlanError
from recycle.ir.lower import lower
from recycle.ir.schedule import Schedule
from recycle.ir.simulate import simulate
from recycle.job import PricedJob
from recycle.plans import Plan, dead_roles, errors, with_updates_of
from recycle.solve.assignment import assign_to_peers
from recycle.solve.problem import Order, Problem
from recycle.solve.search.list_scheduling import schedule_by_priority

PATIENCES = (0.0, 0.5, 1.0)
"""Time that an operation waits for a more urgent one, in typical operation times."""


def adapt(job: PricedJob, like: Schedule, vector: Sequence[int]) -> Plan:
    """Return the plan of a failure vector, in role names, on the placement of `like` and close to its order.

    Args:
        like: a valid schedule of the job; the workers of a rank host the same stages.

    Raises:
        PlanError: a stage has no live worker, or the memory is too small for this order.
    """
    begun = time.perf_counter()
    profile, shape = job.prices, job.shape
    dead = dead_roles(shape, vector)
    problem = Problem.from_job(job, dead, profile)
    planes, n = shape.stages * problem.micro_batches, problem.micro_batches
    original = simulate(lower(like), profile)
    operations, row, worker = problem.operations_in(original.schedule)
    home, priority = np.full(planes, -1, dtype=np.int64), np.zeros(problem.size)
    home[operations % planes] = worker
    priority[operations] = original.start[row]
    by_rank = {w.rank: like.stages_of(w) for w in like.live}
    live = [worker for worker in shape.workers() if worker not in dead]
    hosts = [[shape.worker_index(w) for w in live if stage in by_rank[w.rank]] for stage in range(shape.stages)]
    host = assign_to_peers(home.reshape(shape.stages, n), hosts)
    placement = tuple(by_rank[worker.rank] for worker in shape.workers())

    def schedule_of(order: Order) -> Schedule:
        schedule = replace(problem.schedule(order), placement=placement, optimizer=like.optimizer, buckets=like.buckets)
        return with_updates_of(schedule, job).with_metadata(planner="recycle")

    schedules = [like] if not dead and not like.failed else []
    with contextlib.suppress(PlanError):
        for patience, weight_patience in product(PATIENCES, repeat=2):
            order = schedule_by_priority(
                problem,
                host.ravel(),
                priority,
                patience=patience * problem.unit,
                weight_patience=weight_patience * problem.unit,
            )
            schedules.append(schedule_of(order))
    if not schedules:
        raise PlanError("[memory] limit: too small to adapt this schedule to the dead workers; raise it")
    pairs = ((simulate(candidate, profile), candidate) for candidate in schedules)
    timeline, schedule = min(pairs, key=lambda pair: pair[0].period)
    wrong = errors(schedule, job)
    if wrong:
        raise PlanError(f"the schedule cannot be adapted to {tuple(vector)} dead workers per rank: {wrong[0]}")
    limits = job.limits
    return Plan(
        schedule=schedule,
        makespan=timeline.makespan,
        period=timeline.period,
        lower_bound=min(timeline.period, _load(problem, hosts, by_rank)),
        seconds=round(time.perf_counter() - begun, 3),
        profile=profile.digest(),
        limits=None if limits is None else tuple(limits),
        planner={"like": dict(like.metadata).get("family", "a custom schedule")},
    )


def _load(problem: Problem, hosts: Sequence[Sequence[int]], by_rank: dict[int, tuple[int, ...]]) -> float:
    bound = 0.0
    for stages in by_rank.values():
        compute = sum(problem.seconds[s] for s in stages)
        fastest = min(problem.speed[w] for w in hosts[stages[0]])
        update = sum(problem.update_seconds[s] for s in stages)
        bound = max(bound, problem.micro_batches * compute * fastest / len(hosts[stages[0]]) + update)
    return bound
