"""One round of simulated annealing on the question "is there an order with this period?".

Moves: one operation to another place of its program (the worker's memory depends on that program alone, so it is tested
first); two micro-batches of a stage exchange places, on one worker or, for re-routed ones, between hosts; a due time
shifts. With the barrier every due time is the target, and none shifts. What a state costs is said in `order_kernels`.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from recycle.ir.compiled import run
from recycle.solve.problem import Operations, Order, Problem
from recycle.solve.search.order_kernels import Annealing, anneal_order, timed_order
from recycle.solve.search.random_numbers import seeded


@dataclass(frozen=True)
class Annealed:
    """The result of one round.

    Attributes:
        order: the order that the round ends with.
        due: the due time of each rank that goes with it.
        met: whether the order reaches the target.
        steps: moves tried.
    """

    order: Order
    due: list[float]
    met: bool
    steps: int


def anneal(
    problem: Problem,
    order: Order,
    due: list[float],
    target: float,
    *,
    steps: int,
    seed: int = 0,
    hot: float = 1.0,
    cold: float = 0.1,
) -> Annealed:
    """One round of simulated annealing; ends at once when the target is met.

    Args:
        order: where to start; must be able to finish.
        due: due time of each rank; only their differences matter, and with the barrier not even these.
        target: the period to reach.
        steps: moves to try.
        hot, cold: first and last temperature, in the problem's typical operation time.
    """
    annealing = Annealing(
        due=np.array(due if problem.staggered else [target] * len(due), dtype=np.float64),
        target=float(target),
        quantum=max(problem.grain, problem.unit / 4),
        rerouted=_rerouted(problem),
        hot=hot * problem.unit,
        cold=cold * problem.unit,
        steps=steps,
        random=seeded(seed),
    )
    # a round is one of many, so that whether compiling pays is decided by the search that they belong to
    (met, tried), _, changed, annealing = run(anneal_order, 0, problem.arrays, timed_order(problem, order), annealing)
    sequence = np.asarray(changed.sequence).tolist()
    programs = [sequence[first:end] for first, end in pairwise(changed.offsets)]
    return Annealed(programs, [float(time) for time in annealing.due], bool(met), int(tried))


def _rerouted(problem: Problem) -> Operations:
    """1 for each (stage, micro-batch) whose home worker is dead, flat."""
    m, ranks = problem.shape.micro_batches, problem.shape.ranks
    dead = np.zeros((problem.shape.pipelines, ranks), dtype=np.int64)
    for worker in problem.dead:
        dead[worker] = 1
    home, stage = np.arange(problem.micro_batches) // m, np.arange(problem.shape.stages) % ranks
    return dead[home[None, :], stage[:, None]].ravel()
