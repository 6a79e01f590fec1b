"""Unfolding: the order of a template as one of the whole problem, also where a slot asks more than one of a worker.

Each operation is due when the template runs its micro-batch's slot. List scheduling by these times gives an order; the
first stage begins each micro-batch no earlier than a share of its due time, since what enters a pipeline too early
takes the memory that a deeper chunk waits for. Where no worker has two micro-batches of one stage in one slot, the copy
of the template is an order as well.
"""

from __future__ import annotations

from itertools import product

from recycle.solve.assignment import Assignment, by_load, spread_over_lanes
from recycle.solve.deadline import Deadline, Pace
from recycle.solve.effort import Incumbent
from recycle.solve.problem import Order, Problem
from recycle.solve.search.list_scheduling import schedule_by_priority
from recycle.solve.search.timing import time_order, timed
from recycle.solve.template import copied_to_all

RULES = ((0.9, 0.5, 0.5), (0.9, 1.0, 0.5), (0.0, 0.0, 0.0), (1.0, 0.0, 0.5))
"""Of each list scheduling: the share of its due time at which a micro-batch may begin; how long F and I, and W, stand
back for what is more urgent, in typical operations' times."""


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
