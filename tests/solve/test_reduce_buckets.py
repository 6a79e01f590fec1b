"""Plans whose stages reduce in buckets: shorter where W's hide the sums, and no bound above the best of all orders."""

import random
from dataclasses import replace

import msgspec
import pytest

from benchmarks import cp_sat
from recycle import Job, JobError, Schedule, ScheduleError, simulate
from recycle.job import PricedJob
from recycle.plans import Plan, PlanLibrary, cache_path, cached_plan
from recycle.plans.library import is_true
from recycle.solve import time_indexed
from recycle.solve.adapt import adapt
from recycle.solve.bounds import closed_form, lower_bound
from recycle.solve.planner import plan
from recycle.solve.problem import Problem
from recycle.solve.search.list_scheduling import schedule_by_policy
from tests.solve.exhaustive import count_of_orders, every_order
from tests.solve.jobs import job

MOST_ORDERS = 300


def in_buckets(priced: PricedJob, buckets: int, reduce: float | list[float]) -> PricedJob:
    """The job with a reduce of so many seconds per stage, in so many buckets."""
    train = msgspec.structs.replace(priced.train, reduce_buckets=buckets)
    return msgspec.structs.replace(priced, train=train, prices=replace(priced.prices, reduce=reduce))


@pytest.mark.parametrize("staggered", [True, False])
def test_period_includes_only_reduces_that_no_weight_gradient_hides(staggered):
    """The reduce of 2 units behind W's of a unit or more: at most 1.25 units of it show, in four buckets."""
    priced = job(2, 3, 4, 5, steps=40, staggered=staggered, step=0.5)
    whole, cut = (plan(in_buckets(priced, buckets, 2.0)) for buckets in (1, 4))
    assert cut.schedule.buckets == 4
    assert cut.period <= whole.period - 0.75 + 1e-9
    assert cut.lower_bound <= cut.period + 1e-9
    timeline = simulate(cut.schedule, replace(priced.prices, reduce=2.0))
    assert (timeline.period, timeline.makespan) == (cut.period, cut.makespan)
    assert is_true(cut, in_buckets(priced, 4, 2.0))


def test_cache_and_library_distinguish_buckets(tmp_path):
    priced = in_buckets(job(2, 2, 3, 4, steps=5), 1, 1.0)
    cut = in_buckets(priced, 3, 1.0)
    planned = plan(cut, quick=True)
    assert Plan.from_text(planned.text()).schedule == planned.schedule
    assert cache_path(tmp_path, priced, (0, 0)) != cache_path(tmp_path, cut, (0, 0))
    planned.save(tmp_path / "plan.json")
    assert cached_plan(tmp_path / "plan.json", cut, (0, 0)) is not None
    assert cached_plan(tmp_path / "plan.json", priced, (0, 0)) is None
    library = PlanLibrary(tmp_path / "library", cut)
    library.add(planned)
    assert library.get((0, 0)) == planned
    assert PlanLibrary(tmp_path / "library", priced).get((0, 0)) is None


def test_adapted_schedule_keeps_its_buckets_or_takes_the_jobs():
    priced = in_buckets(job(2, 2, 3, 6), 2, 1.0)
    plain = plan(in_buckets(priced, 1, 1.0), quick=True).schedule
    assert adapt(priced, plain, (0, 1)).schedule.buckets == 2
    assert adapt(priced, replace(plain, buckets=3), (0, 0)).schedule.buckets == 3


def test_buckets_need_a_split_backward():
    shape = "[shape]\npipelines = 2\nranks = 2\nmicro_batches = 2\n"
    text = f"{shape}[planner]\ndecoupled = false\n[train]\nreduce_buckets = 4"
    with pytest.raises(JobError, match=r"job: \[train\] reduce_buckets: 4 buckets .* set it to true"):
        Job.from_toml(text)


@pytest.mark.search
def test_bounds_with_buckets_are_not_above_the_optimum():
    seed, tried = 0, 0
    while tried < 15:
        rng = random.Random(seed)
        seed += 1
        priced, dead = cp_sat.small_job(rng, most=2)
        if not priced.planner.decoupled:
            continue
        buckets = rng.choice([2, 3, 4])
        priced = in_buckets(priced, buckets, [rng.choice([0.5, 1.0, 3.0]) for _ in range(priced.shape.stages)])
        problem = Problem.from_job(priced, dead)
        if problem.size > 24 or not 1 < count_of_orders(problem) <= MOST_ORDERS:
            continue
        tried += 1
        schedules = (replace(problem.schedule(order), buckets=buckets) for order in every_order(problem))
        optimum = min(_period(schedule, priced) for schedule in schedules)
        bound = lower_bound(problem)
        solved = time_indexed.solve(problem, schedule_by_policy(problem), bound, 0.5)
        assert max(closed_form(problem), bound, solved.bound) <= optimum + 1e-9, (seed, priced, problem.dead)


def _period(schedule: Schedule, priced: PricedJob) -> float:
    try:
        return simulate(schedule, priced.prices).period
    except ScheduleError:  # some orders of several chunks wait for themselves
        return float("inf")
