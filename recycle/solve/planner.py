"""The planner: turn a job and its dead workers into a checked plan with a proven lower bound.

A set of dead workers is mapped to its failure vector, whose plan serves every set with that vector. The template or the
list scheduler gives a first plan. Searches improve it until the bound is met or the time is over; small instances use
the exact model. Every plan is checked, and its figures come from the simulator.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from math import inf
from pathlib import Path
from typing import Any

import msgspec

from recycle.errors import PlanError, RecycleError
from recycle.ir.lower import lowered_graph
from recycle.ir.schedule import Schedule
from recycle.ir.simulate import time_graph
from recycle.job import Job, PricedJob, price
from recycle.job.sections import AUTO
from recycle.job.shape import Placing, Worker
from recycle.plans import (
    Move,
    PlacedPeriod,
    Plan,
    cache_path,
    cached_plan,
    dead_roles,
    errors,
    failure_vector,
    with_updates_of,
)
from recycle.solve import time_indexed
from recycle.solve.adapt import adapt
from recycle.solve.assignment import assign_by_slots
from recycle.solve.bounds import RisingBound
from recycle.solve.bounds.bound import certify
from recycle.solve.effort import Deadline, Effort, Progress, Stop, is_met
from recycle.solve.fuse_backward import fuse_backward
from recycle.solve.layout.elastic import elastic_plan, quick_elastic_plan, reroute_in_layout
from recycle.solve.layout.limits import LIMIT_SECONDS, layout_limit
from recycle.solve.normalize import normalize
from recycle.solve.offload import SHARE, plan_with_offloads
from recycle.solve.partition import PLACEMENTS, QUICK_POLICIES
from recycle.solve.problem import Order, Problem
from recycle.solve.search.initial_orders import ALL_POLICIES, find_initial_order, find_starts, may_exchange
from recycle.solve.search.local_search import search_from_all
from recycle.solve.template import copy_to_pipelines, template_problem

QUICK_SECONDS = 0.5
"""Seconds for the orders of a first plan (`BOUND_SHARE` of them for its bound)."""
EXACT_UP_TO, EXACT_FROM, SEARCH_SHARE = 250, 1.0, 0.5
"""Maximum operations and minimum remaining seconds for the exact model; share of the time for the search before."""
BOUND_SHARE = 0.4
"""Maximum share of the time for the bound if no thread computes it during the search."""
FINISHING_SECONDS, FINISHING, CHECKING = 1e-5, 3.0, 1.0
"""Reserved after the search: seconds per operation until a simulation is timed, then simulations; of the check."""
AGAIN_SHARE = 0.1
"""Share of the remaining time from which the reserved time is measured again."""
TOO_LATE_SHARE, TOO_LATE_SECONDS = 1.2, 0.5
"""Allowed delay of a plan; a job whose first plan would take longer is refused."""
TRIAL_SHARE = 0.15
"""Share of the time for a plan of each placement, if the job leaves the choice open."""
FIXED_SHARE = 0.25
"""Share of the time of an elastic layout for the plan of the fixed stages."""
EXCHANGES = 18
"""Orders of each kind in which pipelines exchange micro-batches."""
TRAINING_SECONDS = 1.2
"""Seconds per plan during training; the library can be improved later."""


def plan(
    job: Job,
    failed: Iterable[Worker] = (),
    *,
    quick: bool = False,
    seconds: float | None = None,
    steps: int | None = None,
    processes: int = 1,
    stop: Stop | None = None,
    progress: Progress | None = None,
    within: Schedule | None = None,
) -> Plan:
    """Plan `job` without the workers in `failed`, in the names of its processes.

    With `[planner] move` live workers may change stage; `Plan.moves` lists them. If an elastic layout is asked for and
    no layer moves, `Plan.layout_limit` gives the reason, which takes up to `LIMIT_SECONDS` more. A plan with `steps`
    has no time limit.

    Args:
        quick: use the list scheduler only, and move no worker.
        seconds: wall-clock limit; None for the job's. The search stops as soon as the bound is met. A first plan is
            always made, unless the limit is the job's own.
        steps: search steps instead of a wall-clock limit; the result then depends only on the seed and the steps.
        processes: number of parallel searches.
        stop: ends the search with the best plan so far once it is set.
        progress: called with the phase and the best period so far.
        within: current layout of the live workers, as a schedule, if layers may move; None for the job's stages. Copies
            are counted from this layout.

    Raises:
        PlanError: a stage has no live worker, a cap is too small, or the job is too large to be planned at all or
            within its own time limit.
    """
    begun = time.perf_counter()
    failed = frozenset(failed)
    options: dict[str, Any] = {"quick": quick, "processes": processes, "stop": stop, "progress": progress}
    if job.grid.placement == AUTO:
        return _plan_best_placement(job, failed, seconds, steps, begun, **options)
    job = price(job)
    if job.planner.layout == "elastic" and job.grid.placement != "loop":
        raise PlanError(f'[planner] layout: "elastic" needs [shape] placement = "loop", not "{job.grid.placement}"')
    if job.planner.layout == "elastic" and not quick:
        if seconds is None and steps is None and (steps := job.planner.steps) is None:
            seconds = job.planner.seconds
        fixed = plan(
            msgspec.structs.replace(job, planner=msgspec.structs.replace(job.planner, layout="fixed")),
            failed,
            seconds=seconds and seconds * FIXED_SHARE,
            steps=steps,
            **options,
        )
        limit = Deadline(seconds and seconds - (time.perf_counter() - begun), stop)
        result = elastic_plan(job, failed, fixed, limit, within)
        result = replace(result, seconds=round(time.perf_counter() - begun, 3))
        if result.schedule.shape.cut:
            return result
        least, most = LIMIT_SECONDS
        limit = Deadline(None if seconds is None else min(max(seconds, least), most), stop)
        return replace(result, layout_limit=layout_limit(job, failed, result.period, result.lower_bound, limit, within))
    vector, vacant = failure_vector(job.shape, failed), failed
    moves: tuple[Move, ...] = ()
    searched = partial(_plan, job, seconds=seconds, steps=steps, begun=begun, **options)
    if not job.prices.are_peers_alike:
        return searched(dead=failed)  # a vector does not describe unlike peers, so keep the names
    if failed and job.planner.move and not quick:
        if progress:
            progress("normalizing", inf)
        vector, vacant, moves, *_ = normalize(job, failed)
    result = searched(dead=dead_roles(job.shape, vector))
    return replace(result.for_processes(vacant), moves=moves)


def _plan_best_placement(
    job: Job, failed: frozenset[Worker], seconds: float | None, steps: int | None, begun: float, **options: Any
) -> Plan:
    if seconds is None and steps is None and (steps := job.planner.steps) is None:
        seconds = job.planner.seconds

    def planned(placement: Placing, share: float, left: float | None) -> Plan:
        return plan(
            job.placed(placement),
            failed,
            seconds=left and left * share,
            steps=steps and int(steps * share),
            **options,
        )

    trials = {placement: planned(placement, TRIAL_SHARE, seconds) for placement in PLACEMENTS}
    chosen = min(trials, key=lambda placement: trials[placement].period)
    one, another = (price(job.placed(each)).model.split for each in PLACEMENTS)
    if one != another:
        chosen = price(job).shape.placement  # what a run has, since times hold for one split
    ((rejected, other),) = [trial for trial in trials.items() if trial[0] != chosen]
    left = seconds and seconds - (time.perf_counter() - begun)
    best = trials[chosen]
    if not options["quick"] and best.gap > 0 and (left is None or left > 0):
        best = min(best, planned(chosen, 1.0 if steps is None else 1 - 2 * TRIAL_SHARE, left), key=lambda p: p.period)
    return replace(
        best,
        seconds=round(time.perf_counter() - begun, 3),
        other_placement=PlacedPeriod(rejected, other.period, other.lower_bound),
    )


def plan_vector(
    job: Job,
    vector: Sequence[int],
    quick: bool = False,
    *,
    seconds: float | None = None,
    steps: int | None = None,
    processes: int = 1,
    stop: Stop | None = None,
    progress: Progress | None = None,
) -> Plan:
    """Plan a failure vector, in role names; arguments as in `plan`."""
    dead = dead_roles(job.shape, vector)
    return _plan(
        price(job), dead, seconds=seconds, steps=steps, quick=quick, processes=processes, stop=stop, progress=progress
    )


def _plan(
    job: PricedJob,
    dead: frozenset[Worker],
    *,
    seconds: float | None,
    steps: int | None,
    quick: bool = False,
    processes: int = 1,
    stop: Stop | None = None,
    progress: Progress | None = None,
    begun: float | None = None,
) -> Plan:
    begun = time.perf_counter() if begun is None else begun
    profile = job.prices
    whole = problem = Problem.from_job(job, dead, profile)
    if not dead and whole.peers_are_alike:
        problem = template_problem(whole, job.shape.micro_batches)  # all pipelines run the same order
    section = job.planner
    if seconds is None and steps is None:
        steps = section.steps
        seconds = None if steps is not None else section.seconds
        if seconds is not None and not quick:
            _require_time(whole, seconds)
    if job.memory.offload == AUTO and job.limits is not None:
        planned = partial(
            _plan,
            dead=dead,
            seconds=seconds and seconds * SHARE,
            steps=steps and int(steps * SHARE),
            quick=quick,
            processes=processes,
            stop=stop,
            progress=progress,
        )
        return replace(plan_with_offloads(job, planned), seconds=round(time.perf_counter() - begun, 3))
    limit = Deadline(seconds and seconds - (time.perf_counter() - begun), stop)
    deadline = limit.earlier(FINISHING_SECONDS * whole.size)
    is_timed = steps is None and not quick
    is_long = deadline.seconds_left * (1 - SEARCH_SHARE) > EXACT_FROM
    exactly = is_timed and is_long and problem.size <= EXACT_UP_TO

    def schedule_of(order: Order) -> Schedule:
        if problem is not whole:
            order = copy_to_pipelines(whole, assign_by_slots(whole), problem, order)
        return with_updates_of(whole.schedule(order), job)

    # use the whole problem: pipelines may exchange micro-batches over more lanes
    for_bound = deadline if is_timed else (Deadline(QUICK_SECONDS, stop) if quick else deadline).part(BOUND_SHARE)
    with RisingBound(whole, for_bound, is_first=not is_timed) as bound:

        def report(stage: str, period: float) -> None:
            bound.report_period(period)
            if progress:
                progress(stage, period)

        report("constructing", inf)
        in_time = bound.until(Deadline(QUICK_SECONDS, stop) if quick else deadline)
        first = Effort(bound.value, in_time, progress=report)
        starts = find_starts(problem, first, QUICK_POLICIES if quick else ALL_POLICIES)
        if (
            not quick
            and problem is not whole
            and may_exchange(whole)
            and not first.is_met(whole, starts[0].best.period)
        ):
            exchanging = find_initial_order(whole, first, EXCHANGES)
            if exchanging.best.period < starts[0].best.period:
                problem, starts = whole, [exchanging]
        best = begun_with = starts[0].best
        schedule = schedule_of(best.order)
        for _ in range(1 if quick else 2):
            simulated = time.perf_counter()
            graph = lowered_graph(schedule)
            timeline = time_graph(graph, profile)
            simulated = time.perf_counter() - simulated
            if FINISHING * simulated < max(FINISHING_SECONDS * whole.size, AGAIN_SHARE * limit.seconds_left):
                break  # else this time may include the loading of kernels
        deadline = limit.earlier(FINISHING * simulated)
        report("searching", best.period)
        effort = Effort(bound.value, bound.until(deadline), steps, section.seed, processes, report)
        if not quick:
            best = search_from_all(starts, effort.part(SEARCH_SHARE if exactly else 1.0))
    proven = float(bound.value)
    if exactly and deadline.seconds_left > EXACT_FROM and not is_met(problem, best.period, proven):
        if progress:
            progress("proving", best.period)
        best = solved = time_indexed.solve(problem, best.order, proven, deadline.seconds_left)
        if problem.shape == whole.shape:  # the bound of a template holds only if pipelines exchange no micro-batches
            proven = max(proven, solved.bound)
    if best.order != begun_with.order:
        searched = schedule_of(best.order)
        searched_graph = lowered_graph(searched)
        searched_timeline = time_graph(searched_graph, profile)
        if problem.is_exact or searched_timeline.period < timeline.period:
            schedule, timeline, graph = searched, searched_timeline, searched_graph
    if section.decoupled and not quick:
        fused, timeline = fuse_backward(schedule, profile, limit.earlier(CHECKING * simulated), timeline)
        if fused is not schedule:
            schedule, graph = fused, lowered_graph(fused)
    schedule = schedule.with_metadata(planner="recycle")
    wrong = errors(schedule, job, graph)
    if wrong:
        raise PlanError(f"the planner made an invalid schedule, which is a bug: {wrong[0]}")
    limits = job.limits
    result = Plan(
        schedule=schedule,
        makespan=timeline.makespan,
        period=timeline.period,
        lower_bound=proven,
        seconds=round(time.perf_counter() - begun, 3),
        profile=profile.digest(),
        limits=None if limits is None else tuple(limits),
        planner={
            **msgspec.to_builtins(section),
            "quick": quick,
            "search_steps": effort.spent,
            "solver": "HiGHS",
        },
    )
    return certify(result, bound.value, profile)


def _require_time(problem: Problem, seconds: float) -> None:
    needed = FINISHING_SECONDS * problem.size
    if needed > TOO_LATE_SHARE * seconds + TOO_LATE_SECONDS:
        raise PlanError(
            f"[planner] seconds: {seconds:g} are too few for the {problem.size:,} operations of {problem.shape}: a"
            f" first plan takes about {needed:.0f} s, and a search several times that; raise seconds"
        )


def write_to_cache(plan: Plan, path: Path) -> None:
    """Write a plan to the cache; ignore write errors."""
    with contextlib.suppress(OSError, RecycleError):
        path.parent.mkdir(parents=True, exist_ok=True)
        plan.save(path)


def plan_for_training(
    job: PricedJob,
    vector: Sequence[int],
    quick: bool = False,
    failed: Iterable[Worker] | None = None,
    like: Schedule | None = None,
    cache: str | Path | None = None,
    moves: bool = False,
    within: str | Path | None = None,
) -> str:
    """Return the plan file's text for a vector that a run needs, within about a second unless cached.

    A job with `steps` runs all of them; `quick` never searches. Workers move only with `moves`; such a plan may take
    the job's own time, because training continues meanwhile.

    Args:
        failed: the dead workers, for a plan in the names of processes if peers are not alike. Never cached.
        like: the run's own schedule, which is adapted on its placement (see `solve.adapt`).
        cache: directory of plans that outlives runs, read before planning and written after.
        moves: plan like `recycle plan`, in the layout that the job asks for; never cached.
        within: plan file of the current layout; with `failed` None, no worker hosts other units unless workers may
            move.

    Raises:
        PlanError: a stage has no live worker, or a cap is too small.
    """
    if like is not None:
        adapted = adapt(job, like, vector)
        return (adapted if failed is None else adapted.for_processes(failed)).text()
    layout = None if within is None else Schedule.load(within)
    if layout is not None and not moves:
        return reroute_in_layout(job, layout, failed or (), Deadline(QUICK_SECONDS)).text()
    if moves:
        if max(vector) < job.shape.pipelines:
            return plan(job, failed or (), within=layout).text()
        # if all workers of a rank are dead, workers that moved before can still hold its layers
        result = quick_elastic_plan(job, failed or (), Deadline(job.planner.seconds), layout)
        if result is None:
            reason = layout_limit(job, failed or (), inf, 0.0, Deadline(QUICK_SECONDS), layout)
            raise PlanError(f"the live workers cannot hold the model: {reason}")
        return result.text()
    seconds = min(TRAINING_SECONDS, job.planner.seconds)
    limit = None if job.planner.steps is not None else seconds
    if failed is not None:
        hurried = msgspec.structs.replace(job.planner, seconds=seconds, move=False, layout="fixed")
        return plan(msgspec.structs.replace(job, planner=hurried), failed, quick=quick, seconds=limit).text()
    vector = tuple(vector)
    hurried_job = msgspec.structs.replace(job, planner=msgspec.structs.replace(job.planner, seconds=seconds))
    if cache is None:
        return plan_vector(hurried_job, vector, quick, seconds=limit).text()
    for wanted in (job, hurried_job):
        cached = cached_plan(cache_path(cache, wanted, vector), wanted, vector)
        if cached is not None:
            return cached.text()
    result = plan_vector(hurried_job, vector, quick, seconds=limit)
    if not quick:
        write_to_cache(result, cache_path(cache, hurried_job, vector))
    return result.text()
