import itertools
import sys
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recycle.ir.check import check
from recycle.ir.simulate import simulate
from recycle.shape import Worker
from recycle.solve import disjunctive, exact
from recycle.solve.child import Child
from recycle.solve.construct import construct, default_policy, portfolio
from recycle.solve.deadline import Deadline
from recycle.solve.engines import not_installed
from recycle.solve.found import Found
from recycle.solve.improve import improve
from recycle.solve.planner import plan
from recycle.solve.problem import Problem
from recycle.solve.standing import stand
from recycle.solve.timing import time_order
from recycle.solve.window import TooLarge, closed, window
from recycle.solve.windows import Windows
from tests.solve.jobs import DEAD, job, small_jobs, worked_example


@pytest.fixture(scope="module")
def solver_child():
    with Child(disjunctive.__name__) as process:
        yield process


def windows_of(problem, process, **keys):
    """Windows that use the module's child."""
    made = Windows(problem, **keys)
    made.child = process
    return made


@st.composite
def late_orders(draw):
    """A problem, an order of its list scheduler, and a target below its period that leaves somebody late."""
    made, dead = draw(small_jobs())
    problem = Problem.of(made, dead)
    policies = list(itertools.islice(portfolio(problem), 12))
    order = construct(problem, draw(st.sampled_from(policies)), noise=draw(st.sampled_from([0.0, 0.5])), seed=1)
    timing = time_order(problem, order)
    return problem, order, timing.due, timing.period - draw(st.sampled_from([1.0, 2.0, 5.0]))


@st.composite
def cuts(draw, problem, standing):
    """Some workers, and a time slice."""
    live = sorted({w for hosts in problem.hosts for w in hosts})
    freed = set(draw(st.lists(st.sampled_from(live), min_size=1)))
    first, last = float(standing.begin.min()), float(standing.end.max())
    since = draw(st.floats(first, last))
    return freed, since, since + draw(st.floats(0, last - first + 1))


def successors(standing, x):
    """What waits for x: the next of its program, and the one of another stage."""
    w, k = standing.host[x], standing.place[x] + 1
    after = [int(standing.problem.feeds[x])]
    if k < standing.offsets[w + 1]:
        after.append(int(standing.sequence[k]))
    return [y for y in after if y >= 0]


@settings(max_examples=40, deadline=None)
@given(late_orders(), st.data())
def test_nothing_outside_is_between_two_operations_of_a_window(case, data):
    problem, order, due, target = case
    standing = stand(problem, order, due, target)
    freed, since, until = data.draw(cuts(problem, standing))
    inside = set(closed(standing, freed, since, until))
    asked = {x for w in freed for x in standing.order[w] if since - 1e-9 <= standing.begin[x] < until - 1e-9}
    assert asked <= inside
    assert {x for x in inside if standing.host[x] in freed} == asked
    after, before = set(), set()
    for x in standing.topological.tolist():
        if x in inside or x in after:
            after |= {y for y in successors(standing, x) if y not in inside}
    for x in standing.topological.tolist()[::-1]:
        if any(y in inside or y in before for y in successors(standing, x)):
            before.add(x)
    assert not (after & before) - inside


@settings(max_examples=40, deadline=None)
@given(late_orders(), st.data(), st.booleans())
def test_the_start_satisfies_every_row_of_a_window(case, data, in_turn):
    problem, order, due, target = case
    standing = stand(problem, order, due, target)
    freed, since, until = data.draw(cuts(problem, standing))
    try:
        drawn = window(standing, freed, since, until, in_turn=in_turn, most=10_000)
    except TooLarge:
        return
    if drawn is None:
        return
    model = drawn.model
    for time, low, high in zip(model.starts, model.earliest, model.latest, strict=True):
        assert low - 1e-6 <= time <= high + 1e-6
    for i, j, delay in model.after:
        assert model.starts[j] >= model.starts[i] + delay - 1e-6
    for i, j, _ in model.pairs:
        assert model.starts[j] >= model.starts[i] + model.seconds[i] - 1e-6
    for terms, most in model.memory:
        assert sum(coefficient for _, coefficient in terms) <= most
    for i, late, delay in model.exits:
        assert model.lateness[late] >= model.starts[i] + delay - 1e-6
    for late, (low, high) in zip(model.lateness, model.late, strict=True):
        assert low - 1e-6 <= late <= high + 1e-6
    assert drawn.ordered(standing, [True] * model.binaries) == standing.order


@pytest.mark.search
@pytest.mark.parametrize("solver", ["HiGHS", "CBC"])
@pytest.mark.parametrize("keys", [{}, {"weight_stash": 0.5}, {"staggered": False}, {"decoupled": False}])
def test_with_all_pairs_as_in_the_start_the_objective_is_what_the_start_is_late(solver, keys):
    problem = Problem.of(worked_example(4, **keys), [DEAD])
    order = construct(problem)
    timing = time_order(problem, order)
    standing = stand(problem, order, timing.due, timing.period - 1)
    drawn = window(standing, set(range(12)), -100.0, 100.0, in_turn=False, most=10_000)
    assert drawn.model.binaries > 20
    fixed = [(i, j, drawn.model.seconds[i]) for i, j, _ in drawn.model.pairs]
    model = replace(drawn.model, after=drawn.model.after + fixed)
    status, objective, kept = disjunctive.solve(model, solver, 20.0, 100, 0.0)
    assert status == "optimal"
    assert objective == pytest.approx(standing.cost, abs=1e-6)
    assert drawn.ordered(standing, kept) == standing.order


