"""The template: one fault-free pipeline, planned with one micro-batch per slot, and copied to all pipelines.

Every pipeline runs the template slot by slot (`assignment`); a slot without a micro-batch is a gap. If no worker has
two micro-batches of one stage in one slot, the template's dependencies and memory limits hold, and the period is at
most that of a fault-free pipeline with ceil(D m / fewest live workers) micro-batches.

Unfolding list-schedules the whole problem with the template's times as due times of the slots. A micro-batch begins no
earlier than a share of its due time, because it would take memory that a deeper chunk waits for. Limits: all transfers
take the time of the fastest link, and none goes between peers of a single rank.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from math import floor, inf

import numpy as np

from recycle.solve.assignment import Assignment, assign_by_load, avoid_slow_links
from recycle.solve.constants import UNFOLD_RULES
from recycle.solve.effort import Deadline, Incumbent, Pace
from recycle.solve.problem import TOLERANCE, Order, Problem, programs_of
from recycle.solve.search.list_scheduling import schedule_by_priority
from recycle.solve.search.order_kernels import evaluate, time_order


def template_problem(problem: Problem, micro_batches: int, running: int = 1) -> Problem:
    """Return the fault-free problem of a single pipeline, with the worst live worker of each rank.

    Args:
        running: pipelines that run a micro-batch in each slot; ranks with fewer live workers are slower and have less
            memory in proportion.
    """
    shape = problem.shape
    hosts = problem.hosts[: shape.ranks]

    def share_of(cap: float, live: int) -> float:
        return cap if live >= running or cap == inf else max(shape.chunks, floor(cap * live / running + TOLERANCE))

    return replace(
        problem,
        links=problem.links if not problem.hops else (problem.links[0],),
        hops=(),
        shape=replace(shape, pipelines=1, micro_batches=micro_batches),
        dead=frozenset(),
        speed=tuple(max(problem.speed[w] for w in live) * max(1.0, running / len(live)) for live in hosts),
        cap=tuple(share_of(min(problem.cap[w] for w in live), len(live)) for live in hosts),
    )


def copy_to_pipelines(problem: Problem, assignment: Assignment, template: Problem, order: Order) -> Order:
    """Return the order in which every pipeline follows `order` of `template_problem`, in the slots of `assignment`."""
    place = np.empty(template.size, dtype=np.int64)
    for program in order:
        place[program] = np.arange(len(program))
    position = place.reshape(problem.kinds, problem.shape.stages, template.micro_batches)[:, :, assignment.slot].ravel()
    line = np.argsort(position.astype(np.min_scalar_type(max(map(len, order)))), kind="stable")
    return programs_of(line, np.tile(assignment.host, problem.kinds)[line], problem.shape.worker_count)


def unfold(
    problem: Problem,
    assignment: Assignment,
    template: Problem,
    order: Order,
    deadline: Deadline,
    most: int = len(UNFOLD_RULES) * 2,
) -> Incumbent:
    """Return the best of `most` orders of the whole problem, unfolded from an order of its template."""
    best: Incumbent | None = None
    pace = Pace(deadline)
    variants = [avoid_slow_links(problem, assignment), assignment] if problem.hops else [assignment]
    assignment = variants[0]
    if assignment.is_free_of_clashes:
        copies = [evaluate(problem, copy_to_pipelines(problem, variant, template, order)) for variant in variants]
        best, assignment = min(zip(copies, variants, strict=True), key=lambda pair: pair[0].period)
        most -= 1
    starts = time_order(template, order).latest_starts
    due = (starts - starts.min()).reshape(template.kinds, template.shape.stages, -1)[:, :, assignment.slot]
    hosts = (assignment.host, assign_by_load(problem).host)
    for (share, patience, weight_patience), host in list(product(UNFOLD_RULES, hosts))[: max(most, best is None)]:
        if pace.is_over() and best is not None:
            break
        order_of_rule = schedule_by_priority(
            problem,
            host,
            due.ravel(),
            patience=patience * problem.unit,
            weight_patience=weight_patience * problem.unit,
            release=share * due[0, 0],
        )
        unfolded = evaluate(problem, order_of_rule)
        if best is None or unfolded.period < best.period:
            best = unfolded
    assert best
    return best
