"""Search: from the list scheduler's orders to better ones, never worse than where it starts.

Two searches on two scales. `vary` changes the list scheduler's policy (caps in flight, W that may wait, hosts of
re-routed micro-batches, a little noise). `improve` anneals the order itself, operation by operation, in rounds that ask
for ever smaller periods until the bound is met; between the rounds windows of the order go to an integer program. Both
depend on nothing but the seed and their numbers of steps; the clock only decides when to stop.
"""

from __future__ import annotations

import time
from dataclasses import replace
from random import Random
from typing import Any

from recycle.solve.anneal import anneal
from recycle.solve.construct import UNLIMITED, Policy, construct, groups
from recycle.solve.deadline import Deadline
from recycle.solve.found import Found, Progress, is_met, worth_compiling
from recycle.solve.problem import Problem
from recycle.solve.timing import time_order
from recycle.solve.windows import Windows

HEATS = ((0.15, 0.12), (0.25, 0.12), (0.2, 0.08))
"""First and last temperature of successive rounds, in typical operation times: no single pair wins on every row."""
PATIENCE = 12
"""Rounds without success after which to stop; more on larger problems, whose rounds reach less of them."""
POLISHED, WINDOWS_PER_ROUND = (150, 15), (40, 4)
"""Windows on the best order, and on what a round of full length ends in: at most, and in a row that gain nothing."""
WINDOWS_AS_LONG_AS_A_ROUND = 5
"""Windows that count as one round of full length, in steps."""
LEADS = (0.0, 0.5, 1.0, 2.0, 3.0, 5.0, -1.0)
"""Places, in micro-batch indices, by which re-routed micro-batches may be moved up."""
SWAPS = 40
"""Exchanges of hosts that a policy holds at most."""
_PER_STAGE = ("hold", "hold", "weights", "forward_first", "weight_first")
"""What a policy says per stage; the hold matters most."""


def vary(
    problem: Problem,
    start: Found,
    policy: Policy,
    bound: float,
    *,
    steps: int,
    seed: int,
    deadline: Deadline,
    progress: Progress | None = None,
) -> Found:
    """Local search over policies: change a few things at random, keep what is not worse."""
    random = Random(seed)
    often = worth_compiling(problem, steps, deadline)
    best, current, standing = start, policy, start.period
    for step in range(steps):
        if deadline.is_over or is_met(problem, best.period, bound):
            return replace(best, steps=step)
        candidate = _neighbour(problem, current, random)
        noise = random.choice((0.0, 0.0, 0.02, 0.1))
        order = construct(problem, candidate, noise=noise, seed=random.randrange(1 << 30), often=often)
        period = time_order(problem, order, often).period
        if period <= standing:
            current, standing = candidate, period
            if period < best.period:
                best = Found(order, period)
        if progress:
            progress("searching", best.period)
    return replace(best, steps=steps)


def _neighbour(problem: Problem, policy: Policy, random: Random) -> Policy:
    """The policy with one to three things changed, each for one stage, a run of stages or all of them.

    Neighbouring stages want like values: what one lets through, the next has to take.
    """
    lists: dict[str, list[Any]] = {name: list(getattr(policy, name)) for name in _PER_STAGE}
    for _ in range(random.choice((1, 1, 2, 3))):
        name = random.choice(_PER_STAGE)
        span = _some_stages(problem.shape.stages, random)
        if name in ("forward_first", "weight_first"):
            lists[name][span.start : span.stop] = [random.random() < 0.5] * len(span)
        elif name == "weights" or problem.shape.chunks == 1:
            _change(lists[name], span, problem.shape.stages, name == "weights", random)
    swaps = policy.swaps
    if problem.dead and random.random() < 0.2:
        swaps = (*swaps, *_swap(problem, random))[-SWAPS:]
    lead = random.choice(LEADS) if random.random() < 0.15 else policy.lead
    evenness = policy.evenness
    if not problem.is_even and random.random() < 0.15:
        evenness = random.choice((0.0, 0.25, 0.5, 0.75, 1.0))
    return replace(
        policy,
        **{name: tuple(entries) for name, entries in lists.items()},
        swaps=swaps,
        lead=lead,
        evenness=evenness,
        group=random.choice(groups(problem)) if problem.shape.chunks > 1 and random.random() < 0.15 else policy.group,
    )


