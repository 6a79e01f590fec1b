"""Building blocks: every micro-batch of a pipeline follows the same pattern, one interval after the one before.

A block says when each F, I and W of one micro-batch starts. Repeated every `interval` seconds it is a schedule when no
two operations of a worker meet at the same time modulo the interval, and when what a worker holds in the steady state
fits its memory. With little memory nothing comes near it: list scheduling lets early forwards take the slots that late
ones need, while a block spreads the slots over all chunks. Source: the building blocks of Qi et al., "Pipeline
Parallelism with Controllable Memory" (2024, arXiv 2405.15362), found here by modulo scheduling (Rau, 1994).

An operation is placed at the earliest time at which what it needs is there and its worker is free modulo the interval,
after a delay of its own; annealing of the delays lowers what the workers hold above their caps, and then how long a
micro-batch is held. Intervals grow from the shortest that load and memory could admit until one is met; from there they
shrink, each from the delays of the one before, with more steps after each that is not met. Each block becomes an order:
its operations by their starts. Warm-up and drain follow the pattern too, so that the shortest interval need not give
the shortest period; they are left for the searches to shorten.

Limits: one pipeline without failures, which a template copies to all.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import exp, inf
from typing import NamedTuple

import numpy as np

from recycle.ir.compiled import called_by_kernels, run
from recycle.solve.effort import Effort, Incumbent, Pace
from recycle.solve.problem import Order, Problem
from recycle.solve.problem_arrays import Floats, Operations, draw, draw_below, seeded
from recycle.solve.search.timing import timed

LONGER, SHORTER = 1.1, 1.015
"""Factors from one interval to the next, upwards and downwards."""
INTERVALS, FAILURES, PATIENCE = 60, 6, 1.5
"""Intervals that are tried at most until one is met; how many may fail on the way down before all begins anew, a little
above the shortest that was met; and how many more steps follow each."""
HOT, COLD = 2.0, 0.05
"""First and last temperature, in activations."""
NEVER = 1e300
BEYOND = 10.0
"""What an activation beyond a cap costs; the time that micro-batches are held counts in intervals."""


class Block(NamedTuple):
    """A block under construction. S stages, P ranks, K kinds.

    Attributes:
        ranks, kinds: P and K.
        times: [K * S], of each operation on its worker.
        link: time of a transfer.
        cap: [P], activations that each worker may hold.
        stash: share of an activation held between I and W.
        quantum: the least delay above 0.
        delay: [K * S], by which each operation stands back from its earliest time.
        start: [K * S], the result; best: [K * S], the best so far.
        low, high: [P * 2 * K * S / P], busy times of each worker modulo the interval.
        taken: [P], how many of these there are.
        random: [1], state of the random generator.
    """

    ranks: int
    kinds: int
    times: Floats
    link: float
    cap: Floats
    stash: float
    quantum: float
    delay: Floats
    start: Floats
    best: Floats
    low: Floats
    high: Floats
    taken: Operations
    random: Operations


def block_orders(problem: Problem, *, steps: int, seed: int = 0) -> Iterator[tuple[Order | None, float, int]]:
    """(the order of a block, or None where the interval is not met; the interval; the steps spent on it), without end.

    Args:
        problem: of one pipeline, without failures.
        steps: changes of the delays that are tried at the first intervals.
    """
    block, shortest = _begun(problem, seed)
    interval = met = shortest
    for _ in range(INTERVALS):
        order, block = _annealed(problem, block, interval, steps)
        yield order, interval, steps
        met = interval
        if order is not None:
            break
        interval *= LONGER
    while True:
        length, failures, delay = steps, 0, np.array(block.delay)
        while interval > shortest and failures < FAILURES:
            lower = max(shortest, interval / SHORTER)
            order, block = _annealed(problem, block._replace(delay=delay.copy()), lower, length)
            yield order, lower, length
            if order is None:
                failures, length = failures + 1, int(length * PATIENCE) + 1
            else:
                interval, failures, delay = lower, 0, np.array(block.delay)
        met, interval = min(met, interval), min(met, interval) * LONGER
        block = block._replace(delay=np.zeros(len(delay)))


def block_incumbents(problem: Problem, effort: Effort, *, steps: int) -> Iterator[Incumbent]:
    """Orders of building blocks until one meets the bound. Arguments as of `block_orders`."""
    pace, best = Pace(effort.deadline), inf
    for order, _, spent in block_orders(problem, steps=steps, seed=effort.seed):
        effort.spend(spent)
        if order is not None:
            found = timed(problem, order)
            best = min(best, found.period)
            yield found
        if pace.is_over() or not effort.left or effort.is_met(problem, best):
            return


def shortest_interval(problem: Problem) -> float:
    """The shortest interval that load and memory could admit, if operations could overlap, from one micro-batch of
    every pipeline to the next."""
    shape, longest = problem.shape, 0.0
    times = problem.times.reshape(3, shape.stages)
    for rank, hosts in enumerate(problem.hosts[: shape.ranks]):
        f, i, w = times[:, rank :: shape.ranks] * problem.fastest[rank]
        way_back = np.array(problem.way_back)[rank :: shape.ranks]
        held = f + i + way_back + (problem.stash * w if problem.split else 0.0)
        pace = sum(problem.fastest[rank] / problem.speed[worker] for worker in hosts)
        slots = sum(problem.cap[worker] for worker in hosts)
        longest = max(longest, float((f + i + w).sum()) / pace, float(held.sum()) / slots)
    return shape.pipelines * longest


def _begun(problem: Problem, seed: int) -> tuple[Block, float]:
    """(a block without delays, the shortest interval that load and memory could admit)."""
    stages, ranks = problem.shape.stages, problem.shape.ranks
    speed = np.array(problem.speed)[np.arange(stages) % ranks]
    times = (problem.times.reshape(3, stages) * speed)[: problem.kinds]
    block = Block(
        ranks=ranks,
        kinds=problem.kinds,
        times=times.ravel(),
        link=float(problem.link) if ranks > 1 else 0.0,
        cap=np.array(problem.cap, dtype=np.float64),
        stash=float(problem.stash),
        quantum=problem.unit / 2,
        delay=np.zeros(times.size),
        start=np.zeros(times.size),
        best=np.zeros(times.size),
        low=np.zeros(2 * times.size),
        high=np.zeros(2 * times.size),
        taken=np.zeros(ranks, dtype=np.int64),
        random=seeded(seed),
    )
    return block, shortest_interval(problem)


def _annealed(problem: Problem, block: Block, interval: float, steps: int) -> tuple[Order | None, Block]:
    """(the order of the best block met, or None where none is within the caps; the block as the annealing left it)."""
    cost, *_, after = run(anneal_block, steps * len(block.times), interval, steps, block)
    block = block._replace(delay=np.array(after.delay), random=np.array(after.random))
    order = _order(problem, np.array(after.start), interval)
    return order if cost < NEVER and problem.is_within_caps(order) else None, block


def _order(problem: Problem, start: Floats, interval: float) -> Order:
    """The operations of each worker by their starts; of those at once, the one that is further on first."""
    n, stages, ranks = problem.micro_batches, problem.shape.stages, problem.shape.ranks
    starts = (start.reshape(problem.kinds, stages, 1) + interval * np.arange(n)).ravel()
    worker = np.tile(np.repeat(np.arange(stages) % ranks, n), problem.kinds)
    kind = np.repeat(np.arange(problem.kinds), stages * n)
    line = np.lexsort((np.tile(np.arange(n), problem.kinds * stages), kind, np.round(starts, 9), worker))
    return [program.tolist() for program in np.split(line, np.cumsum(np.bincount(worker, minlength=ranks))[:-1])]


def anneal_block(interval: float, steps: int, block: Block) -> float:
    """The kernel: changes the delays, fills `start` with the best block met; returns what it costs."""
    size = len(block.times)
    kept = block.start
    current = _placed(interval, block)
    best = current
    for x in range(size):
        block.best[x] = kept[x]
    heat = HOT
    cooling = (COLD / HOT) ** (1.0 / steps)
    for _ in range(steps):
        heat *= cooling
        x = draw_below(block.random, size)
        y = draw_below(block.random, size)
        was_x, was_y = block.delay[x], block.delay[y]
        block.delay[x] = block.quantum * max(0, draw_below(block.random, 8) - 3)
        if draw_below(block.random, 2):
            block.delay[y] = 0.0
        cost = _placed(interval, block)
        if cost <= current or exp((current - cost) / heat) * 2147483647.0 > draw(block.random):
            current = cost
            if cost < best:
                best = cost
                for z in range(size):
                    block.best[z] = kept[z]
        else:
            block.delay[y] = was_y
            block.delay[x] = was_x
    for x in range(size):
        block.start[x] = block.best[x]
    return best


@called_by_kernels
def _placed(interval: float, block: Block) -> float:
    """Place all operations; what the block costs, NEVER if an F or I finds no room."""
    ranks, times, start = block.ranks, block.times, block.start
    stages = len(times) // block.kinds
    for r in range(ranks):
        block.taken[r] = 0
    now = 0.0
    for turn in range(2 * stages):
        s = turn if turn < stages else 2 * stages - 1 - turn
        x = s if turn < stages else stages + s
        if turn > 0 and turn != stages:
            now += block.link
        now = _free(interval, block, s % ranks, now + block.delay[x], times[x])
        if now < 0.0:
            return NEVER
        start[x] = now
        now += times[x]
    cost = 0.0
    longest = 0.0
    for s in range(stages - 1, -1, -1):
        until = start[stages + s] + times[stages + s]
        if block.kinds == 3:
            x = 2 * stages + s
            start[x] = _free(interval, block, s % ranks, until + block.delay[x], times[x])
            if start[x] < 0.0:
                start[x] = until  # it takes its place in the order all the same
                cost += 1.0
            cost += block.stash * (start[x] + times[x] - until) / interval
            until = start[x] + times[x]
        cost += (start[stages + s] + times[stages + s] - start[s]) / interval
        longest = max(longest, until - start[s])
    cost += longest / interval
    for r in range(ranks):
        most = 0.0
        for at in range(r, stages, ranks):
            now = start[at] + 1e-9
            held = 0.0
            for s in range(r, stages, ranks):
                held += (now - start[s]) // interval + 1.0
                freed = (now - start[stages + s] - times[stages + s]) // interval + 1.0
                if block.kinds == 3:
                    held -= (1.0 - block.stash) * freed
                    freed = block.stash * ((now - start[2 * stages + s] - times[2 * stages + s]) // interval + 1.0)
                held -= freed
            most = max(most, held)
        if most > block.cap[r] + 1e-6:
            cost += BEYOND * (most - block.cap[r])
    return cost


@called_by_kernels
def _free(interval: float, block: Block, rank: int, after: float, time: float) -> float:
    """The first time from `after` on at which a worker is free for so long modulo the interval, and keeps it; -1 if
    there is none."""
    if time <= 0.0:
        return after
    room = len(block.low) // block.ranks
    first = rank * room
    count = block.taken[rank]
    for _ in range(2 * count + 2):
        begin = after % interval
        end = begin + time
        moved = 0.0
        for k in range(first, first + count):
            for turn in range(2):
                low, high = block.low[k] + turn * interval, block.high[k] + turn * interval
                if begin < high - 1e-9 and low < end - 1e-9:
                    moved = max(moved, high - begin)
        if moved == 0.0:
            block.low[first + count] = begin
            block.high[first + count] = min(end, interval)
            count += 1
            if end > interval + 1e-9:
                block.low[first + count] = 0.0
                block.high[first + count] = end - interval
                count += 1
            block.taken[rank] = count
            return after
        after += moved
    return -1.0
