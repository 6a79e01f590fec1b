"""Compile the kernels of the search, and those that time schedules, into numba's cache.

    python -m recycle.solve.search.compile_kernels MARK

Calls each kernel once on a minimal problem. Takes tens of seconds of one core, at low priority.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from recycle.ir import event_graph
from recycle.ir.compiled import load, touch_cache
from recycle.job import Job, price
from recycle.solve.assignment import possible_assignments
from recycle.solve.problem import Problem
from recycle.solve.search.annealing import anneal
from recycle.solve.search.insertion import default_parameters, insertion_order
from recycle.solve.search.kernels import KERNELS
from recycle.solve.search.list_scheduling import schedule_by_policy
from recycle.solve.search.order_kernels import time_order

_SMALLEST = "[shape]\npipelines = 1\nranks = 2\nmicro_batches = 2\n"


def compile_all() -> None:
    load(*KERNELS)
    problem = Problem.from_job(price(Job.from_toml(_SMALLEST, "the smallest job")))
    order = schedule_by_policy(problem)
    timing = time_order(problem, order)
    anneal(problem, order, timing.due, timing.period, steps=1)
    insertion_order(problem, default_parameters(problem, possible_assignments(problem)[0], waiting=1))
    touch_cache(*KERNELS)
    event_graph.compile_all()


if __name__ == "__main__":
    os.nice(max(0, 10 - os.nice(0)))
    try:
        compile_all()
    finally:
        Path(sys.argv[1]).unlink(missing_ok=True)
