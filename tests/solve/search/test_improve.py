import pytest
from hypothesis import given, settings

from recycle.ir.check import check
from recycle.ir.simulate import simulate
from recycle.job.shape import Worker
from recycle.solve.bounds import lower_bound
from recycle.solve.deadline import Deadline
from recycle.solve.effort import STEPS_OF_ORDER, Effort
from recycle.solve.problem import Problem
from recycle.solve.search.annealing import anneal
from recycle.solve.search.improve import improve
from recycle.solve.search.initial_orders import best_of_portfolio
from recycle.solve.search.list_scheduling import schedule_by_policy
from recycle.solve.search.policy_search import vary_policy
from recycle.solve.search.timing import time_order, timed
from tests.solve.jobs import DEAD, job, small_jobs, worked_example


def searched(made, dead, steps, seed=0):
    problem = Problem.of(made, dead)
    bound = lower_bound(problem)
    start, policy = best_of_portfolio(problem, Effort(bound))
    varied = vary_policy(problem, start, policy, Effort(bound, steps=20 * STEPS_OF_ORDER, seed=seed))
    found = improve(problem, varied, Effort(bound, steps=steps, seed=seed))
    return problem, start, found, simulate(problem.schedule(found.order), made.profile())


@pytest.mark.search
@settings(max_examples=10, deadline=None)
@given(small_jobs())
def test_search_keeps_schedules_valid_and_never_makes_them_worse(case):
    made, dead = case
    problem, start, found, timeline = searched(made, dead, steps=150)
    findings = check(problem.schedule(found.order), profile=made.profile(), limits=made.activation_limits())
    assert findings == []
    assert found.period <= start.period + 1e-9
    assert timeline.period >= lower_bound(problem) - 1e-9
    if problem.link == 0:
        assert timeline.period <= found.period + 1e-6


def test_the_same_seed_and_steps_give_the_same_order():
    made = worked_example(5)
    runs = [searched(made, [DEAD], steps=3000, seed=4)[2] for _ in range(2)]
    assert runs[0] == runs[1]


@pytest.mark.search
def test_the_compiled_loop_walks_the_same_way(in_both_ways):
    problem = Problem.of(worked_example([4, 3, 2, 1], decoupled=False, staggered=False), [DEAD])
    order = schedule_by_policy(problem)
    timing = time_order(problem, order)
    plain, compiled = in_both_ways(lambda: anneal(problem, order, timing.due, timing.period - 2, steps=2000, seed=3))
    assert compiled == plain
    assert plain.steps == 2000


def test_a_met_target_is_a_period():
    problem = Problem.of(worked_example(6), [DEAD])
    order = schedule_by_policy(problem)
    timing = time_order(problem, order)
    result = anneal(problem, order, timing.due, timing.period - 1, steps=300_000, hot=0.25, cold=0.12)
    assert result.met
    assert simulate(problem.schedule(result.order)).period <= timing.period - 1


def test_a_search_that_has_no_time_returns_its_start():
    problem = Problem.of(worked_example(4), [DEAD])
    order = schedule_by_policy(problem)
    start = timed(problem, order)
    assert improve(problem, start, Effort(0.0, Deadline(0.0))) == start


@pytest.mark.search
@pytest.mark.parametrize(
    ("shape", "limit", "dead", "steps", "period"),
    [
        ((4, 4, 8), 4, [(1, 2)], 400_000, 35),
        ((1, 4, 6), 4, [], 100_000, 21),
    ],
)
def test_small_published_rows_are_reached(shape, limit, dead, steps, period):
    *_, timeline = searched(job(*shape, limit), [Worker(*w) for w in dead], steps)
    assert timeline.period <= period
