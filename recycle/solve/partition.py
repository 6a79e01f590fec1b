"""Placement and partition: what a job leaves open, chosen by the first fault-free plan.

`[shape] placement = "auto"` is the loop or the V. With `[model] split = "auto"` and analytic times each placement has
its own split: moves of one layer between stages first lower an estimate of the period from work and memory, then the
period of the first plan.

Limits: layers keep their order; a local search may end before the best split.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import lru_cache
from math import inf

import msgspec

from recycle.errors import JobError, PlanError
from recycle.job import Job, PricedJob, price
from recycle.job.cut import even_ranks
from recycle.job.job import EvenedJob
from recycle.job.pricing import layer_seconds
from recycle.job.sections import ANALYTIC, AUTO
from recycle.job.shape import Placing
from recycle.solve.bounds import closed_form
from recycle.solve.effort import Effort
from recycle.solve.problem import Problem
from recycle.solve.search.initial_orders import find_initial_order
from recycle.solve.template import template_problem

PLACEMENTS: tuple[Placing, ...] = ("loop", "v")
QUICK_POLICIES = 4
"""List schedules of a first plan."""
_TRIED, _AT_ONCE, _COMPARED = 40, 16, 3
"""Splits whose first plan is made: in all, before the search ends without a shorter one, and with all policies."""
_OPERATIONS = 40_000
"""Operations of all these plans; at least the even split and the one with the best estimate are tried."""
_DONORS, _TAKERS = 4, 8
"""Ranks with the longest estimates give layers; ranks with the shortest take them."""
_WAVES = 3
"""Micro-batches per rank of the plans that compare splits."""
_SHORTER = 1 - 1e-3


def settle(job: Job) -> Job:
    """Return the job with the placement and split of its shortest first fault-free plan, which depend on it alone.

    A profile that was measured with a split keeps it, since its times hold for these stages only. Without a profile the
    layers of the ranks are evened.
    """
    if job.grid.placement == AUTO:
        return min((settle(job.placed(placement)) for placement in PLACEMENTS), key=_first_period)
    return _with_chosen_split(job) if isinstance(job, EvenedJob) and job.is_open else Job(**job.sections())


def _with_chosen_split(job: EvenedJob) -> Job:
    even = even_ranks(layer_seconds(job), job.layers_per_stage(), job.shape) if job.grid.chunks > 1 else None
    evened = _with_split(job, even or job.layers_per_stage())
    if job.times.profile is None or job.model.kind == "emulated":
        return evened
    if job.times.profile != ANALYTIC:
        measured = job.profile().measured.get("model", {}).get("split")
        return _with_split(job, measured) if _is_split(measured, job) else evened
    try:
        return _with_split(job, _search(evened.to_toml()))
    except JobError:  # a limit that the profile cannot state: planning says so
        return evened


def _is_split(sizes: object, job: Job) -> bool:
    return isinstance(sizes, list) and len(sizes) == job.shape.stages and sum(sizes) == job.model.layers


def _with_split(job: Job, sizes: Iterable[int]) -> Job:
    sections = job.sections()
    return Job(**sections | {"model": msgspec.structs.replace(job.model, split=list(sizes))})


def _first_period(job: Job, micro_batches: int | None = None, policies: int = QUICK_POLICIES) -> float:
    micro_batches = micro_batches or job.shape.micro_batches
    try:
        problem = template_problem(Problem.from_job(price(job)), micro_batches)
        return find_initial_order(problem, Effort(closed_form(problem)), policies).best.period
    except PlanError:  # no memory for a micro-batch
        return inf


@lru_cache(maxsize=64)
def _search(text: str) -> tuple[int, ...]:
    job = Job.from_toml(text)
    known: dict[tuple[int, ...], list[float]] = {}
    shape, sizes = job.shape, tuple(job.layers_per_stage())

    def estimate(sizes: tuple[int, ...]) -> list[float]:
        if sizes not in known:
            known[sizes] = _estimates(price(_with_split(job, sizes)))
        return known[sizes]

    def unevenness(sizes: tuple[int, ...]) -> tuple[float, float]:
        return max(estimate(sizes)), sum(each * each for each in estimate(sizes))

    def moves(sizes: tuple[int, ...], donors: int) -> Iterator[tuple[int, ...]]:
        ranks = sorted(range(shape.ranks), key=estimate(sizes).__getitem__)
        takers = [stage for rank in ranks[:_TAKERS] for stage in shape.stages_of_rank(rank)]
        for giver in (stage for rank in ranks[-donors:] for stage in shape.stages_of_rank(rank) if sizes[stage] > 1):
            for taker in takers:
                if taker != giver:
                    yield tuple(size - (at == giver) + (at == taker) for at, size in enumerate(sizes))

    even = sizes
    while unevenness(best := min(moves(sizes, 1), key=unevenness, default=sizes)) < unevenness(sizes):
        sizes = best
    waves = min(shape.micro_batches, _WAVES * shape.ranks)
    most = min(_TRIED, _OPERATIONS // (3 * shape.stages * waves))
    tried = {each: _first_period(_with_split(job, each), waves, 1) for each in (even, sizes)}
    while True:
        sizes = min(tried, key=tried.__getitem__)
        moved = sorted({*moves(sizes, _DONORS)} - tried.keys(), key=unevenness) if len(tried) < most else []
        for each in moved[: min(_AT_ONCE, most - len(tried))]:
            tried[each] = _first_period(_with_split(job, each), waves, 1)
            if tried[each] < _SHORTER * tried[sizes]:
                break
        else:
            break
    if most < _TRIED:
        return sizes
    compared = [even, *sorted(tried, key=tried.__getitem__)[:_COMPARED]]
    return min(compared, key=lambda sizes: _first_period(_with_split(job, sizes)))


def _estimates(job: PricedJob) -> list[float]:
    """Bound the period by each rank alone: its work, and its memory if every activation is held as shortly as possible.

    A stage holds an activation for all forwards and input gradients of the stages from it on.
    """
    shape, prices = job.shape, job.prices
    stages, m = shape.stages, shape.micro_batches
    names = "forward", "backward_input", "backward_weight"
    forward, backward, weight = (prices.per_stage(name, stages) for name in names)
    held, way = [0.0] * stages, 0.0
    for stage in reversed(range(stages)):
        way += forward[stage] + backward[stage] + 2 * prices.latency * (stage < stages - 1)
        held[stage] = way + prices.weight_stash * weight[stage]
    found = []
    for rank, cap in enumerate(job.limits or [inf] * shape.ranks):
        hosted = shape.stages_of_rank(rank)
        work = m * sum(forward[stage] + backward[stage] + weight[stage] for stage in hosted)
        missing = max(0.0, shape.chunks - cap)
        found.append(max(work, m * sum(held[stage] for stage in hosted) / max(cap, 1.0)) * (1 + 1e6 * missing))
    return found
