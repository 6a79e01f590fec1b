"""Refinement: list scheduling by the latest start times of an order, changed a little, again and again.

Large problems gain most from it, as a step is linear in the operations. Each step takes the latest start times of the
current order as priorities, perhaps delays its W (all, or those of a run of stages) or disturbs single operations or
whole micro-batches by parts of an operation's time, and schedules by them with some patience. An order that is not
worse becomes the current one. After a while without gain the search begins again from one of the initial orders. The
result depends on these, the seed and the number of steps only.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from recycle.solve.effort import Effort, Incumbent, by_period
from recycle.solve.problem import Problem
from recycle.solve.problem_arrays import Floats, Operations
from recycle.solve.search.kernels import load_if_worth_it
from recycle.solve.search.list_scheduling import hosts_in, schedule_by_priority
from recycle.solve.search.timing import time_order

PATIENCE, WEIGHT_PATIENCE = 1.5, 1.2
"""How long F and I, and W, may stand back at most, in typical operation times."""
HURRIED = 0.2
"""Share of the steps in which F and I do not stand back at all."""
MOST_DELAY = 3.0
"""By how much W may become less urgent."""
RELEASES = (0.0, 0.0, 0.9, 0.95, 1.0)
"""Shares of its latest start before which a micro-batch may not enter its pipeline."""
IDLE = 15
"""Steps without gain after which to begin again."""
FIRST = 0.75
"""Share of these beginnings that are from the best of the initial orders."""


def refine(problem: Problem, initial: Sequence[Incumbent], effort: Effort) -> Incumbent:
    """The best order met, never worse than the best of `initial`.

    Args:
        initial: one order at least, each complete and within the caps.
    """
    random = np.random.default_rng(effort.seed)
    load_if_worth_it(problem, effort.orders, effort.deadline)
    ordered = by_period(initial)
    bases: list[tuple[float, Operations, Floats]] = []
    best, idle = ordered[0], IDLE
    while effort.goes_on(problem, best.period):
        if idle >= IDLE:
            if len(bases) < len(ordered):
                order = ordered[len(bases)].order
                timing = time_order(problem, order)
                bases.append((timing.period, hosts_in(problem, order), timing.latest_starts))
                chosen = len(bases) - 1
            else:
                chosen = 0 if random.random() < FIRST else int(random.integers(len(bases)))
            current, host, urgency = bases[chosen]
            idle = 0
        disturbed = _disturbed(problem, urgency, random)
        first = disturbed[: problem.micro_batches]
        order = schedule_by_priority(
            problem,
            host,
            disturbed,
            patience=(0.0 if random.random() < HURRIED else random.random() * PATIENCE) * problem.unit,
            weight_patience=random.random() * WEIGHT_PATIENCE * problem.unit,
            release=(first - first.min()) * random.choice(RELEASES),
        )
        timing = time_order(problem, order)
        idle += 1
        if timing.period <= current:
            if timing.period < current - 1e-9:
                idle = 0
            current, urgency = timing.period, timing.latest_starts
            if timing.period < best.period - 1e-9:
                best = Incumbent(order, timing.period)
        effort.report("refining", best.period)
    return best


def _disturbed(problem: Problem, urgency: Floats, random: np.random.Generator) -> Floats:
    """The urgencies as they are, or with one kind of change."""
    stages, n, unit = problem.shape.stages, problem.micro_batches, problem.unit
    how = random.integers(5)
    changed = urgency.reshape(problem.kinds, stages, n).copy()
    if how in (1, 2):
        run = (0, stages - 1) if how == 1 else np.sort(random.integers(stages, size=2))
        changed[2:, run[0] : run[1] + 1] += random.random() * MOST_DELAY * unit
    elif how == 3:
        changed += random.normal(0.0, random.choice((0.05, 0.2, 0.5)) * unit, changed.shape)
    elif how == 4:
        few = random.random(n) < random.choice((0.02, 0.1, 0.5))
        changed += random.normal(0.0, random.choice((0.2, 0.5, 1.0)) * unit, n) * few
    return changed.ravel()
