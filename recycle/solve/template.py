"""The template: one pipeline without failures, planned for as many micro-batches as there are slots, and copied.

Every pipeline runs the template slot by slot (`assignment`). A micro-batch runs when its slot does, on the pipeline
that hosts it at that stage; a slot in which a pipeline runs nothing is a gap there. Dependencies and memory hold, as
they hold in the template: since no worker has two micro-batches of one stage in one slot, every program is a part of
one of the template's programs, with each F its own I and W, and every dependency is one of the template's. So the
period is at most the template's, which is that of a fault-free pipeline with ceil(D m / fewest live workers)
micro-batches. With several chunks per worker this holds too, whichever peer runs each chunk. Planning the template
costs a D-th of planning the whole, and `refine` closes the gaps.

To unfold an order of a template is to schedule the whole by its times. Each operation is due when the template runs its
micro-batch's slot. List scheduling by these times gives an order; the first stage begins each micro-batch no earlier
than a share of its due time, since what enters a pipeline too early takes the memory that a deeper chunk waits for.
Where no worker has two micro-batches of one stage in one slot, the copy of the template is an order as well.

Where memory and not work limits the iteration, fewer slots in which more pipelines run may take less time, although the
workers of the poorest stages have two micro-batches in some slots then. A template for that has slower workers with
less memory at these stages, and its order is unfolded.

Where transfers take longer than operations, pipelines that are alike take turns on each other's lanes
(`assignment.spread_over_lanes`), so that the template's transfers need not queue; those of its copies may, a little.

Where peers are not alike, a template whose workers are as slow as the slowest holds up all others. One whose workers
have the mean pace of their rank says when things can happen if each worker gets what it can do in the period; its copy
is an order too, and better ones are unfolded, in which micro-batches are assigned by load.

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
from recycle.solve.assignment import Assignment, by_load, spread_over_lanes
from recycle.solve.effort import Deadline, Incumbent, Pace
from recycle.solve.problem import TOLERANCE, Order, Problem
from recycle.solve.search.list_scheduling import schedule_by_priority
from recycle.solve.search.timing import time_order, timed

RULES = ((0.9, 0.5, 0.5), (0.9, 1.0, 0.5), (0.0, 0.0, 0.0), (1.0, 0.0, 0.5))
"""Of each list scheduling: the share of its due time at which a micro-batch may begin; how long F and I, and W, stand
back for what is more urgent, in typical operations' times."""


def one_pipeline(problem: Problem, micro_batches: int, running: int = 1, is_mean: bool = False) -> Problem:
    """The fault-free problem of a single pipeline, each of whose workers is as slow, and has as little memory, as the
    live workers of its rank that are worst off.

    Args:
        running: pipelines that run a micro-batch in each slot. A rank with fewer live workers has a worker that is
            slower, and has less memory, by as much as it lacks.
        is_mean: each worker is as fast as the live workers of its rank are in the mean instead.
    """
    shape = problem.shape
    hosts = problem.hosts[: shape.ranks]

    def share_of(cap: float, live: int) -> float:
        return cap if live >= running or cap == inf else max(shape.chunks, floor(cap * live / running + TOLERANCE))

    def pace_of(speeds: list[float]) -> float:
        return len(speeds) / sum(1 / speed for speed in speeds) if is_mean else max(speeds)

    return replace(
        problem,
        queues=problem.queues and not problem.may_spread,
        links=problem.links if not problem.hops else (problem.links[0],),
        hops=(),
        shape=Shape(1, shape.ranks, micro_batches, shape.chunks),
        dead=frozenset(),
        speed=tuple(pace_of([problem.speed[w] for w in live]) * max(1.0, running / len(live)) for live in hosts),
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
    spread = spread_over_lanes(problem, assignment)
    if assignment.is_free_of_clashes:
        for one in spread:
            copy = timed(problem, copied_to_all(problem, one, template, order))
            if found is None or copy.period < found.period:
                found, assignment = copy, one
        most -= 1
        if found is not None and not problem.dead and problem.peers_are_alike:
            return found
    else:
        assignment = spread[0]
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
