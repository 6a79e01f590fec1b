"""The template: one pipeline without failures, planned for as many micro-batches as there are slots, and copied.

Every pipeline runs the template slot by slot (`assignment`). A micro-batch runs when its slot does, on the pipeline
that hosts it at that stage; a slot in which a pipeline runs nothing is a gap there. Dependencies and memory hold, as
they hold in the template: since no worker has two micro-batches of one stage in one slot, every program is a part of
one of the template's programs, with each F its own I and W, and every dependency is one of the template's. So the
period is at most the template's, which is that of a fault-free pipeline with ceil(D m / fewest live workers)
micro-batches. With several chunks per worker this holds too, whichever peer runs each chunk. Planning the template
costs a D-th of planning the whole.

To unfold an order of a template is to schedule the whole by its times. Each operation is due when the template runs its
micro-batch's slot. List scheduling by these times gives an order; the first stage begins each micro-batch no earlier
than a share of its due time, since what enters a pipeline too early takes the memory that a deeper chunk waits for.
Where no worker has two micro-batches of one stage in one slot, the copy of the template is an order as well.

Where memory and not work limits the iteration, fewer slots in which more pipelines run may take less time, although the
workers of the poorest stages have two micro-batches in some slots then. A template for that has slower workers with
less memory at these stages, and its order is unfolded.

Where links are unlike, a template's transfers take as long as the fastest: those that do not are to be avoided.

Limit: on a single rank with several chunks, a micro-batch whose chunks go to different peers has a transfer on its way
that the template has not.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from math import floor, inf

import numpy as np

from recycle.job.shape import Shape
from recycle.solve.assignment import Assignment, around_slow_links, by_load
from recycle.solve.effort import Deadline, Incumbent, Pace
from recycle.solve.problem import TOLERANCE, Order, Problem
from recycle.solve.search.list_scheduling import schedule_by_priority
from recycle.solve.search.order_kernels import time_order, timed

RULES = ((0.9, 0.5, 0.5), (0.9, 1.0, 0.5), (0.0, 0.0, 0.0), (1.0, 0.0, 0.5))
"""Of each list scheduling: the share of its due time at which a micro-batch may begin; how long F and I, and W, stand
back for what is more urgent, in typical operations' times."""


def one_pipeline(problem: Problem, micro_batches: int, running: int = 1) -> Problem:
    """The fault-free problem of a single pipeline, each of whose workers is as slow, and has as little memory, as the
    live workers of its rank that are worst off.

    Args:
        running: pipelines that run a micro-batch in each slot. A rank with fewer live workers has a worker that is
            slower, and has less memory, by as much as it lacks.
    """
    shape = problem.shape
    hosts = problem.hosts[: shape.ranks]

    def share_of(cap: float, live: int) -> float:
        return cap if live >= running or cap == inf else max(shape.chunks, floor(cap * live / running + TOLERANCE))

    return replace(
        problem,
        links=problem.links if not problem.hops else (problem.links[0],),
        hops=(),
        shape=Shape(1, shape.ranks, micro_batches, shape.chunks),
        dead=frozenset(),
        speed=tuple(max(problem.speed[w] for w in live) * max(1.0, running / len(live)) for live in hosts),
        cap=tuple(share_of(min(problem.cap[w] for w in live), len(live)) for live in hosts),
    )


def copied_to_all(problem: Problem, assignment: Assignment, template: Problem, order: Order) -> Order:
    """The order in which every pipeline follows `order`, one of `one_pipeline`, in the slots of `assignment`."""
    place = np.empty(template.size, dtype=np.int64)
    for program in order:
        place[program] = np.arange(len(program))
    mine = place.reshape(problem.kinds, problem.shape.stages, template.micro_batches)[:, :, assignment.slot].ravel()
    host = np.tile(assignment.host, problem.kinds)
    line = np.lexsort((mine, host))
    ends = np.cumsum(np.bincount(host, minlength=problem.shape.worker_count))[:-1]
    return [program.tolist() for program in np.split(line, ends)]


def unfold(
    problem: Problem,
    assignment: Assignment,
    template: Problem,
    order: Order,
    deadline: Deadline,
    most: int = len(RULES) * 2,
) -> Incumbent:
    """The best of the orders of the whole problem that an order of its template gives.

    Args:
        assignment: by slots; the template has a micro-batch for each of them.
        deadline: after which no more orders are made; one is made at least.
        most: orders to make.
    """
    found: Incumbent | None = None
    pace = Pace(deadline)
    ways = [around_slow_links(problem, assignment), assignment] if problem.hops else [assignment]
    assignment = ways[0]
    if assignment.is_free_of_clashes:
        copies = [timed(problem, copied_to_all(problem, way, template, order)) for way in ways]
        found, assignment = min(zip(copies, ways, strict=True), key=lambda pair: pair[0].period)
        most -= 1
    starts = time_order(template, order).latest_starts
    due = (starts - starts.min()).reshape(template.kinds, template.shape.stages, -1)[:, :, assignment.slot]
    hosts = (assignment.host, by_load(problem).host)
    for (share, patience, weight_patience), host in list(product(RULES, hosts))[: max(most, found is None)]:
        if pace.is_over() and found is not None:
            break
        made = schedule_by_priority(
            problem,
            host,
            due.ravel(),
            patience=patience * problem.unit,
            weight_patience=weight_patience * problem.unit,
            release=share * due[0, 0],
        )
        unfolded = timed(problem, made)
        if found is None or unfolded.period < found.period:
            found = unfolded
    assert found is not None
    return found
