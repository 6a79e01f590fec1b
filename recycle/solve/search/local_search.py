"""Local search from initial orders: waves and insertion if they are promising, then parallel walks of several seeds.

A walk varies the policy, then anneals single operations. Walks differ only in their seed, so the number of parallel
walks affects only the duration. With a limit of steps the result depends only on the seed and the steps.
"""

from __future__ import annotations

import contextlib
import multiprocessing
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from recycle.solve.bounds import even_load
from recycle.solve.constants import (
    ANNEALING_UP_TO,
    FIRST_START_SHARE,
    INSERTION_RATIO,
    INSERTION_SHARE,
    LESS_POLICY_SHARE,
    MOST_POLICIES,
    MOVES_UP_TO,
    ONE_WALK_FROM,
    ONE_WALK_UP_TO,
    PIPELINE_INSERTION_SHARE,
    POLICY_SHARE,
    PROCESS_SECONDS,
    WALKS,
    WAVE_SECONDS,
    WAVE_SHARE,
)
from recycle.solve.effort import STEPS_OF_ORDER, Deadline, Effort, Incumbent, Stop, shortest
from recycle.solve.problem import TOLERANCE, Problem
from recycle.solve.processes import map_unordered
from recycle.solve.search.annealing import improve
from recycle.solve.search.initial_orders import SearchStart
from recycle.solve.search.insertion import vary_insertion
from recycle.solve.search.kernels import load_if_worth_it
from recycle.solve.search.list_scheduling import Policy
from recycle.solve.search.policy_search import vary_policy
from recycle.solve.search.waves import best_wave


def search_from_all(starts: Sequence[SearchStart], effort: Effort) -> Incumbent:
    """Return the best order of searches from each start, in turn; starts whose bound is above the best are left out.

    Each search has all steps, so a plan of as many steps without a slow worker is never shorter. The problem with all
    workers starts from the best order so far.
    """
    best, fewest = starts[0].best, min(len(start.problem.dead) for start in starts)
    for turn, start in enumerate(starts):
        problem, part = start.problem, effort.part(1.0)
        if turn and (effort.deadline.is_over or even_load(problem) > best.period - TOLERANCE):
            continue
        if effort.steps is None and turn + 1 < len(starts):
            part = effort.part(FIRST_START_SHARE)
        begun = replace(start, best=best) if len(problem.dead) == fewest else start
        best = shortest([best, search_from(begun, part)])
        if effort.is_met(problem, best.period):
            break
    return best


def search_from(start: SearchStart, effort: Effort) -> Incumbent:
    """Return the best order, never worse than the best of the beginning."""
    problem, best, shape = start.problem, start.best, start.problem.shape
    load_if_worth_it(problem, effort.orders, effort.deadline)
    is_time_left = effort.deadline.seconds_left > WAVE_SECONDS * problem.size
    if shape.chunks > 1 and shape.placement == "loop" and is_time_left and not effort.is_met(problem, best.period):
        best = shortest([best, best_wave(problem, effort.part(WAVE_SHARE))])
        effort.report("searching", best.period)
    inserted = start.inserted
    if inserted is not None and inserted[0].period <= INSERTION_RATIO * best.period:
        is_single = shape.pipelines == shape.chunks == 1 and problem.size <= ANNEALING_UP_TO
        part = effort.part(PIPELINE_INSERTION_SHARE if is_single else INSERTION_SHARE)
        best = shortest([best, vary_insertion(problem, *inserted, part)])
    steps = effort.steps and int(effort.steps_left)
    return _walks(problem, best, start.policy, effort.part(1.0, steps=steps))


def _walks(problem: Problem, start: Incumbent, policy: Policy, effort: Effort) -> Incumbent:
    if effort.is_met(problem, start.period) or effort.deadline.is_over:
        return start
    if effort.processes > 1 and effort.deadline.seconds_left > PROCESS_SECONDS:
        return shortest(_in_processes(problem, start, policy, effort))
    is_long = effort.steps is None and effort.processes == 1 and ONE_WALK_FROM < problem.size < ONE_WALK_UP_TO
    walks = 1 if is_long else WALKS
    results = [start]
    for turn in range(walks):
        part = effort.part(1 / walks, 1 - turn / walks, seed=effort.seed * WALKS + turn)
        results.append(_walk(problem, start, policy, part))
        if effort.is_met(problem, results[-1].period):
            break
    return shortest(results)


def _walk(problem: Problem, start: Incumbent, policy: Policy, effort: Effort) -> Incumbent:
    is_plain = problem.shape.chunks == 1 < problem.shape.pipelines
    share = POLICY_SHARE if is_plain and problem.size < ANNEALING_UP_TO else LESS_POLICY_SHARE
    if problem.size >= MOVES_UP_TO:
        share = 1.0
    most = min(MOST_POLICIES, 3 * problem.size) * STEPS_OF_ORDER
    steps = most if effort.steps is None else min(most, effort.steps)
    varied = vary_policy(problem, start, policy, effort.part(share, steps=steps))
    return improve(problem, varied, effort.part(1.0)) if problem.size < MOVES_UP_TO else varied


def _in_processes(problem: Problem, start: Incumbent, policy: Policy, effort: Effort) -> list[Incumbent]:
    over, deadline, processes = multiprocessing.get_context("spawn").Event(), effort.deadline, effort.processes
    seconds = None if effort.steps is not None else deadline.seconds_left / -(-WALKS // processes)
    steps = None if effort.steps is None else effort.steps // WALKS
    results: dict[int, Incumbent] = {}
    seeds = range(effort.seed * WALKS, (effort.seed + 1) * WALKS)
    tasks = iter([(problem, start, policy, effort.bound, steps, seconds, seed) for seed in seeds])
    walks = map_unordered(
        partial(_walk_in_child, over), tasks, processes, lambda: over.set() if deadline.is_over else None
    )
    with contextlib.closing(walks):
        for (*_, seed), (result, spent) in walks:
            results[seed] = result
            effort.spend(spent)
            effort.report("searching", result.period)
            if effort.steps is None and effort.is_met(problem, result.period):
                break
    return [results[seed] for seed in seeds if seed in results]


def _walk_in_child(
    over: Stop,
    problem: Problem,
    start: Incumbent,
    policy: Policy,
    bound: float,
    steps: int | None,
    seconds: float | None,
    seed: int,
) -> tuple[Incumbent, int]:
    effort = Effort(bound, Deadline(seconds, over), steps, seed)
    return _walk(problem, start, policy, effort), effort.spent
