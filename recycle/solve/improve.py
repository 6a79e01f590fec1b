"""Search: from the list scheduler's orders to better ones, never worse than where it starts.

Two searches on two scales. `vary` changes the list scheduler's policy (caps in flight, W that may wait, hosts of
re-routed micro-batches, a little noise) and is what large instances get. `improve` then anneals the order itself,
operation by operation, in rounds that get longer as long as the bound is not met. Both depend on nothing but the
seed and their numbers of steps; the clock only decides when to stop.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from random import Random

from recycle.solve.anneal import anneal, evaluate
from recycle.solve.construct import UNLIMITED, Policy, construct, default_policy, portfolio
from recycle.solve.problem import Order, Problem

Progress = Callable[[str, float], None]
"""Told what is being done and the best period so far."""
HOT, COLD, PULL = 0.5, 0.05, 1.0
"""Temperatures in typical operation times and the weight of the mean window: measured best on the worked example."""
FIRST_ROUND = 20_000
LONGEST_ROUND = 640_000


@dataclass(frozen=True)
class Found:
    """An order, its period by right-shift, and the steps spent on it."""

    order: Order
    period: float
    steps: int = 0


class Deadline:
    """A wall-clock limit that may be absent."""

    def __init__(self, seconds: float | None) -> None:
        self.end = None if seconds is None else time.monotonic() + seconds

    @property
    def left(self) -> float:
        return float("inf") if self.end is None else self.end - time.monotonic()

    @property
    def is_over(self) -> bool:
        return self.left <= 0


def first(problem: Problem, bound: float, deadline: Deadline, most: int = 1 << 30) -> tuple[Found, Policy]:
    """The best of the policy portfolio; stops at the bound, at the deadline (one policy at least) or after `most`."""
    best: Found | None = None
    chosen = default_policy(problem)
    for count, policy in enumerate(portfolio(problem)):
        if best is not None and (deadline.is_over or count >= most or best.period <= bound + 1e-9):
            break
        order = construct(problem, policy)
        period = evaluate(problem, order)[0]
        if best is None or period < best.period:
            best, chosen = Found(order, period), policy
    assert best is not None
    return best, chosen


def vary(
    problem: Problem, start: Found, policy: Policy, bound: float, *, steps: int, seed: int, deadline: Deadline
) -> Found:
    """Local search over policies: change one to three parameters or swap two hosts, keep what is not worse."""
    random = Random(seed)
    best, current, standing = start, policy, start.period
    for step in range(steps):
        if deadline.is_over or best.period <= bound + 1e-9:
            return replace(best, steps=step)
        candidate = _neighbour(problem, current, random)
        order = construct(problem, candidate, noise=random.choice((0.0, 0.0, 0.02, 0.1)), seed=random.randrange(1 << 30))
        period = evaluate(problem, order)[0]
        if period <= standing:
            current, standing = candidate, period
            if period < best.period:
                best = Found(order, period)
    return replace(best, steps=steps)


def _neighbour(problem: Problem, policy: Policy, random: Random) -> Policy:
    stages, n, m = problem.shape.stages, problem.micro_batches, problem.shape.micro_batches
    hold, weights, first_weight = list(policy.hold), list(policy.weights), list(policy.weight_first)
    for _ in range(random.randint(1, 3)):
        s = random.randrange(stages)
        what = random.randrange(3)
        if what == 0 and problem.shape.chunks == 1:
            hold[s] = random.choice((UNLIMITED, max(1, stages - s), max(1, stages - s + 1), random.randint(1, 2 * stages)))
        elif what == 1:
            weights[s] = random.choice((UNLIMITED, 1, 2, random.randint(1, stages + 1)))
        else:
            first_weight[s] = not first_weight[s]
    swaps = policy.swaps
    dead = [worker for worker in problem.dead]
    if dead and random.random() < 0.4:
        worker = random.choice(sorted(dead))
        s = worker.rank + problem.shape.ranks * random.randrange(problem.shape.chunks)
        peers = [w.pipeline for w in sorted(dead) if w.rank == worker.rank]
        g, h = (random.choice(peers) * m + random.randrange(m) for _ in range(2))
        swaps = (*swaps, (s, g, h)) if g != h else swaps
    assert n
    return replace(
        policy, hold=tuple(hold), weights=tuple(weights), weight_first=tuple(first_weight), swaps=swaps[-40:],
        lead=random.choice((policy.lead, policy.lead, 0.0, 1.0, 2.0)),
    )


def improve(
    problem: Problem,
    start: Found,
    bound: float,
    *,
    steps: int,
    seed: int = 0,
    deadline: Deadline | None = None,
    patience: int = 6,
    progress: Progress | None = None,
) -> Found:
    """Anneal the order in rounds until the bound is met, the steps or the time are spent, or `patience` rounds fail.

    Args:
        start: where to begin; the result is never worse.
        steps: moves in all rounds together.
        patience: rounds of full length without a better period after which to stop.

    Returns:
        The best order met. Depends on `start`, `steps`, `seed` and `patience` only, unless the deadline cuts it short.
    """
    deadline = deadline or Deadline(None)
    best, spent, length, idle, turn = start, 0, FIRST_ROUND, 0, 0
    while spent < steps and idle < patience and best.period > bound + 1e-9 and not deadline.is_over:
        size = min(length, steps - spent)
        begun = time.monotonic()
        # Every other round goes on from the best order, the rest start over: both win on some instances.
        origin = start if turn % 2 == 0 else best
        round_seed = (seed * 1_000_003 + turn * 7919 + 17) % 2147483647
        result = anneal(problem, origin.order, steps=size, seed=round_seed, hot=HOT, cold=COLD, target=bound, pull=PULL)
        spent, turn = spent + size, turn + 1
        if result.period < best.period - 1e-9:
            best, idle = Found(result.order, result.period), 0
        elif length >= LONGEST_ROUND:
            idle += 1
        length = min(2 * length, LONGEST_ROUND)
        if progress:
            progress("searching", best.period)
        # A round cannot be interrupted, so it has to fit into what is left of the time.
        rate = size / max(time.monotonic() - begun, 1e-6)
        if deadline.left < length / rate:
            length = int(max(0.0, deadline.left) * rate)
            if length < 100:
                break
    return replace(best, steps=spent)
