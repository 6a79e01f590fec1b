"""Walks: from the list scheduler's best order to better ones, several walks beside each other.

A walk varies the policy, refines what it found and the other initial orders, then anneals single operations. Walks
differ in their seed alone, so how many run at once changes nothing but the time they take: with steps in place of a
wall limit the result depends on the seed and the steps only.
"""

from __future__ import annotations

import contextlib
import multiprocessing
from collections.abc import Sequence
from functools import partial

from recycle.solve.effort import STEPS_OF_ORDER, Deadline, Effort, Incumbent, Stop, by_period
from recycle.solve.problem import Problem
from recycle.solve.processes import map_unordered
from recycle.solve.search.annealing import improve
from recycle.solve.search.list_scheduling import Policy
from recycle.solve.search.policy_search import vary_policy
from recycle.solve.search.refine import refine

WALKS = 2
SINGLE_UP_TO = 100_000
"""Operations from which moving single ones is too slow to gain anything."""
SHARES = ((10_000, (0.3, 0.15)), (SINGLE_UP_TO, (0.1, 0.7)), (1 << 60, (0.1, 1.0)))
"""By number of operations: shares of the time that is left for policies, then for refinement; the rest is for moves."""
ANNEALED_SHARES = (0.1, 0.1)
"""The same of less than the first size where annealing gains most: of a single pipeline, and with several chunks."""
MOST_REFINEMENTS, WORTH_MORE = 8, 0.003
"""Refinements against the clock, each for the share of what is left then, and the share of the period that one of them
must gain for another: where it still gains, it gains more than moves."""
POLICIES = 4_000
"""Policies that a walk tries at most; fewer on small problems."""
ONE_WALK_FROM, ONE_WALK_UP_TO = 1_000, 30_000
"""Operations from which on a second walk against the clock in the same process gains less
than a longer first one; and up to which that was seen."""
WORTH_PROCESSES = 4.0
"""Seconds of search from which starting processes for the walks pays."""


def search(problem: Problem, initial: Sequence[Incumbent], policy: Policy, effort: Effort) -> Incumbent:
    """The best order of all walks; the best of `initial` where none is better.

    Args:
        initial: where to begin, the best first.
        policy: the one that did best on this problem.
        effort: of all walks together. They run in processes only where that takes long enough to pay for starting them.
    """
    start, processes, deadline = initial[0], effort.processes, effort.deadline
    if effort.is_met(problem, start.period) or deadline.is_over:
        return start
    is_long = effort.steps is None and processes == 1 and ONE_WALK_FROM < problem.size < ONE_WALK_UP_TO
    walks = 1 if is_long else WALKS
    if processes > 1 and deadline.left > WORTH_PROCESSES:
        return by_period(_in_processes(problem, initial, policy, effort))[0]
    found = []
    for turn in range(walks):
        part = effort.part(1 / walks, 1 - turn / walks, seed=effort.seed * WALKS + turn)
        found.append(walk(problem, initial, policy, part))
        if effort.is_met(problem, found[-1].period):
            break
    return by_period(found)[0]


def walk(problem: Problem, initial: Sequence[Incumbent], policy: Policy, effort: Effort) -> Incumbent:
    """One walk from `initial`; never worse than the best of them."""
    policies, refinements = next(shares for size, shares in SHARES if problem.size < size)
    if problem.size < SHARES[0][0] and (problem.shape.chunks > 1 or problem.shape.pipelines == 1):
        policies, refinements = ANNEALED_SHARES
    most = min(POLICIES, 3 * problem.size) * STEPS_OF_ORDER
    part = effort.part(policies, steps=most if effort.steps is None else min(most, effort.steps))
    found = vary_policy(problem, initial[0], policy, part)
    for turn in range(MOST_REFINEMENTS if effort.steps is None else 1):
        before = found
        part = effort.part(refinements, steps=effort.steps, seed=effort.seed + turn)
        found = refine(problem, [found, *initial[1:]], part)
        if found.period > before.period * (1 - WORTH_MORE) or effort.is_met(problem, found.period):
            break
    return improve(problem, found, effort.part(1.0)) if problem.size < SINGLE_UP_TO else found


def _in_processes(problem: Problem, initial: Sequence[Incumbent], policy: Policy, effort: Effort) -> list[Incumbent]:
    """What each walk finds, in the order of the seeds; against the clock, one that meets the bound ends the others."""
    over, deadline, processes = multiprocessing.get_context("spawn").Event(), effort.deadline, effort.processes
    seconds = None if effort.steps is not None else deadline.left / -(-WALKS // processes)
    steps = None if effort.steps is None else effort.steps // WALKS
    found: dict[int, Incumbent] = {}
    seeds = range(effort.seed * WALKS, (effort.seed + 1) * WALKS)
    tasks = iter([(problem, initial, policy, effort.bound, steps, seconds, seed) for seed in seeds])
    walks = map_unordered(partial(_walk, over), tasks, processes, lambda: over.set() if deadline.is_over else None)
    with contextlib.closing(walks):
        for (*_, seed), (one, spent) in walks:
            found[seed] = one
            effort.spend(spent)
            effort.report("searching", one.period)
            if effort.steps is None and effort.is_met(problem, one.period):
                break
    return [found[seed] for seed in seeds if seed in found]


def _walk(
    over: Stop,
    problem: Problem,
    initial: Sequence[Incumbent],
    policy: Policy,
    bound: float,
    steps: int | None,
    seconds: float | None,
    seed: int,
) -> tuple[Incumbent, int]:
    """(what a walk finds, its steps), in a child process."""
    effort = Effort(bound, Deadline(seconds, over), steps, seed)
    return walk(problem, initial, policy, effort), effort.spent
