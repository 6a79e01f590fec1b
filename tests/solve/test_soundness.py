"""No bound is above the period of a valid schedule: held against exhaustive search and against CP-SAT.

The jobs are of every kind: dead and slow workers, chunks, tight memory, transfers that queue, both optimizers.
Both let any live host of a stage run any micro-batch. CP-SAT's schedules count only once `check` has passed them, and
with the period that `simulate` gives them, so an error in its model cannot make a sound bound look wrong.
"""

from __future__ import annotations

import importlib.util
import random
from concurrent.futures import ProcessPoolExecutor
from itertools import repeat
from multiprocessing import get_context

import pytest

from benchmarks import cp_sat
from recycle.job import PricedJob
from recycle.solve import time_indexed
from recycle.solve.bounds import closed_form, lower_bound
from recycle.solve.problem import Problem
from recycle.solve.search.list_scheduling import schedule_by_policy
from tests.solve.exhaustive import best_of_all, count_of_orders

MOST_ORDERS = 300
needs_ortools = pytest.mark.skipif(
    importlib.util.find_spec("ortools") is None, reason="ortools is missing: pip install '.[test]'"
)


def tiny_problems(count: int) -> list[tuple[PricedJob, Problem]]:
    """The first jobs, by seed, that have few enough orders to try them all, and more than one."""
    found: list[tuple[PricedJob, Problem]] = []
    seed = 0
    while len(found) < count:
        job, dead = cp_sat.small_job(random.Random(seed), most=2)
        problem = Problem.of(job, dead)
        if problem.size <= 24 and 1 < count_of_orders(problem) <= MOST_ORDERS:
            found.append((job, problem))
        seed += 1
    return found


@pytest.mark.search
def test_no_bound_is_above_the_optimum_of_exhaustive_search():
    met = 0
    for job, problem in tiny_problems(80):
        optimum, bound = best_of_all(problem, job.prices), lower_bound(problem)
        assert bound <= optimum + 1e-9, (job, problem.dead)
        assert closed_form(problem) <= bound + 1e-9
        met += bound > optimum - 1e-9
    assert met > 74


def hold_against_cp_sat(seeds: range, most: int, seconds: float, exact_seconds: float) -> int:
    """How many of these jobs' bounds equal the period of the best schedule; fails for one that is above it."""
    jobs = [cp_sat.small_job(random.Random(seed), most) for seed in seeds]
    problems = [Problem.of(job, dead) for job, dead in jobs]
    met = 0
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        answers = pool.map(cp_sat.solve, problems, repeat(seconds), repeat(1))
        for seed, (job, _), problem, answer in zip(seeds, jobs, problems, answers, strict=True):
            if answer.order is None:
                continue
            best, bound = cp_sat.valid_period(job, problem, answer.order), lower_bound(problem)
            solved = time_indexed.solve(problem, schedule_by_policy(problem), bound, exact_seconds)
            assert max(bound, solved.bound) <= best + 1e-6, f"seed {seed}: {job}, dead {sorted(problem.dead)}"
            met += max(bound, solved.bound) > best - problem.grain - 1e-6
    return met


@needs_ortools
@pytest.mark.search
@pytest.mark.process
def test_no_bound_is_above_the_period_of_a_schedule_of_cp_sat():
    assert hold_against_cp_sat(range(24), most=2, seconds=1.0, exact_seconds=1.0) > 13


@needs_ortools
@pytest.mark.soak
@pytest.mark.parametrize("block", range(20))
def test_no_bound_of_many_jobs_is_above_the_period_of_a_schedule_of_cp_sat(block):
    assert hold_against_cp_sat(range(100 * block, 100 * block + 100), most=6, seconds=5.0, exact_seconds=5.0) > 50
