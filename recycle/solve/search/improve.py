"""Improvement: simulated annealing of an order, operation by operation, in rounds that ask for smaller periods.

The result depends on the start, the seed and the number of steps only, unless the deadline cuts the search short.
"""

from __future__ import annotations

import time
from dataclasses import replace
from math import inf

from recycle.solve.deadline import Deadline, Pace
from recycle.solve.effort import Effort, Incumbent
from recycle.solve.problem import Order, Problem
from recycle.solve.search.annealing import Annealed, anneal
from recycle.solve.search.kernels import are_loaded, load_if_worth_it
from recycle.solve.search.timing import time_order

HEATS = ((0.15, 0.03), (0.1, 0.02))
"""First and last temperature of successive rounds, in typical operation times: no single pair wins on every row."""
LONGEST, LONGEST_WORK = 600_000, 240_000_000
"""Moves of a round at most, and moves times operations, so that it takes about a second; shorter ones gain less."""
ROUNDS = 6
"""Rounds into which the moves that are left are divided at most, unless the longest round ends before."""
PLAIN_WORK = 2_000_000
"""Moves times operations that plain Python makes in a second at least; what a short search has to expect."""
PARTS, LEAST_PART = 8, 2_000
"""Parts of a round at most, and the moves of each at least."""
PATIENCE = 6
"""Rounds without success after which to stop; more on larger problems, whose rounds reach less of them."""


def improve(problem: Problem, start: Incumbent, effort: Effort, *, are_free: bool = False) -> Incumbent:
    """Anneal the order in rounds, each for a period a little below the best, until the bound is met.

    Args:
        start: where to begin; the result is never worse.
        are_free: any live worker of its rank may take any micro-batch, in every round.
    """
    deadline, patience = effort.deadline, max(PATIENCE, problem.size // 100)
    longest = max(3_000, min(LONGEST, LONGEST_WORK // problem.size))
    length, idle, turn = min(2_000, longest), 0, 0
    load_if_worth_it(problem, min(effort.left, 4 * longest) // 100, deadline)
    if not are_loaded() and deadline.left < inf:
        length = min(length, max(10, int(deadline.left * PLAIN_WORK / problem.size / ROUNDS)))
    best, due = start, time_order(problem, start.order).due
    order, order_due = best.order, due
    while effort.left and idle < patience and not effort.is_met(problem, best.period) and not deadline.is_over:
        target = _target(problem, best.period, effort.bound)
        if turn % 5 == 4:
            order, order_due = best.order, due
        load_if_worth_it(problem, effort.left, deadline)
        begun = time.monotonic()
        size = int(min(length, effort.left))
        result = _round(problem, order, order_due, target, size, effort.seed, turn, deadline, are_free)
        effort.spend(result.steps)
        order, order_due, turn = result.order, result.due, turn + 1
        timing = time_order(problem, order)
        if result.met or timing.period < best.period - 1e-9:
            best, due, idle = Incumbent(order, min(target if result.met else best.period, timing.period)), order_due, 0
            if timing.period <= best.period + 1e-9:
                due = order_due = timing.due
        else:
            idle += length >= longest
            # a round that is cut short has not cooled down, so the next has to fit into the time that is left
            moves_per_second = result.steps / max(time.monotonic() - begun, 1e-6)
            moves_left = min(max(0.0, deadline.left) * moves_per_second, effort.left)
            length = int(min(max(2 * length, moves_left / ROUNDS), longest, moves_left))
            if length < 10:
                break
        effort.report("searching", best.period)
    return best


def _round(
    problem: Problem,
    order: Order,
    due: list[float],
    target: float,
    steps: int,
    seed: int,
    turn: int,
    deadline: Deadline,
    are_free: bool,
) -> Annealed:
    """One round, from hot to cold, in parts, between which the deadline can end it; wide every other time."""
    hot, cold = HEATS[turn % len(HEATS)]
    wide = turn // len(HEATS) % 2 == 1
    parts = min(PARTS, 1 + steps // LEAST_PART)
    spent, result, pace = 0, Annealed(order, due, False, 0), Pace(deadline)
    for part in range(parts):
        if pace.is_over():
            break
        size = (part + 1) * steps // parts - spent
        first, last = (hot * (cold / hot) ** (share / parts) for share in (part, part + 1))
        part_seed = (seed * 1_000_003 + turn * 7_919 + part * 104_729 + 17) % 2_147_483_647
        result = anneal(
            problem,
            result.order,
            result.due,
            target,
            steps=size,
            seed=part_seed,
            wide=wide,
            are_free=are_free,
            hot=first,
            cold=last,
        )
        spent += result.steps
        if result.met:
            break
    return replace(result, steps=spent)


def _target(problem: Problem, period: float, bound: float) -> float:
    """The period to look for next: a good part of the gap less, an eighth of an operation at least."""
    return max(bound, period - max(problem.grain, problem.unit / 8, (period - bound) / 8))
