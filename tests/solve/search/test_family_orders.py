import itertools

import pytest
from hypothesis import given, settings

from recycle.errors import ScheduleError
from recycle.ir.check import check
from recycle.ir.families import FAMILIES, gpipe, interleaved, one_f_one_b, zb_h1
from recycle.ir.instruction import BackwardWeight
from recycle.ir.simulate import simulate
from recycle.job.shape import Worker
from recycle.solve.assignment import possible_assignments
from recycle.solve.planner import plan
from recycle.solve.problem import Problem
from recycle.solve.search.family_orders import family_orders, greedy_1f1b, order_of
from recycle.solve.search.timing import time_order
from tests.solve.jobs import job, small_jobs


def test_a_family_becomes_the_order_that_it_writes():
    whole, split = (Problem.of(job(2, 4, 8, decoupled=decoupled)) for decoupled in (False, True))
    shape = whole.shape
    assert whole.schedule(order_of(whole, one_f_one_b(shape))).text() == one_f_one_b(shape).text()
    assert split.schedule(order_of(split, zb_h1(shape))).text() == zb_h1(shape).text()
    assert order_of(whole, zb_h1(shape)) is None


@pytest.mark.parametrize(("chunks", "family"), [(1, one_f_one_b), (1, gpipe), (2, interleaved)])
def test_a_whole_backward_becomes_an_input_gradient_and_the_weight_gradient_behind_it(chunks, family):
    made = job(1, 3, 6, chunks=chunks, forward=1.3, link=0.25)
    problem = Problem.of(made)
    order = order_of(problem, family(problem.shape))
    assert check(problem.schedule(order), profile=made.profile()) == []
    assert time_order(problem, order).period <= simulate(family(problem.shape), made.profile()).period + 1e-9
    text = problem.schedule(order).text()["0.0"].split()
    assert all(after == one.replace("I", "W") for one, after in itertools.pairwise(text) if "I" in one)


def test_only_families_that_memory_admits_fit():
    ample, tight = (list(family_orders(Problem.of(job(1, 4, 8, limit)))) for limit in (8, 4))
    assert len(ample) == 6
    assert len(tight) == 2  # 1f1b and zb-h1
    assert list(family_orders(Problem.of(job(2, 4, 8, 8), [Worker(0, 1)]))) == []


@pytest.mark.search
@settings(max_examples=40, deadline=None)
@given(small_jobs())
def test_greedy_1f1b_fits_any_job(case):
    made, dead = case
    problem = Problem.of(made, dead)
    for assignment in possible_assignments(problem):
        order = greedy_1f1b(problem, assignment)
        assert check(problem.schedule(order), profile=made.profile(), limits=made.activation_limits()) == []


@pytest.mark.search
@settings(max_examples=10, deadline=None)
@given(small_jobs())
def test_no_family_beats_a_plan(case):
    made, _ = case
    planned = plan(made, steps=50)
    for name, family in FAMILIES.items():
        try:
            schedule = family(made.shape, optimizer=planned.schedule.optimizer)
        except ScheduleError:
            continue
        fits = not check(schedule, profile=made.profile(), limits=made.activation_limits())
        fits = fits and (made.planner.decoupled or not any(schedule.columns.kind == BackwardWeight.kind))
        if fits and schedule.placement == planned.schedule.placement:
            assert planned.period <= simulate(schedule, made.profile()).period + 1e-9, name
