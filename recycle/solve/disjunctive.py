"""The disjunctive model of a few operations, in python-mip: one start time each, one binary per open pair of a worker.

    minimize    the sum of what the late workers are late
    subject to  start[j] >= start[i] + delay                        what is ordered: dependencies, programs
                start[j] >= start[i] + seconds[i], or the reverse   open pairs, by a binary and two big-M rows
                memory: linear in the binaries, at each forward
                late[w] >= start[i] + delay                         what comes after, up to the end of worker w

Each pair has its own M, from the earliest and latest starts. The model is plain numbers, so that it travels to the
child process which solves it: this file is that child, and imports nothing else of the planner.

python-mip needs care: the start must give every variable (missing ones are taken as 0 and the start is lost without
a word), and is lost if the objective comes out worse; of the solution only the order is of use, as times come back
with rounding errors.
"""

from __future__ import annotations

from dataclasses import dataclass

from recycle.solve import child
from recycle.solve.engines import Solver


@dataclass(frozen=True)
class Model:
    """One model; operations and binaries are numbered from 0.

    Attributes:
        seconds: duration of each operation.
        earliest, latest: window of its start.
        after: (i, j, delay): start of j >= start of i + delay.
        pairs: (i, j, binary): i before j, as in the start, where the binary is 1; one binary may rule several pairs.
        binaries: how many there are.
        memory: (terms, most): the sum of coefficient * binary over the terms is at most `most`.
        exits: (i, worker, delay): what `worker` is late is at least start of i + delay.
        late: (least, most) of each late worker.
        starts, lateness: the start's times, and what each worker is late in it.
    """

    seconds: list[float]
    earliest: list[float]
    latest: list[float]
    after: list[tuple[int, int, float]]
    pairs: list[tuple[int, int, int]]
    binaries: int
    memory: list[tuple[list[tuple[int, float]], float]]
    exits: list[tuple[int, int, float]]
    late: list[tuple[float, float]]
    starts: list[float]
    lateness: list[float]


def solve(model: Model, solver: Solver, seconds: float, nodes: int, gap: float) -> tuple[str, float, list[bool]]:
    """(status, objective, binaries): "optimal" within `gap`, "feasible", or why there is no solution.

    Args:
        seconds: time limit, which solvers overshoot.
        nodes: limit that depends on no clock.
        gap: absolute difference to the best possible objective at which to stop.
    """
    import mip

    built = mip.Model(sense=mip.MINIMIZE, solver_name=solver)
    built.verbose = 0
    built.threads = 1
    built.max_mip_gap_abs = gap
    limits = zip(model.earliest, model.latest, strict=True)
    start = [built.add_var(f"s{x}", lb=low, ub=max(low, high)) for x, (low, high) in enumerate(limits)]
    first = [built.add_var(f"y{b}", var_type=mip.BINARY) for b in range(model.binaries)]
    late = [built.add_var(f"l{w}", lb=low, ub=max(low, high), obj=1.0) for w, (low, high) in enumerate(model.late)]
    for i, j, delay in model.after:
        built += mip.LinExpr([start[j], start[i]], [1.0, -1.0], -delay, ">")
    for i, j, b in model.pairs:
        i_first = model.latest[i] + model.seconds[i] - model.earliest[j]
        j_first = model.latest[j] + model.seconds[j] - model.earliest[i]
        built += mip.LinExpr([start[j], start[i], first[b]], [1.0, -1.0, -i_first], i_first - model.seconds[i], ">")
        built += mip.LinExpr([start[i], start[j], first[b]], [1.0, -1.0, j_first], -model.seconds[j], ">")
    for terms, most in model.memory:
        built += mip.LinExpr([first[b] for b, _ in terms], [coefficient for _, coefficient in terms], -most, "<")
    for i, w, delay in model.exits:
        built += mip.LinExpr([late[w], start[i]], [1.0, -1.0], -delay, ">")
    given = [*model.starts, *[1.0] * model.binaries, *model.lateness]
    built.start = list(zip([*start, *first, *late], given, strict=True))
    status = built.optimize(max_seconds=seconds, max_nodes=nodes)
    if status not in (mip.OptimizationStatus.OPTIMAL, mip.OptimizationStatus.FEASIBLE):
        return status.name.lower(), float("inf"), []
    objective = float(built.objective_value)
    if objective > sum(model.lateness) + 1e-6 * max(1.0, sum(model.lateness)):
        return "lost start", objective, []
    return status.name.lower(), objective, [variable.x > 0.5 for variable in first]


def _answer(model: Model, solver: Solver, seconds: float, nodes: int, gap: float) -> None:
    child.answer(solve(model, solver, seconds, nodes, gap))


if __name__ == "__main__":
    child.serve(_answer)
