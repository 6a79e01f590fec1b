import itertools
from dataclasses import replace

import pytest
from hypothesis import given, settings, strategies as st

from recycle import Worker, check, simulate
from recycle.solve.bounds import lower_bound
from recycle.solve.problem import Problem
from recycle.solve.search.list_scheduling import schedule_by_policy
from recycle.solve.search.order_kernels import time_order
from recycle.solve.time_indexed import ExactResult, solve
from tests.solve.exhaustive import best_of_all
from tests.solve.jobs import DEAD, job, worked_example


def worst_start(problem):
    """One micro-batch after the other, all on the first host of each stage."""
    order = [[] for _ in problem.cap]
    for g, kind in itertools.product(range(problem.micro_batches), range(problem.kinds)):
        for s in range(problem.shape.stages) if kind == 0 else reversed(range(problem.shape.stages)):
            x = (kind * problem.shape.stages + s) * problem.micro_batches + g
            order[problem.hosts[s][0]].append(x)
    return order


@pytest.mark.process
@pytest.mark.parametrize(
    ("shape", "dead", "keys", "optimum"),
    [
        ((2, 2, 1), [Worker(1, 1)], {}, 7),
        ((2, 2, 1), [], {"forward": [1.0, 2.0], "link": 1.0}, 8),
        ((1, 2, 2), [], {"limit": [2, 1], "staggered": False}, 8),
        ((1, 2, 2), [], {"limit": 1, "weight_stash": 0.0}, 9),
        ((1, 2, 3), [], {"limit": 2, "decoupled": False}, 12),
        (
            (2, 2, 1),
            [],
            {"limit": 2, "forward": [10, 9], "backward_weight": [8, 7], "backward_input": 12, "step": 4},
            55,
        ),
        ((2, 2, 1), [Worker(1, 1)], {"forward": [3, 2], "backward_input": 3, "step": 2, "staggered": False}, 19),
        ((1, 2, 1), [], {"limit": 2, "chunks": 2, "staggered": False, "link": 1}, 15),
        ((1, 2, 1), [], {"limit": 2, "chunks": 2, "backward_weight": [4.0, 1.0, 3.0, 1.0], "weight_stash": 0.5}, 14),
        ((2, 2, 1), [Worker(1, 1)], {"speed": {"0.1": 2.0}}, 12),
    ],
)
def test_the_model_finds_the_optimum_of_an_exhaustive_search(shape, dead, keys, optimum):
    speed, keys = keys.get("speed", {}), {key: value for key, value in keys.items() if key != "speed"}
    priced = job(*shape, **keys)
    profile = replace(priced.profile(), speed=speed)
    problem = Problem.from_job(priced, dead, profile)
    solved = solve(problem, worst_start(problem), 0.0, 20)
    assert solved.period == optimum
    assert best_of_all(problem, profile) == optimum
    assert optimum - problem.grain < solved.bound <= optimum
    assert lower_bound(problem) <= optimum
    schedule = problem.schedule(solved.order)
    assert simulate(schedule, profile).period == optimum
    assert check(schedule, profile=profile, limits=priced.activation_limits()) == []


@st.composite
def whole_jobs(draw):
    """Tiny jobs of whole times, of any caps and techniques."""
    pipelines, ranks = draw(st.integers(1, 2)), draw(st.integers(1, 3))
    times = st.lists(st.sampled_from([1.0, 1.0, 2.0]), min_size=ranks, max_size=ranks)
    limit = draw(st.lists(st.integers(1, 3), min_size=ranks, max_size=ranks))
    priced = job(
        pipelines, ranks, draw(st.integers(1, 3 if pipelines * ranks < 4 else 2)), limit,
        forward=draw(times), backward_input=draw(times), backward_weight=draw(times),
        link=draw(st.sampled_from([0.0, 0.0, 1.0])), weight_stash=draw(st.sampled_from([0.0, 0.5, 1.0])),
        decoupled=draw(st.booleans()), staggered=draw(st.booleans()),
    )  # fmt: skip
    return Problem.from_job(priced, [Worker(1, r) for r in range(ranks) if pipelines == 2 and draw(st.booleans())])


@pytest.mark.process
@settings(max_examples=8)
@given(whole_jobs())
def test_bound_is_not_above_the_optimum(problem):
    bound, start = lower_bound(problem), schedule_by_policy(problem)
    solved = solve(problem, start, max(0.0, bound - 2), 1.5)
    assert solved.period >= bound
    assert lower_bound(problem) <= solved.period <= time_order(problem, start).period
    assert solved.bound <= solved.period


@pytest.mark.soak
@pytest.mark.process
def test_unfinished_proof_keeps_start_and_bound():
    problem = Problem.from_job(worked_example(4), [DEAD])
    start = schedule_by_policy(problem)
    solved = solve(problem, start, 20.0, 8)
    assert 20 < solved.bound <= 29 <= solved.period <= time_order(problem, start).period
    assert solve(problem, start, 20.0, 3, most=100) == ExactResult(start, 30.0, 20.0)


def test_period_at_the_bound_is_optimal_without_a_solver():
    problem = Problem.from_job(job(2, 2, 2, 4))
    start = schedule_by_policy(problem)
    assert solve(problem, start, 7.0, 0.0) == ExactResult(start, 7.0, 7.0)


def test_times_without_a_common_unit_are_not_modelled():
    odd = Problem.from_job(job(1, 2, 2, forward=[1.0, 3**0.5]))
    assert odd.grain == 0
    start = schedule_by_policy(odd)
    assert solve(odd, start, 0.0, 1) == ExactResult(start, time_order(odd, start).period, 0.0)
    assert Problem.from_job(job(1, 2, 2, forward=[1.5, 3.0], backward_input=4.5, backward_weight=6.0)).grain == 1.5
