"""Walks: from the list scheduler's best order to better ones, several walks beside each other.

A walk varies the policy, refines what it found and the other initial orders, then anneals single operations. Walks
differ in their seed alone, so how many run at once changes nothing but the time they take: with steps in place of a
wall limit the result depends on the seed and the steps only.
"""

from __future__ import annotations

import contextlib
import multiprocessing
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from recycle.solve.deadline import Deadline, Stop
from recycle.solve.incumbent import Incumbent, Progress, is_met
from recycle.solve.problem import Problem
from recycle.solve.processes import map_unordered
from recycle.solve.search.improve import improve
from recycle.solve.search.list_scheduling import Policy
from recycle.solve.search.policy_search import vary_policy
from recycle.solve.search.refine import refine

WALKS = 2
SEARCH_STEPS = 1 << 40
POLICIES = 4_000
"""Policies that a walk tries at most on its way."""
SINGLE_UP_TO = 100_000
"""Operations from which moving single ones is too slow to gain anything."""
SHARES = ((10_000, (0.3, 0.15)), (SINGLE_UP_TO, (0.1, 0.7)), (1 << 60, (0.1, 1.0)))
"""By number of operations: shares of the time that is left for policies, then for refinement; the rest is for moves."""
ANNEALED_SHARES = (0.1, 0.1)
"""The same of less than the first size where annealing gains most: of a single pipeline, and with several chunks."""
MOST_REFINEMENTS, WORTH_MORE = 8, 0.003
"""Refinements against the clock, each for the share of what is left then, and the share of the period that one of them
must gain for another: where it still gains, it gains more than moves."""
ONE_WALK_FROM, ONE_WALK_UP_TO = 1_000, 30_000
"""Operations from which on a second walk against the clock in the same process gains less
than a longer first one; and up to which that was seen."""
WORTH_PROCESSES = 4.0
"""Seconds of search from which starting processes for the walks pays."""


def search(
    problem: Problem,
    initial: Sequence[Incumbent],
    policy: Policy,
    bound: float,
    *,
    steps: int | None,
    seed: int,
    deadline: Deadline,
    processes: int = 1,
    progress: Progress | None = None,
) -> Incumbent:
    """The best order of all walks; the best of `initial` where none is better.

    Args:
        initial: where to begin, the best first.
        policy: the one that did best on this problem.
        bound: a proven lower bound; a period that meets it ends the search.
        steps: moves of all walks together, in place of the deadline.
        deadline: wall limit of all walks together.
        processes: walks at once. Above 1 only where the search is long enough to pay for starting them.
        progress: called with what is being done and the best period so far.
    """
    walks = 1 if steps is None and processes == 1 and _is_long(problem) else WALKS
    share = None if steps is None else steps // walks
    seeds = [seed * WALKS + walk for walk in range(walks)]
    start = initial[0]
    if is_met(problem, start.period, bound) or deadline.is_over:
        return start
    if processes > 1 and deadline.left > WORTH_PROCESSES:
        found = _in_processes(problem, initial, policy, bound, share, seeds, deadline, processes, progress)
    else:
        found = []
        for turn, one in enumerate(seeds):
            mine = deadline if steps is not None else deadline.part(1 / (walks - turn))
            found.append(walk(problem, initial, policy, bound, steps=share, seed=one, deadline=mine, progress=progress))
            if is_met(problem, found[-1].period, bound):
                break
    best = min(found, key=lambda one: one.period)  # of equals the first, whichever came in first
    return replace(best, steps=start.steps + sum(one.steps - start.steps for one in found))


def _is_long(problem: Problem) -> bool:
    """Whether one walk takes all the time there is."""
    return ONE_WALK_FROM < problem.size < ONE_WALK_UP_TO


def walk(
    problem: Problem,
    initial: Sequence[Incumbent],
    policy: Policy,
    bound: float,
    *,
    steps: int | None,
    seed: int,
    deadline: Deadline,
    progress: Progress | None = None,
) -> Incumbent:
    """One walk from `initial`; never worse than the best of them."""
    orders = None if steps is None else steps // 50
    best = initial[0].period

    def report(stage: str, period: float) -> None:
        nonlocal best
        if progress and period < best:
            best = period
            progress(stage, period)

    def share(of_the_time: float) -> Deadline:
        return deadline if steps is not None else deadline.part(of_the_time)

    policies, refinements = next(shares for size, shares in SHARES if problem.size < size)
    if problem.size < SHARES[0][0] and (problem.shape.chunks > 1 or problem.shape.pipelines == 1):
        policies, refinements = ANNEALED_SHARES
    most = min(POLICIES, 3 * problem.size)
    found = vary_policy(
        problem,
        initial[0],
        policy,
        bound,
        steps=most if orders is None else min(most, orders),
        seed=seed,
        deadline=share(policies),
        progress=report,
    )
    spent = found.steps
    found = found if found.period < initial[0].period else initial[0]
    for turn in range(MOST_REFINEMENTS if orders is None else 1):
        before = found
        found = refine(
            problem,
            [found, *initial[1:]],
            bound,
            steps=SEARCH_STEPS if orders is None else orders,
            seed=seed + turn,
            deadline=share(refinements),
            progress=report,
        )
        spent += found.steps
        if found.period > before.period * (1 - WORTH_MORE) or is_met(problem, found.period, bound):
            break
    found = replace(found, steps=initial[0].steps + spent)
    if problem.size < SINGLE_UP_TO:
        limit = SEARCH_STEPS if steps is None else steps
        found = improve(problem, found, bound, steps=limit, seed=seed, deadline=deadline, progress=report)
    return found


def _in_processes(
    problem: Problem,
    initial: Sequence[Incumbent],
    policy: Policy,
    bound: float,
    steps: int | None,
    seeds: list[int],
    deadline: Deadline,
    processes: int,
    progress: Progress | None,
) -> list[Incumbent]:
    """What each walk finds, in the order of the seeds; against the clock, one that meets the bound ends the others."""
    over = multiprocessing.get_context("spawn").Event()
    best = initial[0].period
    left = None if steps is not None else deadline.left / -(-len(seeds) // processes)
    found: dict[int, Incumbent] = {}
    tasks = iter([(problem, initial, policy, bound, steps, left, seed) for seed in seeds])
    walks = map_unordered(partial(_walk, over), tasks, processes, lambda: over.set() if deadline.is_over else None)
    with contextlib.closing(walks):
        for (*_, seed), one in walks:
            found[seed] = one
            if progress and one.period < best:
                best = one.period
                progress("searching", best)
            if steps is None and is_met(problem, one.period, bound):
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
) -> Incumbent:
    return walk(problem, initial, policy, bound, steps=steps, seed=seed, deadline=Deadline(seconds, over))
