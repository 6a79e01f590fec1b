"""Schedule families as orders to begin with: a search from them never ends with a worse one.

A family fits a problem where all workers are alive and chunk c of rank r is on stage c * P + r, where its memory is
admitted, and where it does not split the backward pass although the problem keeps it whole. Where the problem splits
it, a whole B is an I that its W follows at once; its gradient leaves earlier then, so that nothing gets later.

Greedy 1F1B is made by the list scheduler, so it fits any dead workers and any assignment.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from recycle.errors import ScheduleError
from recycle.ir.families import BUILT_IN, FAMILIES, TWO_CHUNKS
from recycle.ir.instruction import Backward, BackwardInput, BackwardWeight, Forward
from recycle.ir.schedule import Schedule
from recycle.solve.assignment import Assignment
from recycle.solve.problem import Order, Problem
from recycle.solve.problem_arrays import FORWARD, INPUT, WEIGHT
from recycle.solve.search.list_scheduling import schedule_by_priority, warm_up


def family_orders(problem: Problem) -> Iterator[Order]:
    """The orders of all families of the package that fit; none where workers are dead."""
    for name in BUILT_IN:
        if problem.dead or name in TWO_CHUNKS:  # those are on the V
            continue
        try:
            order = order_of(problem, FAMILIES[name](problem.shape))
        except ScheduleError:
            continue
        if order is not None and problem.is_within_caps(order):
            yield order


def order_of(problem: Problem, schedule: Schedule) -> Order | None:
    """A compute-only schedule of the problem's shape and placement as an order; None where only that one is split."""
    c = schedule.columns
    operation = c.stage * problem.micro_batches + c.pipeline * problem.shape.micro_batches + c.index
    operation = operation.astype(np.int64)
    plane = problem.shape.stages * problem.micro_batches
    worker = np.asarray(c.worker, dtype=np.int64)
    kinds = {Forward.kind: (FORWARD,), Backward.kind: (INPUT, WEIGHT) if problem.split else (INPUT,)}
    if problem.split:
        kinds |= {BackwardInput.kind: (INPUT,), BackwardWeight.kind: (WEIGHT,)}
    if not np.isin(c.kind, list(kinds)).all():
        return None
    place, stands_for = [], []
    for kind, codes in kinds.items():
        rows = np.flatnonzero(c.kind == kind)
        for code in codes:
            place.append(2 * rows + (code == 2))
            stands_for.append(operation[rows] + code * plane)
    line = np.argsort(np.concatenate(place), kind="stable")
    operations = np.concatenate(stands_for)[line]
    ends = np.cumsum(np.bincount(worker[np.concatenate(place)[line] // 2], minlength=problem.shape.worker_count))
    return [program.tolist() for program in np.split(operations, ends[:-1])]


def greedy_1f1b(problem: Problem, assignment: Assignment) -> Order:
    """Greedy 1F1B on the live workers: a backward pass whenever one is there, its W at once, and no more micro-batches
    in flight than 1F1B (with chunks: interleaved 1F1B) has before its first backward."""
    n, m, stages = problem.micro_batches, problem.shape.micro_batches, problem.shape.stages
    turn = np.tile(np.arange(n) % m * problem.shape.pipelines + np.arange(n) // m, stages)
    priority = np.concatenate([turn + 2 * n, turn + n, turn][: problem.kinds])
    return schedule_by_priority(problem, assignment.host, priority.astype(np.float64), hold=warm_up(problem))
