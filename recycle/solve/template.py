"""The template: one pipeline without failures, planned for as many micro-batches as there are slots, and copied.

Every pipeline follows it slot by slot (`deal`). A micro-batch runs when its slot does, on the pipeline that hosts it at
that stage; a slot that a pipeline sits out is a gap there. Dependencies and memory hold, as they hold in the template:
every program is a part of one of the template's, every dependency one of its. So the period is the template's at most:
that of a fault-free pipeline with ceil(D m / fewest live workers) micro-batches. It costs a D-th of planning the whole,
and the gaps are there to be closed by `refine`.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from recycle.shape import Shape
from recycle.solve.deal import Deal
from recycle.solve.problem import Order, Problem


def one_pipeline(problem: Problem, micro_batches: int) -> Problem:
    """The fault-free problem of a single pipeline of such workers; peers must be alike."""
    shape = problem.shape
    hosts = [problem.hosts[rank][0] for rank in range(shape.ranks)]
    return replace(
        problem,
        shape=Shape(1, shape.ranks, micro_batches, shape.chunks),
        dead=frozenset(),
        speed=tuple(problem.speed[w] for w in hosts),
        cap=tuple(problem.cap[w] for w in hosts),
    )


def spread(problem: Problem, deal: Deal, template: Problem, order: Order) -> Order:
    """The order in which every pipeline follows `order`, one of `one_pipeline`, in its slots."""
    place = np.empty(template.size, dtype=np.int64)
    for program in order:
        place[program] = np.arange(len(program))
    mine = place.reshape(problem.kinds, problem.shape.stages, template.micro_batches)[:, :, deal.slot].ravel()
    host = np.tile(deal.host, problem.kinds)
    line = np.lexsort((mine, host))
    ends = np.cumsum(np.bincount(host, minlength=problem.shape.worker_count))[:-1]
    return [program.tolist() for program in np.split(line, ends)]
