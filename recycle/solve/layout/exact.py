"""Exact model of small layouts: units of each worker, and micro-batches of each unit.

Every live worker takes a run of neighboring units within its memory, or none, and whole micro-batches of each unit. The
program minimizes the busiest worker's work. It ignores the order, warm-up, tail, hand-overs, activations and updates,
so the optimum bounds the load of every hosting from below. Limits: about ten workers and units.
"""

from __future__ import annotations

from collections.abc import Sequence

from recycle.solve.layout.units import Units


def least_load(units: Units, speeds: Sequence[float], micro_batches: int, seconds: float) -> float | None:
    """Return the least seconds of the busiest of workers with these speed factors; None without a proof in time."""
    import mip

    model = mip.Model(solver_name="HiGHS")
    model.verbose = 0
    count = len(units)
    windows = [
        (a, b)
        for a in range(count)
        for b in range(a + 1, count + 1)
        if float(units.static[a:b].sum()) <= units.most_static
    ]
    busiest = model.add_var()
    model.objective = mip.minimize(busiest)
    runs: list[list[mip.Var]] = []
    numbers: list[mip.LinExpr] = []
    for worker, speed in enumerate(speeds):
        hosts = [model.add_var(var_type=mip.BINARY) for _ in windows]
        mine = [model.add_var(var_type=mip.INTEGER, ub=micro_batches) for _ in range(count)]
        model += mip.xsum(hosts) <= 1
        for u, run in enumerate(mine):
            covering = mip.xsum(host for host, (a, b) in zip(hosts, windows, strict=True) if a <= u < b)
            model += run <= micro_batches * covering
        model += speed * mip.xsum(float(units.seconds[u]) * run for u, run in enumerate(mine)) <= busiest
        # break the symmetry of workers with equal speed by the place of their window
        number = mip.xsum((i + 1) * host for i, host in enumerate(hosts))
        if worker and speeds[worker - 1] == speed:
            model += numbers[-1] <= number
        numbers.append(number)
        runs.append(mine)
    for u in range(count):
        model += mip.xsum(mine[u] for mine in runs) == micro_batches
    status = model.optimize(max_seconds=seconds)
    return float(model.objective_value) if status == mip.OptimizationStatus.OPTIMAL else None