def _some_stages(stages: int, random: Random) -> range:
    kind, first = random.random(), random.randrange(stages)
    if kind < 0.35:
        return range(first, first + 1)
    if kind < 0.8:
        return range(first, min(stages, first + 1 + random.randrange(max(1, stages // 2))))
    return range(stages)


def _change(entries: list[int], span: range, stages: int, rising: bool, random: Random) -> None:
    """New limits for a run of stages: none, a little more or less, or a line that rises or falls with the stage."""
    how = random.randrange(4)
    step, more, slope = random.choice((-2, -1, 1, 2)), random.randint(0, 6), random.choice((1, 1, 1, 1.25, 1.5, 2))
    for s in span:
        line = s if rising else stages - s
        if how == 0:
            entries[s] = UNLIMITED
        elif how == 1:
            entries[s] = max(1, (entries[s] if entries[s] < UNLIMITED else 2 * line) + step)
        elif how == 2:
            entries[s] = max(1, line + more)
        else:
            entries[s] = max(1, int(line * slope) + more - 1)


def _swap(problem: Problem, random: Random) -> list[tuple[int, int, int]]:
    """Two micro-batches of one stage whose homes are dead, to change hosts."""
    m, worker = problem.shape.micro_batches, random.choice(sorted(problem.dead))
    stage = worker.rank + problem.shape.ranks * random.randrange(problem.shape.chunks)
    peers = [dead.pipeline for dead in sorted(problem.dead) if dead.rank == worker.rank]
    g, h = (random.choice(peers) * m + random.randrange(m) for _ in range(2))
    return [(stage, g, h)] if g != h else []


def improve(
    problem: Problem,
    start: Found,
    bound: float,
    *,
    steps: int,
    seed: int = 0,
    deadline: Deadline | None = None,
    patience: int | None = None,
    windows: Windows | None = None,
    progress: Progress | None = None,
) -> Found:
    """Anneal the order in rounds, each for a period a little below the best, until the bound is met.

    Args:
        start: where to begin; the result is never worse.
        bound: a proven lower bound; a period that meets it ends the search.
        steps: moves in all rounds together.
        patience: rounds of full length without a better period after which to stop; by the size when left out.
        windows: polish the best order at first, for as long as that pays, and what each round of full length ends in.

    Returns:
        The best order met. Depends on `start`, `steps`, `seed` and `patience` only, unless the deadline cuts it short.
    """
    deadline = deadline or Deadline(None)
    patience = max(PATIENCE, problem.size // 50) if patience is None else patience
    longest = max(500, min(100_000, 40_000_000 // problem.size))
    length, spent, idle, turn = min(2_000, longest), 0, 0, 0
    best, due = start, time_order(problem, start.order).due
    order, order_due = best.order, due
    often = worth_compiling(problem, min(steps, 20 * longest) // 100, deadline)
    window_steps, polishing = max(1, longest // WINDOWS_AS_LONG_AS_A_ROUND), windows is not None
    while spent < steps and idle < patience and not is_met(problem, best.period, bound) and not deadline.is_over:
        target = _target(problem, best.period, bound)
        round_seed = (seed * 1_000_003 + turn * 7_919 + 17) % 2_147_483_647
        if turn % 5 == 4 or polishing:
            order, order_due = best.order, due
        met, is_whole = False, length >= longest
        if not polishing:
            begun, size = time.monotonic(), min(length, steps - spent)
            hot, cold = HEATS[turn % len(HEATS)]
            result = anneal(
                problem, order, order_due, target, steps=size, seed=round_seed, hot=hot, cold=cold, often=often
            )
            order, order_due, met, spent, turn = result.order, result.due, result.met, spent + result.steps, turn + 1
            rate = result.steps / max(time.monotonic() - begun, 1e-6)
        if windows and not met and (polishing or is_whole):
            most, enough = POLISHED if polishing else WINDOWS_PER_ROUND
            count = min(most, (steps - spent) // window_steps)
            result = windows.better(
                order, order_due, target, count=count, patience=enough, seed=round_seed + spent, deadline=deadline
            )
            order, order_due, met, spent = result.order, result.due, result.met, spent + result.steps * window_steps
        timing = time_order(problem, order)
        if met or timing.period < best.period - 1e-9:
            best, due, idle = Found(order, min(target if met else best.period, timing.period)), order_due, 0
            if timing.period <= best.period + 1e-9:
                due = order_due = timing.due
            polishing = windows is not None
        elif polishing:
            polishing = False
        else:
            idle += is_whole
            # A round cannot be interrupted, so the next has to fit into what is left of the time.
            length = min(2 * length, longest)
            if deadline.left < length / rate:
                length = int(max(0.0, deadline.left) * rate)
                if length < 10:
                    break
        if progress:
            progress("searching", best.period)
    return replace(best, steps=start.steps + spent)


def _target(problem: Problem, period: float, bound: float) -> float:
    """The period to look for next: a good part of the gap less, an eighth of an operation at least."""
    return max(bound, period - max(problem.grain, problem.unit / 8, (period - bound) / 8))
