"""How near building blocks come to the best there are, and these to the bound that memory and work give.

    python -m benchmarks.block_intervals NUMBER ... [--family FAMILY] [--seed N] [--step T] [--seconds S]

Jobs are those of `planner_random`, one pipeline of each, in which every micro-batch follows the one before after the
same interval. Printed are the shortest interval that work and memory could admit if operations could overlap, the
shortest that CP-SAT does not rule out, of those in steps of `--step`, and the shortest that the search meets. CP-SAT
places the operations of a micro-batch so that no two of a worker overlap modulo the interval, and minimises what the
fullest worker holds on average; an interval is ruled out when even that is more than its memory. Needs ortools:
pip install '.[test]'.
"""

from __future__ import annotations

import argparse
import sys
from itertools import combinations, islice
from math import ceil
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent))
from benchmarks.planner_random import FAMILIES, drawn
from recycle.solve.assignment import by_slots
from recycle.solve.problem import Problem
from recycle.solve.search.building_blocks import block_orders
from recycle.solve.search.kernels import load_all
from recycle.solve.template import one_pipeline

GRAIN = 20
"""Ticks of CP-SAT per unit of time; times of the jobs have one decimal, links two."""
ATTEMPTS = 80
"""Intervals that the search tries, of some hundredths of a second each."""


def shortest(problem: Problem) -> float:
    """The interval below which a worker has too much to do, or too much to hold however its operations lie."""
    ranks = np.arange(problem.shape.stages) % problem.shape.ranks
    times = problem.times.reshape(3, -1)
    held = times.sum(axis=0) + np.array(problem.way_back)
    cap = np.array(problem.cap)
    return max(np.bincount(ranks, times.sum(axis=0)).max(), (np.bincount(ranks, held) / cap).max())


def least_held(problem: Problem, interval: int, seconds: float) -> float:
    """A lower bound on the micro-batches that the fullest worker holds on average, relative to its memory."""
    from ortools.sat.python import cp_model

    model: Any = cp_model.CpModel()
    stages, ranks = problem.shape.stages, problem.shape.ranks
    times = np.rint(problem.times.reshape(3, stages) * GRAIN).astype(int).tolist()
    link, last = round(problem.link * GRAIN), 4 * sum(map(sum, times))
    start = [[model.NewIntVar(0, last, "") for _ in range(stages)] for _ in range(3)]
    for s in range(stages - 1):
        model.Add(start[0][s + 1] >= start[0][s] + times[0][s] + link)
        model.Add(start[1][s] >= start[1][s + 1] + times[1][s + 1] + link)
    model.Add(start[0][0] == 0)
    model.Add(start[1][-1] >= start[0][-1] + times[0][-1])
    held = model.NewIntVar(0, last * stages, "")
    for rank in range(ranks):
        hosted = range(rank, stages, ranks)
        for s in hosted:
            model.Add(start[2][s] >= start[1][s] + times[1][s])
        for (one, s), (other, t) in combinations([(kind, s) for s in hosted for kind in range(3)], 2):
            turn = model.NewIntVar(-last // interval - 1, last // interval + 1, "")
            apart = start[one][s] - start[other][t] - interval * turn
            model.Add(apart >= times[other][t])
            model.Add(apart <= interval - times[one][s])
        share = round(1000 / problem.cap[rank])
        model.Add(held >= share * sum(start[2][s] + times[2][s] - start[0][s] for s in hosted))
    model.Minimize(held)
    solver: Any = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds, solver.parameters.num_workers = seconds, 1
    if solver.Solve(model) == cp_model.INFEASIBLE:
        return float("inf")
    return float(solver.BestObjectiveBound()) / 1000 / interval


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("numbers", type=int, nargs="+", metavar="NUMBER", help="of jobs of the family")
    parser.add_argument("--family", default="v2-tight", choices=FAMILIES)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=20.0, help="of CP-SAT for each interval")
    parser.add_argument("--step", type=float, default=0.1, help="from one interval to the next, in units of F")
    given = parser.parse_args()
    load_all()
    print(f"{'job':>4}{'work and memory':>18}{'not ruled out':>16}{'met':>8}")
    for number in given.numbers:
        job, dead, text = drawn(given.family, number, given.seed)
        whole = Problem.of(job, dead)
        running = min(map(len, whole.hosts))
        problem = one_pipeline(whole, by_slots(whole, running).slots, running, is_mean=False)
        attempts = islice(block_orders(problem, steps=2_000), ATTEMPTS)
        met = min(interval for order, interval, _ in attempts if order is not None)
        least = shortest(problem)
        tried = np.arange(ceil(least * GRAIN), met * GRAIN, given.step * GRAIN).round().astype(int).tolist()
        admitted = (one / GRAIN for one in tried if least_held(problem, one, given.seconds) < 1.0 + 1e-3)
        high = next(admitted, met)
        print(f"{number:>4}{least:>18.2f}{high:>16.2f}{met:>8.2f}   {text}", flush=True)


if __name__ == "__main__":
    main()