def interleavings(chains):
    chains = [tuple(chain) for chain in chains if len(chain)]
    if not chains:
        yield ()
    for i, chain in enumerate(chains):
        for rest in interleavings([*chains[:i], chain[1:], *chains[i + 1 :]]):
            yield (chain[0], *rest)


@pytest.mark.parametrize(
    ("keys", "shortfall"),
    [
        ({}, 1),
        ({"limit": [2, 1]}, 2),
        ({"limit": 1, "weight_stash": 0.0}, 3),
        ({"limit": [2, 1], "weight_stash": 0.5, "staggered": False}, 3),
        ({"forward": [1.0, 2.0], "backward_weight": [2.0, 1.0], "link": 1.0}, 2),
        ({"limit": [2, 1], "decoupled": False, "staggered": False}, 3),
    ],
)
def test_a_window_of_everything_finds_the_least_lateness_of_all_orders(keys, shortfall):
    problem = Problem.of(job(1, 2, 2, **keys))
    plane = 4
    programs = [
        list(interleavings([range(stage * 2 + g, problem.size, plane) for g in range(2)])) for stage in range(2)
    ]
    orders = [list(map(list, order)) for order in itertools.product(*programs)]
    orders = [order for order in orders if problem.is_within_caps(order) and time_order(problem, order).period < 1e9]
    start = max(orders, key=lambda order: time_order(problem, order).period)
    timing = time_order(problem, start)
    standing = stand(problem, start, timing.due, timing.period - shortfall)
    least = min(stand(problem, order, timing.due, timing.period - shortfall).cost for order in orders)
    drawn = window(standing, {0, 1}, -100.0, 100.0, in_turn=False)
    assert least < standing.cost
    status, objective, kept = disjunctive.solve(drawn.model, "HiGHS", 20.0, 10_000, 0.0)
    after = stand(problem, drawn.ordered(standing, kept), timing.due, timing.period - shortfall)
    assert (status, after.cost) == ("optimal", least)
    assert objective == pytest.approx(least, abs=1e-6)
    assert problem.is_within_caps(after.order)


@pytest.mark.search
@pytest.mark.parametrize("solver", ["HiGHS", "CBC"])
@settings(max_examples=12, deadline=None)
@given(case=late_orders())
def test_windows_keep_to_the_caps_and_never_make_anything_later(solver, solver_child, case):
    problem, order, due, target = case
    result = windows_of(problem, solver_child, solver=solver, nodes=5).better(
        order, due, target, count=3, patience=3, seed=1
    )
    before, after = stand(problem, order, due, target), stand(problem, result.order, result.due, target)
    assert after.cost <= before.cost
    assert result.met == (after.cost <= 1e-9)
    assert problem.is_within_caps(result.order)
    assert sorted(map(sorted, result.order)) == sorted(map(sorted, order))
    assert time_order(problem, result.order).period < 1e9


@pytest.mark.process
def test_windows_reach_a_period_that_the_portfolio_does_not(solver_child):
    problem = Problem.of(worked_example(6), [DEAD])
    order = construct(problem, default_policy(problem))
    period, timing = time_order(problem, order).period, time_order(problem, order)
    result = windows_of(problem, solver_child).better(order, timing.due, period - 1, count=40, patience=40, seed=0)
    schedule = problem.schedule(result.order)
    assert result.met
    assert simulate(schedule).period <= period - 1
    assert check(schedule, limits=[6.0] * 4) == []


@pytest.mark.search
def test_the_same_seed_and_steps_give_the_same_order(solver_child):
    problem = Problem.of(job(4, 4, 8, 4), [Worker(1, 2)])
    order = construct(problem)
    start = Found(order, time_order(problem, order).period)
    runs = [
        improve(problem, start, 34.0, steps=60_000, seed=0, windows=windows_of(problem, solver_child, nodes=5))
        for _ in range(2)
    ]
    assert runs[0] == runs[1]
    assert runs[0].period < start.period


@pytest.mark.search
def test_a_child_that_overshoots_is_killed_and_leaves_the_start():
    problem = Problem.of(worked_example(6), [DEAD])
    order = construct(problem)
    timing = time_order(problem, order)
    with Windows(problem) as windows:
        result = windows.better(
            order, timing.due, timing.period - 1, count=3, patience=3, seed=0, deadline=Deadline(0.05)
        )
        assert stand(problem, result.order, result.due, timing.period - 1).cost > 0
        process = windows.child
        assert process.ask((), 0.0) == ([], "killed")
        after = windows.better(order, timing.due, timing.period - 1, count=3, patience=3, seed=0)
    assert after.steps > 0
    assert process.ask((), 20.0) == ([], "solver failed")


@pytest.mark.search
def test_without_a_solver_planning_goes_on_and_says_what_is_missing(monkeypatch):
    for package in ("highspy", "highsbox"):
        monkeypatch.setitem(sys.modules, package, None)
    wanted = "HiGHS is not installed: pip install highspy"
    assert (not_installed("HiGHS"), not_installed("CBC")) == (wanted, None)
    made = plan(worked_example(4, seconds=6), [DEAD])
    assert made.planner["solver"] == wanted
    assert made.lower_bound < made.period <= 30
    problem = Problem.of(worked_example(4), [DEAD])
    assert exact.solve(problem, construct(problem), 20.0, 3.0).status == wanted
    monkeypatch.setitem(sys.modules, "mip", None)
    assert not_installed("CBC") == "python-mip is not installed, which CBC is called through: pip install 'mip[highs]'"
