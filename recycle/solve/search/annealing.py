"""One round of simulated annealing on the question "is there an order with this period?".

Moves: one operation, or in a single pipeline a run of them, to another place of its program (the worker's memory
depends on that program alone, so it is tested first); two micro-batches of a stage exchange places, on one worker or,
if both are mobile, between hosts; a mobile one
goes to another live host, which runs it at about the same time; a due time shifts. A micro-batch is mobile at a stage
where its home is dead, or slower than some other host, or has a slower link than one; in a wide round all others of
such a stage are too. Where pipelines are planned together (`joint`) all are. With the
barrier every due time is the target, and none shifts. Many of the operations and micro-batches that are tried lie on
the critical path of a worker that is late, since no other change makes it end earlier. What a state costs is said in
`order_kernels`.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from recycle.ir.columns import Flags
from recycle.ir.compiled import run
from recycle.solve.problem import TOLERANCE, Order, Problem
from recycle.solve.problem_arrays import Operations
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
    wide: bool = False,
    are_free: bool = False,
    hot: float = 1.0,
    cold: float = 0.1,
) -> Annealed:
    """One round of simulated annealing; ends at once when the target is met.

    Args:
        order: where to start; must be able to finish.
        due: due time of each rank; only their differences matter, and with the barrier not even these.
        target: the period to reach.
        steps: moves to try.
        wide: whether a micro-batch may leave a home that is as fast as any, where others of its stage have to.
        are_free: whether any micro-batch may leave its home.
        hot, cold: first and last temperature, in the problem's typical operation time.
    """
    count = problem.shape.stages * problem.micro_batches
    is_mobile = np.full(count, problem.reroute) if are_free else _is_mobile(problem, wide)
    annealing = Annealing(
        due=np.array(due if problem.staggered else [target] * len(due), dtype=np.float64),
        target=float(target),
        quantum=max(problem.grain, problem.unit / 4),
        mobile=np.flatnonzero(is_mobile),
        is_mobile=is_mobile.astype(np.int64),
        live=_live(problem),
        hot=hot * problem.unit,
        cold=cold * problem.unit,
        steps=steps,
        random=seeded(seed),
        latest=np.zeros(problem.size),
        places=np.zeros(2 * problem.micro_batches + 3, dtype=np.int64),
    )
    start = by_turn(problem, order) if problem.shape.pipelines == 1 else order
    # a round is one of many, so that whether compiling pays is decided by the search that they belong to
    (met, tried), _, changed, annealing = run(anneal_order, 0, problem.arrays, timed_order(problem, start), annealing)
    sequence = np.asarray(changed.sequence).tolist()
    programs = [sequence[first:end] for first, end in pairwise(changed.offsets)]
    return Annealed(programs, [float(time) for time in annealing.due], bool(met), int(tried))


def by_turn(problem: Problem, order: Order) -> Order:
    """The order of a single pipeline with each worker's operations of one kind and stage named by their turns."""
    programs = []
    for program in order:
        operations = np.array(program, dtype=np.int64)
        named = np.empty_like(operations)
        named[np.argsort(operations // problem.micro_batches, kind="stable")] = np.sort(operations)
        programs.append(named.tolist())
    return programs


def _live(problem: Problem) -> Operations:
    """1 for each live worker."""
    return np.array([worker not in problem.dead for worker in problem.shape.workers()], dtype=np.int64)


def _is_mobile(problem: Problem, wide: bool) -> Flags:
    """Whether another host may suit each (stage, micro-batch), flat; none without re-routing."""
    stages, ranks = problem.shape.stages, problem.shape.ranks
    live, speed = _live(problem).reshape(-1, ranks), np.array(problem.speed).reshape(-1, ranks)
    fastest = np.array(problem.fastest[:ranks])
    is_left: Flags = (live == 0) | (speed > fastest + TOLERANCE)
    home, rank = np.arange(problem.micro_batches) // problem.shape.micro_batches, np.arange(stages) % ranks
    left = (is_left | _has_slow_link(problem))[home][:, rank].T & problem.reroute
    return np.repeat(left.any(axis=1), problem.micro_batches) if wide else left.ravel()


def _has_slow_link(problem: Problem) -> Flags:
    """[pipelines, ranks], whether a link of each worker is slower than the fastest of all."""
    shape = problem.shape
    slow: Flags = np.zeros((shape.pipelines, shape.ranks), dtype=np.bool_)
    if problem.hops:
        hops = np.array(problem.hops).reshape(2, shape.pipelines, shape.ranks, shape.pipelines)
        slow[:] = (hops > problem.links[0] + TOLERANCE).any(axis=(0, 3))
    return slow
