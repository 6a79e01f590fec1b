"""The plan of an elastic layout: chains of live workers where these are faster than re-routing alone.

Chains that would run alike are planned once, each by the planner of fixed stages as a job of one pipeline without
failures, and copied. The period and all other figures are the simulator's, on the schedule of all chains together.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import msgspec

from recycle.cut import profile_of_cut
from recycle.errors import PlanError
from recycle.ir.check import check
from recycle.ir.schedule import Schedule
from recycle.ir.simulate import Timeline, simulate
from recycle.job import PricedJob
from recycle.plans import Plan
from recycle.pricing import byte_limit
from recycle.profile import Profile
from recycle.sections import AnalyticSection, DataSection, ModelSection, ShapeSection, TrainSection
from recycle.shape import Shape, Worker
from recycle.solve.deadline import Deadline, Stop
from recycle.solve.layout.chains import Chains, Cut, candidates
from recycle.solve.layout.hosts import assign, moves_to
from recycle.solve.layout.joint import joint_schedule, micro_batches_of
from recycle.solve.layout.units import Units

CLOSE = 1.01
"""Chains within this factor of the fastest count as equally fast: those then come first that leave most in place."""
TRIES = 3
"""Ways to make chains that are planned to the end, at most."""
FIXED_SHARE = 0.25
"""Of the time, what the plan of the given stages may take."""

PlanOf = Callable[..., Plan]
"""The planner of fixed stages: `solve.planner.plan`, handed in since that stands above this folder."""


def elastic_plan(
    job: PricedJob,
    failed: Iterable[Worker],
    plan_of: PlanOf,
    *,
    seconds: float | None,
    steps: int | None,
    stop: Stop | None = None,
) -> Plan:
    """The best plan found for `job` without `failed`, in their names: never worse than that of the given stages.

    Its `lower_bound` holds for every layout, `fixed_bound` for the given stages.

    Args:
        plan_of: the planner of the given stages.
        seconds, steps: as of `solve.planner.plan`; each chain that is planned gets all the `steps`.
        stop: ends the search with the best so far once it is set.

    Raises:
        PlanError, JobError: as `solve.planner.plan`; a job of several chunks per worker.
    """
    begun = time.perf_counter()
    failed = frozenset(failed)
    fixed_job = _fixed(job)
    units = Units.of(job)
    live = [worker for worker in job.shape.workers() if worker not in failed]
    limit = Deadline(seconds, stop)
    fixed = plan_of(fixed_job, failed, seconds=None if seconds is None else seconds * FIXED_SHARE, steps=steps)
    speeds = [job.prices.speed_of(worker) for worker in live]
    bound = units.bound(job.shape.global_micro_batches, speeds)
    best = replace(fixed, lower_bound=bound, fixed_bound=fixed.lower_bound)
    if fixed.gap_to(bound) > 0 and not job.prices.speed:
        found = candidates(units, len(live), job.shape.global_micro_batches)
        promising = [chains for chains in found if chains.seconds < best.period]
        near = [chains for chains in promising if chains.seconds <= promising[0].seconds * CLOSE]
        near.sort(key=lambda chains: (abs(len(chains.cuts) - job.shape.pipelines), chains.seconds))
        for turn, chains in enumerate([*near, *promising[len(near) :]][:TRIES]):
            if chains.seconds >= best.period or (turn and limit.left <= 0):
                break
            share = None if seconds is None else max(0.05, limit.left / (TRIES - turn))
            made = _plan_of_chains(job, units, live, failed, chains, plan_of, share, steps)
            if made.period < best.period:
                best = replace(made, lower_bound=bound, fixed_bound=fixed.lower_bound)
    return replace(best, seconds=round(time.perf_counter() - begun, 3))


def _fixed(job: PricedJob) -> PricedJob:
    planner = msgspec.structs.replace(job.planner, layout="fixed")
    return msgspec.structs.replace(job, planner=planner)


def _plan_of_chains(
    job: PricedJob,
    units: Units,
    live: Sequence[Worker],
    failed: frozenset[Worker],
    chains: Chains,
    plan_of: PlanOf,
    seconds: float | None,
    steps: int | None,
) -> Plan:
    kinds: dict[Cut, int] = {}
    for cut, share in zip(chains.cuts, chains.shares, strict=True):
        kinds[cut] = max(share, kinds.get(cut, 0))
    each = None if seconds is None else seconds / len(kinds)
    alone: dict[Cut, Schedule] = {}
    for cut, share in kinds.items():
        alone[cut] = plan_of(_chain_job(job, units, cut, share), (), seconds=each, steps=steps).schedule
    workers, homes = assign(units, live, chains.cuts)
    micro_batches = micro_batches_of(job.shape, chains.shares, homes)
    parts = [
        (alone[cut], cut, mine, batches) for cut, mine, batches in zip(chains.cuts, workers, micro_batches, strict=True)
    ]
    schedule = joint_schedule(job.shape, parts, sorted(failed), alone[chains.cuts[0]].optimizer)
    schedule = replace(schedule, ties=((0, schedule.shape.stages - 1),) if job.ties else ())
    profile = profile_of_cut(job.prices, schedule.shape, units.whole)
    schedule = schedule.with_metadata(planner="recycle", layout=_described(chains, workers))
    timeline: Timeline = simulate(schedule, profile)
    moves, _ = moves_to(units, job.shape, live, workers, chains.cuts, job.prices)
    limits, room = job.limits, byte_limit(job, job.prices)
    findings = check(schedule, profile=profile, limits=limits if room is None else None, byte_limit=room)
    wrong = next((finding for finding in findings if finding.severity == "error"), None)
    if wrong is not None:
        raise PlanError(f"the planner made an invalid schedule of chains, which is a bug: {wrong.message}")
    return Plan(
        schedule=schedule,
        makespan=timeline.makespan,
        period=timeline.period,
        lower_bound=0.0,
        seconds=0.0,
        profile=job.prices.digest(),
        limits=None if limits is None else tuple(limits),
        planner=msgspec.to_builtins(job.planner),
        moves=moves,
    )


def _described(chains: Chains, workers: Sequence[Sequence[Worker]]) -> list[dict[str, object]]:
    return [
        {"workers": [str(worker) for worker in mine], "units": list(cut), "micro_batches": share}
        for mine, cut, share in zip(workers, chains.cuts, chains.shares, strict=True)
    ]


def _chain_job(job: PricedJob, units: Units, cut: Cut, micro_batches: int) -> PricedJob:
    """A chain as a job of one pipeline: each part of the cut is a rank."""
    shape = Shape(1, len(cut), micro_batches, cut=cut)
    prices: Profile = replace(profile_of_cut(job.prices, shape, units.whole), links={}, speed={})
    memory = job.memory
    if isinstance(memory.limit, int | list):
        least = memory.limit if isinstance(memory.limit, int) else min(memory.limit)
        of_whole = len(units) / job.shape.ranks
        memory = msgspec.structs.replace(memory, limit=[max(1, int(least * of_whole / part + 1e-9)) for part in cut])
    planner = msgspec.structs.replace(job.planner, layout="fixed", move=False)
    return msgspec.structs.replace(
        job,
        grid=ShapeSection(1, len(cut), micro_batches),
        memory=memory,
        planner=planner,
        model=ModelSection(),
        data=DataSection(),
        train=TrainSection(),
        analytic=AnalyticSection(),
        prices=prices,
    )
