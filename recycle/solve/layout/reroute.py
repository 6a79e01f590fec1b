"""Re-routing within a layout: whoever is left hosts what it hosts, and runs the micro-batches of the dead as well.

A worker that has come back hosts its given stage beside them.

Nothing is copied, so this is what a run does in the first second after a death, whatever its layout; a layout that is
better for who is left comes later. How many micro-batches of each unit each worker runs is the linear program's, the
order is that of list scheduling; there is no search.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import replace

from recycle.errors import PlanError
from recycle.ir.schedule import Schedule
from recycle.job import PricedJob
from recycle.job.shape import Worker
from recycle.plans import Plan
from recycle.solve.deadline import Deadline
from recycle.solve.layout.elastic import Maker
from recycle.solve.layout.hostings import hosting_as_held
from recycle.solve.layout.units import Units


def rerouted_within(job: PricedJob, within: Schedule, failed: Iterable[Worker], deadline: Deadline) -> Plan:
    """The plan of `job` without `failed` in the layout of a schedule: each live worker hosts the same units as there.

    Args:
        within: a schedule whose model is cut (`Shape.cut`). Workers that are dead there and not in `failed` have come
            back and host the units of their given stages.
        deadline: no further order is tried after it.

    Raises:
        PlanError: a unit has no live host, or too little memory is left for the order.
    """
    begun = time.perf_counter()
    failed = frozenset(failed)
    units = Units.of(job)
    held = {w: parts for w in within.live if w not in failed and (parts := within.unit_runs(w))}
    held |= {w: units.given[w.rank] for w in within.failed - failed}
    hosting = hosting_as_held(units, job.shape, held, job.prices)
    if hosting is None:
        raise PlanError("in the layout at hand a unit of the model has no live host")
    maker = Maker(job, units, list(held), failed)
    listed = maker.listed_one(hosting, float("inf"), deadline)
    for made in maker.plan(listed) if listed is not None else []:
        bound = units.bound(job.shape.global_micro_batches, [job.prices.speed_of(worker) for worker in held])
        return replace(made, moves=(), lower_bound=bound, seconds=round(time.perf_counter() - begun, 3))
    raise PlanError("[memory] limit: too little for the layout at hand without the dead workers")
