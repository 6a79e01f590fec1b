"""The exact model of one order's neighbourhood: a disjunctive MILP that polishes a small plan.

Routes and, per worker and kind, the order of the start are kept; the solver decides how F, I and W interleave: a
continuous start time per operation, one binary and two big-M rows per pair on a worker that is still open. Optimal
within that neighbourhood only, so its bound is not a bound on the plan. Written with python-mip; HiGHS unless told.

What goes wrong in practice, and is dealt with here: rows follow the start's *true* sequence, not micro-batch indices
(else a good start is infeasible and silently dropped); the warm start gives every variable; the horizon covers the
start's own last end and each pair has its own M; only the order is taken from the solution and timed again; time
limits overshoot, so the solver works in a child process that is killed at the deadline.
Limits: stashed shares below 1 (the order is returned as it is), several chunks only as far as memory rows allow.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from recycle.solve import child
from recycle.solve.problem import Order, Problem
from recycle.solve.timing import start_times, time_order

Solver = Literal["HiGHS", "CBC"]


@dataclass(frozen=True)
class Model:
    """The disjunctive model as plain numbers, which travel to the child process.

    Attributes:
        seconds: duration of each operation.
        earliest, latest: window of each start time under the horizon.
        after: (i, j, delay): start of j >= start of i + delay.
        open_pairs: (i, j): operations on one worker whose order is free.
        windows: (first operation of a worker or -1 for time 0, operation, finish): T >= end + finish - first's start.
        warm: start time of each operation in the starting order.
        period: the starting order's.
        bound: a proven lower bound on T.
    """

    seconds: list[float]
    earliest: list[float]
    latest: list[float]
    after: list[tuple[int, int, float]]
    open_pairs: list[tuple[int, int]]
    windows: list[tuple[int, int, float]]
    warm: list[float]
    period: float
    bound: float


@dataclass(frozen=True)
class Solved:
    """What the solver came to.

    Attributes:
        order: never worse than the start.
        period: its period by right-shift.
        status: of the solver, or why it did not run ("too large", "killed", "lost start", ...).
    """

    order: Order
    period: float
    status: str


def solve(
    problem: Problem, start: Order, bound: float = 0.0, *, seconds: float, solver: Solver = "HiGHS", most: int = 600
) -> Solved:
    """The best interleaving found within `seconds` of wall time.

    Args:
        start: a complete order within the caps.
        bound: a proven lower bound on the period; meeting it ends the solve.
        most: binaries above which nothing is tried.
    """
    period = time_order(problem, start).period
    if problem.stash != 1.0 or problem.shape.chunks > 1 or math.isinf(period):
        return Solved(start, period, "not modelled")
    model = build(problem, start, bound)
    if len(model.open_pairs) > most:
        return Solved(start, period, "too large")
    answers, ended = child.ask(__name__, (model, solver, max(0.5, seconds - 1.0)), max(seconds, 1.5))
    status, times = answers[-1] if answers else (ended, None)
    if times is None:
        return Solved(start, period, status)
    order = [sorted(program, key=lambda operation: (round(times[operation], 6), operation)) for program in start]
    polished = time_order(problem, order).period
    if polished < period - 1e-9 and problem.is_within_caps(order):
        return Solved(order, polished, status)
    return Solved(start, period, status)


def build(problem: Problem, start: Order, bound: float = 0.0) -> Model:
    """The model around `start`."""
    stages, n, plane = problem.shape.stages, problem.micro_batches, problem.shape.stages * problem.micro_batches
    host = {operation: w for w, program in enumerate(start) for operation in program}
    seconds = [problem.duration(x // plane, x // n % stages, host[x]) for x in range(problem.size)]
    after: list[tuple[int, int, float]] = []
    needs = zip(problem.needs.tolist(), problem.needs_here.tolist(), strict=True)
    for x, (made, here) in enumerate(needs):
        if made >= 0:
            after.append((made, x, seconds[made] + problem.link * (host[x] != host[made])))
        if here >= 0:
            after.append((here, x, seconds[here]))
    pairs: list[tuple[int, int]] = []
    for w, program in enumerate(start):
        first_local = len(after)
        rows = [[x for x in program if x // plane == kind] for kind in range(problem.kinds)]
        for row in rows:
            after += [(i, j, seconds[i]) for i, j in pairwise(row)]
        slots = problem.cap[w]
        if not math.isinf(slots):
            freed, slots = rows[-1], int(slots + 1e-9)
            after += [(i, j, seconds[i]) for i, j in zip(freed, rows[0][slots:], strict=False)]
        local = [(i, j) for i, j, _ in after[first_local:]] + [(x - plane, x) for x in program if x >= plane]
        pairs += _unordered(program, local, plane)
    warm = start_times(problem, start)
    first = min(warm)
    warm = [time - first for time in warm]
    horizon = max(time + length for time, length in zip(warm, seconds, strict=True)) + 2 * problem.unit
    order = sorted(range(problem.size), key=lambda x: (warm[x], x // plane))
    earliest, latest = _windows(order, after, seconds, horizon)
    windows = []
    for program in start:
        if program:
            leader = program[0] if problem.staggered else -1
            stage = program[0] // n % stages
            ends = {x for w in problem.hosts[stage] for x in _last_of_kind(start[w], plane)}
            windows += [(leader, end, problem.finish[stage]) for end in sorted(ends)]
    after += [(i, j, seconds[i]) for i, j in pairs if earliest[j] + seconds[j] > latest[i] + 1e-9]
    still_open = [(i, j) for i, j in pairs if earliest[j] + seconds[j] <= latest[i] + 1e-9]
    return Model(seconds, earliest, latest, after, still_open, windows, warm, time_order(problem, start).period, bound)


def _last_of_kind(program: list[int], plane: int) -> list[int]:
    return list({x // plane: x for x in program}.values())


def _unordered(program: list[int], edges: list[tuple[int, int]], plane: int) -> list[tuple[int, int]]:
    """Pairs of different kinds, earlier one first, that the edges do not order, directly or by way of others."""
    place = {x: i for i, x in enumerate(program)}
    following: list[list[int]] = [[] for _ in program]
    for i, j in edges:
        following[place[i]].append(place[j])
    reach = [0] * len(program)
    for i in reversed(range(len(program))):
        for j in following[i]:
            reach[i] |= reach[j] | 1 << j
    return [
        (program[i], program[j])
        for i in range(len(program))
        for j in range(i + 1, len(program))
        if program[i] // plane != program[j] // plane and not reach[i] >> j & 1
    ]


def _windows(
    order: list[int], after: list[tuple[int, int, float]], seconds: list[float], horizon: float
) -> tuple[list[float], list[float]]:
    """Heads and tails: earliest and latest start of each operation under the precedence rows."""
    before: list[list[tuple[int, float]]] = [[] for _ in order]
    following: list[list[tuple[int, float]]] = [[] for _ in order]
    for i, j, delay in after:
        before[j].append((i, delay))
        following[i].append((j, delay))
    earliest, latest = [0.0] * len(order), [0.0] * len(order)
    for x in order:
        earliest[x] = max((earliest[i] + delay for i, delay in before[x]), default=0.0)
    for x in reversed(order):
        latest[x] = min((latest[j] - delay for j, delay in following[x]), default=horizon - seconds[x])
    return earliest, latest


def _solve(model: Model, solver: Solver, seconds: float) -> tuple[str, list[float] | None]:
    """Build the model in python-mip and solve it; (status, start times or None)."""
    import mip

    built = mip.Model(sense=mip.MINIMIZE, solver_name=solver)
    built.verbose = 0
    built.threads = 1
    size = len(model.seconds)
    time = [
        built.add_var(name=f"x{x}", lb=model.earliest[x], ub=max(model.latest[x], model.earliest[x]))
        for x in range(size)
    ]
    period = built.add_var(name="T", lb=model.bound, ub=model.period)
    first = [built.add_var(name=f"y{i}_{j}", var_type=mip.BINARY) for i, j in model.open_pairs]
    for i, j, delay in model.after:
        built += time[j] - time[i] >= delay
    for (i, j), before in zip(model.open_pairs, first, strict=True):
        i_first = model.latest[i] + model.seconds[i] - model.earliest[j]
        j_first = model.latest[j] + model.seconds[j] - model.earliest[i]
        built += time[j] - time[i] >= model.seconds[i] - i_first * (1 - before)
        built += time[i] - time[j] >= model.seconds[j] - j_first * before
    for leader, end, finish in model.windows:
        left = time[end] + model.seconds[end] + finish
        built += period >= (left - time[leader] if leader >= 0 else left)
    built.objective = period
    given = [(time[x], model.warm[x]) for x in range(size)] + [(period, model.period)]
    given += [
        (before, float(model.warm[i] < model.warm[j])) for (i, j), before in zip(model.open_pairs, first, strict=True)
    ]
    built.start = given
    status = built.optimize(max_seconds=seconds)
    if status not in (mip.OptimizationStatus.OPTIMAL, mip.OptimizationStatus.FEASIBLE):
        return status.name.lower(), None
    if built.objective_value > model.period + 1e-6:
        return "lost start", None
    return status.name.lower(), [float(variable.x) for variable in time]


if __name__ == "__main__":
    child.serve(lambda *request: child.answer(_solve(*request)))
