"""Simulated annealing of an order, in rounds that each look for an order with a given period.

`improve` lowers the period from round to round. The result depends only on the start, the seed and the number of steps,
unless the deadline ends the search.

Moves:

    move       an operation, or a run of them in a single pipeline, to another place of its program
    exchange   two micro-batches of a stage, on one worker or between hosts if both are mobile
    re-host    a mobile micro-batch on another live host, at about the same time
    shift      a due time; with the barrier every due time equals the target and none shifts

A micro-batch is mobile at a stage if its home is dead, slower than another host, or has a slower link; in a wide round
all are at such a stage. `order_kernels` defines the cost of a state.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from itertools import pairwise
from math import inf

import numpy as np

from recycle.ir.columns import Flags
from recycle.ir.compiled import run
from recycle.solve.constants import (
    HEATS,
    IDLE_ROUNDS,
    LEAST_PART,
    LONGEST_ROUND,
    LONGEST_WORK,
    MOST_PARTS,
    PLAIN_WORK,
    ROUNDS,
)
from recycle.solve.effort import Deadline, Effort, Incumbent, Pace
from recycle.solve.problem import TOLERANCE, Order, Problem
from recycle.solve.problem_arrays import Operations, seeded
from recycle.solve.search.kernels import are_loaded, load_if_worth_it
from recycle.solve.search.order_kernels import Annealing, anneal_order, initial_state, time_order


@dataclass(frozen=True)
class AnnealingResult:
    """Result of one round.

    Attributes:
        due: due time of each rank, in seconds.
        met: whether the order reaches the target period.
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
    hot: float = 1.0,
    cold: float = 0.1,
) -> AnnealingResult:
    """Run one round of simulated annealing; stop when the target is met.

    Args:
        order: initial order; must be able to finish.
        due: due time of each rank. Only differences matter; ignored with the barrier.
        target: period to reach, in seconds.
        wide: also move micro-batches away from the fastest homes, at stages with mobile micro-batches.
        hot, cold: first and last temperature, in typical operation times of the problem.
    """
    is_mobile = _is_mobile(problem, wide)
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
    start = relabel_by_index(problem, order) if problem.shape.pipelines == 1 else order
    # the search as a whole decides whether compiling pays, not a single round
    (met, tried), _, changed, annealing = run(anneal_order, 0, problem.arrays, initial_state(problem, start), annealing)
    sequence = np.asarray(changed.sequence).tolist()
    programs = [sequence[first:end] for first, end in pairwise(changed.offsets)]
    return AnnealingResult(programs, [float(time) for time in annealing.due], bool(met), int(tried))


def relabel_by_index(problem: Problem, order: Order) -> Order:
    """Rename micro-batches of a single pipeline so that each worker runs each kind and stage in index order."""
    programs = []
    for program in order:
        operations = np.array(program, dtype=np.int64)
        named = np.empty_like(operations)
        named[np.argsort(operations // problem.micro_batches, kind="stable")] = np.sort(operations)
        programs.append(named.tolist())
    return programs


def _live(problem: Problem) -> Operations:
    return np.array([worker not in problem.dead for worker in problem.shape.workers()], dtype=np.int64)


def _is_mobile(problem: Problem, wide: bool) -> Flags:
    ranks = problem.shape.ranks
    live, speed = _live(problem).reshape(-1, ranks), np.array(problem.speed).reshape(-1, ranks)
    fastest = np.array(problem.fastest[:ranks])
    is_left: Flags = (live == 0) | (speed > fastest + TOLERANCE)
    home = np.arange(problem.micro_batches) // problem.shape.micro_batches
    is_displaced = (is_left | _has_slow_link(problem))[home][:, problem.rank_of].T & problem.reroute
    return np.repeat(is_displaced.any(axis=1), problem.micro_batches) if wide else is_displaced.ravel()


def _has_slow_link(problem: Problem) -> Flags:
    shape = problem.shape
    slow: Flags = np.zeros((shape.pipelines, shape.ranks), dtype=np.bool_)
    if problem.hops:
        hops = np.array(problem.hops).reshape(3, shape.pipelines, shape.ranks, shape.pipelines)
        slow[:] = (hops > problem.links[0] + TOLERANCE).any(axis=(0, 3))
    return slow


def improve(problem: Problem, start: Incumbent, effort: Effort) -> Incumbent:
    """Anneal in rounds, each for a slightly shorter period, until the bound is met; never worse than `start`."""
    deadline, patience = effort.deadline, max(IDLE_ROUNDS, problem.size // 100)
    longest = max(3_000, min(LONGEST_ROUND, LONGEST_WORK // problem.size))
    length, idle, turn = min(2_000, longest), 0, 0
    load_if_worth_it(problem, min(effort.steps_left, 4 * longest) // 100, deadline)
    if not are_loaded() and deadline.seconds_left < inf:
        length = min(length, max(10, int(deadline.seconds_left * PLAIN_WORK / problem.size / ROUNDS)))
    best, due = start, time_order(problem, start.order).due
    order, order_due = best.order, due
    while effort.steps_left and idle < patience and not effort.is_met(problem, best.period) and not deadline.is_over:
        target = _target(problem, best.period, effort.bound)
        if turn % 5 == 4:
            order, order_due = best.order, due
        load_if_worth_it(problem, effort.steps_left, deadline)
        begun = time.monotonic()
        size = int(min(length, effort.steps_left))
        result = _round(problem, order, order_due, target, size, effort.seed, turn, deadline)
        effort.spend(result.steps)
        order, order_due, turn = result.order, result.due, turn + 1
        timing = time_order(problem, order)
        if result.met or timing.period < best.period - 1e-9:
            best, due, idle = Incumbent(order, min(target if result.met else best.period, timing.period)), order_due, 0
            if timing.period <= best.period + 1e-9:
                due = order_due = timing.due
        else:
            idle += length >= longest
            # a round that is cut short has not cooled down, so the next one must fit into the remaining time
            moves_per_second = result.steps / max(time.monotonic() - begun, 1e-6)
            moves_left = min(max(0.0, deadline.seconds_left) * moves_per_second, effort.steps_left)
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
) -> AnnealingResult:
    hot, cold = HEATS[turn % len(HEATS)]
    wide = turn // len(HEATS) % 2 == 1
    parts = min(MOST_PARTS, 1 + steps // LEAST_PART)
    spent, result, pace = 0, AnnealingResult(order, due, False, 0), Pace(deadline)
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
            hot=first,
            cold=last,
        )
        spent += result.steps
        if result.met:
            break
    return replace(result, steps=spent)


def _target(problem: Problem, period: float, bound: float) -> float:
    return max(bound, period - max(problem.grain, problem.unit / 8, (period - bound) / 8))
