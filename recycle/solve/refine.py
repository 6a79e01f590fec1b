"""Refinement: follow an order again and again, with its urgencies a little changed, and keep what is not worse.

The step that large problems live on: `follow` costs about as much as timing an order does. Each step right-shifts the
order that stands, perhaps delays its W (all, or those of a run of stages) or shakes single operations or whole
micro-batches by parts of an operation's time, and follows that with some patience. After a while without gain it begins
anew from one of the starts. Depends on the starts, the seed and the number of steps only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from recycle.solve.deadline import Deadline
from recycle.solve.follow import follow, hosts_in
from recycle.solve.found import Found, is_met, worth_compiling
from recycle.solve.problem import Operations, Problem
from recycle.solve.timing import time_order

Floats = npt.NDArray[np.float64]
PATIENCE, WEIGHT_PATIENCE = 1.5, 1.2
"""How long F and I, and W, may stand back at most, in typical operation times."""
HURRIED = 0.2
"""How often F and I do not stand back at all."""
MOST_DELAY = 3.0
"""By how much W may become less urgent."""
IDLE = 15
"""Steps without gain after which to begin anew."""
FIRST = 0.75
"""How often that is from the best of the starts."""


def refine(
    problem: Problem,
    starts: Sequence[Found],
    bound: float,
    *,
    steps: int,
    seed: int,
    deadline: Deadline,
    progress: Callable[[str, float], None] | None = None,
) -> Found:
    """The best order met, never worse than the best of `starts`.

    Args:
        starts: one order at least, each complete and within the caps.
        bound: a proven lower bound; a period that meets it ends the search.
        steps: orders to make.
    """
    random = np.random.default_rng(seed)
    often = worth_compiling(problem, steps, deadline)
    ordered = sorted(starts, key=lambda one: one.period)
    bases: list[tuple[float, Operations, Floats]] = []
    best, idle = ordered[0], IDLE
    for step in range(steps):
        if deadline.is_over or is_met(problem, best.period, bound):
            return replace(best, steps=step)
        if idle >= IDLE:
            if len(bases) < len(ordered):
                order = ordered[len(bases)].order
                timing = time_order(problem, order, often)
                bases.append((timing.period, hosts_in(problem, order), timing.starts))
                chosen = len(bases) - 1
            else:
                chosen = 0 if random.random() < FIRST else int(random.integers(len(bases)))
            standing, host, urgency = bases[chosen]
            idle = 0
        order = follow(
            problem,
            host,
            _shaken(problem, urgency, random),
            patience=(0.0 if random.random() < HURRIED else random.random() * PATIENCE) * problem.unit,
            weight_patience=random.random() * WEIGHT_PATIENCE * problem.unit,
            often=often,
        )
        timing = time_order(problem, order, often)
        idle += 1
        if timing.period <= standing:
            if timing.period < standing - 1e-9:
                idle = 0
            standing, urgency = timing.period, timing.starts
            if timing.period < best.period - 1e-9:
                best = Found(order, timing.period)
        if progress:
            progress("refining", best.period)
    return replace(best, steps=steps)


def _shaken(problem: Problem, urgency: Floats, random: np.random.Generator) -> Floats:
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
