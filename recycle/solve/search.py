"""Walks: from the list scheduler's best order to better ones, several walks beside each other.

A walk varies the policy, then moves single operations and re-orders windows of them in turn. Walks
differ in their seed alone, so how many run at once changes nothing but the time they take: with steps in place of a
wall limit the result depends on the seed and the steps only.
"""

from __future__ import annotations

import multiprocessing
import signal
import threading
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import replace
from multiprocessing.synchronize import Event

from recycle.solve import child
from recycle.solve.construct import Policy
from recycle.solve.deadline import Deadline
from recycle.solve.improve import WORTH_COMPILING, WORTH_COMPILING_FOR, Found, Progress, improve, is_met, vary
from recycle.solve.problem import Problem
from recycle.solve.windows import Windows

WALKS = 2
SEARCH_STEPS = 1 << 40
POLICIES = 4_000
"""Policies that a walk tries at most on its way to single operations; large problems have nothing else to gain."""
POLICIES_ONLY_FROM = 100_000
"""Operations from which moving single ones is too slow to gain anything."""
WINDOWS_UP_TO, WORTH_WINDOWS = 20_000, 3.0
"""Operations up to which windows are tried, and seconds of search from which starting their solver pays."""
WORTH_PROCESSES = 4.0
"""Seconds of search from which starting processes for the walks pays."""


def search(
    problem: Problem,
    start: Found,
    policy: Policy,
    bound: float,
    *,
    steps: int | None,
    seed: int,
    deadline: Deadline,
    processes: int = 1,
    progress: Progress | None = None,
) -> Found:
    """The best order of all walks; `start` where none is better.

    Args:
        policy: that of `start`.
        bound: a proven lower bound; a period that meets it ends the search.
        steps: moves of all walks together, in place of the deadline.
        deadline: wall limit of all walks together.
        processes: walks at once. Above 1 only where the search is long enough to pay for starting them.
        progress: told the best period so far.
    """
    share = None if steps is None else steps // WALKS
    seeds = [seed * WALKS + walk for walk in range(WALKS)]
    if is_met(problem, start.period, bound) or deadline.is_over:
        return start
    if processes > 1 and deadline.left > WORTH_PROCESSES:
        found = _beside_each_other(problem, start, policy, bound, share, seeds, deadline, processes, progress)
    else:
        found = []
        for turn, one in enumerate(seeds):
            mine = deadline if steps is not None else deadline.part(1 / (WALKS - turn))
            found.append(walk(problem, start, policy, bound, steps=share, seed=one, deadline=mine, progress=progress))
            if is_met(problem, found[-1].period, bound):
                break
    best = min(found, key=lambda one: one.period)  # of equals the first, whichever came in first
    return replace(best, steps=start.steps + sum(one.steps - start.steps for one in found))


def walk(
    problem: Problem,
    start: Found,
    policy: Policy,
    bound: float,
    *,
    steps: int | None,
    seed: int,
    deadline: Deadline,
    progress: Progress | None = None,
) -> Found:
    """One walk from `start`; never worse."""
    if problem.size >= POLICIES_ONLY_FROM:
        policies, of_the_time = SEARCH_STEPS if steps is None else steps // 50, 1.0
    else:
        policies = min(POLICIES, 3 * problem.size) if steps is None else min(POLICIES, 3 * problem.size, steps // 50)
        of_the_time = 0.25 if problem.size < POLICIES_ONLY_FROM // 10 else 0.7
    best = start.period

    def report(stage: str, period: float) -> None:
        nonlocal best
        if progress and period < best:
            best = period
            progress(stage, period)

    part = deadline if steps is not None else deadline.part(of_the_time)
    found = vary(problem, start, policy, bound, steps=policies, seed=seed, deadline=part, progress=report)
    found = replace(found, steps=start.steps + found.steps)
    if problem.size < POLICIES_ONLY_FROM:
        limit = SEARCH_STEPS if steps is None else steps
        pays = problem.size <= WINDOWS_UP_TO and deadline.left > WORTH_WINDOWS and child.missing("HiGHS") is None
        often = deadline.left > WORTH_COMPILING and problem.size > WORTH_COMPILING_FOR / 20_000
        with Windows(problem, often=often) as windows:
            found = improve(
                problem,
                found,
                bound,
                steps=limit,
                seed=seed,
                deadline=deadline,
                windows=windows if pays else None,
                progress=report,
            )
    return found


def _beside_each_other(
    problem: Problem,
    start: Found,
    policy: Policy,
    bound: float,
    steps: int | None,
    seeds: list[int],
    deadline: Deadline,
    processes: int,
    progress: Progress | None,
) -> list[Found]:
    """What each walk finds, in the order of the seeds; a walk that meets the bound ends the others."""
    context = multiprocessing.get_context("spawn")
    over = context.Event()
    rounds = -(-len(seeds) // processes)
    best = start.period
    with ProcessPoolExecutor(min(processes, len(seeds)), context, _prepare, (over,)) as pool:
        left = None if steps is not None else deadline.left / rounds
        walks = [pool.submit(_walk, problem, start, policy, bound, steps, seed, left) for seed in seeds]
        waiting: set[Future[Found]] = set(walks)
        while waiting:
            done, waiting = wait(waiting, 0.1, FIRST_COMPLETED)
            for one in done:
                if progress and one.result().period < best:
                    best = one.result().period
                    progress("searching", best)
                if steps is None and is_met(problem, one.result().period, bound):
                    over.set()
            if deadline.is_over:
                over.set()
    return [one.result() for one in walks]


_over: Event | None = None


def _prepare(over: Event) -> None:
    """In a child: Ctrl-C is the parent's affair, and a child without a parent ends."""
    global _over
    _over = over
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    assert parent is not None
    threading.Thread(target=_end_with, args=(parent.join,), daemon=True).start()


def _end_with(join: Callable[[], None]) -> None:
    join()
    signal.raise_signal(signal.SIGKILL)


def _walk(
    problem: Problem, start: Found, policy: Policy, bound: float, steps: int | None, seed: int, seconds: float | None
) -> Found:
    assert _over is not None
    return walk(problem, start, policy, bound, steps=steps, seed=seed, deadline=Deadline(seconds, _over))
