"""Every search keeps schedules valid and never makes them worse, keeps its time, and depends on seed and steps only."""

import threading

import pytest
from hypothesis import given, settings

from recycle import Worker, check, simulate
from recycle.job import PricedJob
from recycle.solve import effort as efforts
from recycle.solve.effort import STEPS_OF_ORDER, Deadline, Effort, Incumbent, Pace
from recycle.solve.problem import Problem
from recycle.solve.search.annealing import improve
from recycle.solve.search.initial_orders import SearchStart, find_initial_order, find_starts
from recycle.solve.search.insertion import vary_insertion
from recycle.solve.search.local_search import search_from, search_templates
from recycle.solve.search.order_kernels import time_order
from recycle.solve.search.policy_search import vary_policy
from recycle.solve.search.waves import best_wave
from tests.jobs import repriced
from tests.solve.jobs import DEAD, job, small_jobs, worked_example


def insertion(begun: SearchStart, effort: Effort) -> Incumbent:
    return begun.best if begun.inserted is None else vary_insertion(begun.problem, *begun.inserted, effort)


SEARCHES = {
    "policies": lambda begun, effort: vary_policy(begun.problem, begun.best, begun.policy, effort),
    "operations": lambda begun, effort: improve(begun.problem, begun.best, effort),
    "insertion": insertion,
    "waves": lambda begun, effort: best_wave(begun.problem, effort),
    "templates": search_templates,
    "all": search_from,
}
FROM_START = [name for name in SEARCHES if name not in ("insertion", "waves", "templates")]


def start_of(priced: PricedJob, dead: list[Worker]) -> SearchStart:
    return find_initial_order(Problem.from_job(priced, dead), Effort(0.0), 3)


def test_a_search_with_slow_workers_begins_with_the_shortest_order():
    priced = job(4, 8, 4)
    problem = Problem.from_job(repriced(priced, speed={"2.3": 1.5, "2.5": 3.0}))
    starts = find_starts(problem, Effort(0.0, Deadline(0.5)))
    assert starts[0].best.period == min(start.best.period for start in starts)


@pytest.mark.search
@pytest.mark.parametrize("name", SEARCHES)
@settings(max_examples=12)
@given(small_jobs())
def test_searches_give_valid_schedules_that_are_not_worse(name, case):
    priced, dead = case
    begun = start_of(priced, dead)
    result = SEARCHES[name](begun, Effort(0.0, steps=15 * STEPS_OF_ORDER, seed=1))
    schedule = begun.problem.schedule(result.order)
    assert check(schedule, profile=priced.profile(), limits=priced.activation_limits()) == []
    assert simulate(schedule, priced.profile()).makespan == time_order(begun.problem, result.order).makespan
    assert time_order(begun.problem, result.order).period <= result.period + 1e-6
    if name in FROM_START:
        assert result.period <= begun.best.period + 1e-9


@pytest.mark.search
@pytest.mark.parametrize("name", SEARCHES)
def test_the_same_seed_and_steps_give_the_same_order(name):
    begun = start_of(job(2, 3, 6, 4, chunks=2), [Worker(1, 2)])
    runs = [SEARCHES[name](begun, Effort(0.0, steps=30 * STEPS_OF_ORDER, seed=4)) for _ in range(2)]
    assert runs[0] == runs[1]


@pytest.mark.parametrize("name", FROM_START)
def test_search_without_time_or_with_met_bound_returns_its_start(name):
    begun = start_of(worked_example(4), [DEAD])
    for effort in (Effort(0.0, Deadline(0.0)), Effort(begun.best.period)):
        assert SEARCHES[name](begun, effort).period == begun.best.period


@pytest.mark.search
@pytest.mark.parametrize("name", SEARCHES)
def test_searches_give_the_same_in_plain_python_and_compiled(name, in_both_ways):
    priced = job(2, 3, 3, 4, chunks=2, link=1.3, weight_stash=0.5, forward=[1.0, 1.1, 0.7] * 2)
    begun = start_of(priced, [Worker(1, 2)])
    plain, compiled = in_both_ways(lambda: SEARCHES[name](begun, Effort(0.0, steps=4 * STEPS_OF_ORDER, seed=3)))
    assert plain == compiled


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A clock that tests set: `clock[0]` is the time in seconds."""
    now = [100.0]
    monkeypatch.setattr(efforts.time, "monotonic", lambda: now[0])
    return now


def test_parts_and_earlier_deadlines_count_from_now(clock):
    whole = Deadline(10.0)
    clock[0] += 2.0
    assert (whole.seconds_left, whole.part(0.5).seconds_left, whole.earlier(3.0).seconds_left) == (8.0, 4.0, 5.0)
    assert Deadline(None).earlier(3.0).seconds_left == float("inf")


def test_loop_ends_before_a_step_that_would_miss_the_deadline(clock):
    pace, steps = Pace(Deadline(10.0)), 0
    while not pace.is_over():
        clock[0] += 3.0
        steps += 1
    assert (steps, clock[0]) == (3, 109.0)


def test_stop_ends_a_loop_without_a_limit():
    stop = threading.Event()
    pace = Pace(Deadline(None, stop).earlier(5.0))
    assert not pace.is_over()
    stop.set()
    assert pace.is_over()
