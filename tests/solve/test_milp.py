import pytest

from recycle.ir.check import check
from recycle.ir.simulate import simulate
from recycle.shape import Worker
from recycle.solve import milp
from recycle.solve.bounds import lower_bound
from recycle.solve.construct import construct, portfolio
from recycle.solve.problem import Problem
from recycle.solve.timing import time_order
from tests.solve.jobs import job


def worst_start(problem):
    """The order of the portfolio that leaves most to gain."""
    orders = [construct(problem, policy) for policy in portfolio(problem)]
    return max(orders, key=lambda order: time_order(problem, order).period)


@pytest.mark.parametrize("solver", ["HiGHS", "CBC"])
@pytest.mark.parametrize(
    ("decoupled", "staggered", "limit", "period"), [(True, True, 4, 24), (True, False, 3, 25), (False, False, 2, 27)]
)
def test_a_bad_start_is_polished(solver, decoupled, staggered, limit, period):
    made = job(2, 2, 4, limit, decoupled=decoupled, staggered=staggered)
    problem = Problem.of(made, [Worker(1, 1)])
    start = worst_start(problem)
    solved = milp.solve(problem, start, lower_bound(problem), seconds=20, solver=solver)
    schedule = problem.schedule(solved.order)
    assert solved.period == simulate(schedule).period == period <= time_order(problem, start).period
    assert check(schedule, profile=made.profile(), limits=made.activation_limits()) == []


def test_the_start_satisfies_every_row_of_its_own_model():
    problem = Problem.of(job(3, 4, 6, 4), [Worker(1, 2)])
    for policy in list(portfolio(problem))[:8]:
        model = milp.build(problem, construct(problem, policy))
        for i, j, delay in model.after:
            assert model.warm[j] >= model.warm[i] + delay - 1e-9
        for time, low, high in zip(model.warm, model.earliest, model.latest, strict=True):
            assert low - 1e-9 <= time <= high + 1e-9
        for leader, end, finish in model.windows:
            assert model.warm[end] + model.seconds[end] + finish - model.warm[leader] <= model.period + 1e-9


def test_a_model_that_is_too_large_returns_the_start():
    problem = Problem.of(job(3, 4, 6, 4), [Worker(1, 2)])
    start = construct(problem)
    assert milp.solve(problem, start, seconds=5, most=10) == milp.Solved(start, 30.0, "too large")


def test_a_solver_that_overshoots_is_killed():
    problem = Problem.of(job(3, 4, 6, 4), [Worker(1, 2)])
    start = construct(problem)
    solved = milp.solve(problem, start, seconds=0.0, most=10_000)
    assert solved.period <= time_order(problem, start).period
