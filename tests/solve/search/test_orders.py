"""Constructed orders: by policy, priorities, insertion, families and waves; and their times."""

import itertools
from dataclasses import replace
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from recycle import Link, ScheduleError, Worker, check, simulate
from recycle.ir.families import FAMILIES, gpipe, interleaved, one_f_one_b, zb_h1
from recycle.ir.instruction import BackwardWeight
from recycle.solve.assignment import home_hosts, possible_assignments
from recycle.solve.planner import plan
from recycle.solve.problem import Problem
from recycle.solve.search.initial_orders import order_from_schedule
from recycle.solve.search.insertion import insertion_order, insertion_orders, vary_parameters
from recycle.solve.search.list_scheduling import portfolio, schedule_by_policy, schedule_by_priority
from recycle.solve.search.order_kernels import initial_state, time_order
from recycle.solve.search.waves import wave_orders
from tests.solve.jobs import DEAD, job, small_jobs, small_problems


def hosts_in(problem, order):
    return initial_state(problem, order).host[: len(problem.stage_of)]


def is_valid(priced, problem, order):
    return check(problem.schedule(order), profile=priced.profile(), limits=priced.activation_limits()) == []


@pytest.mark.search
@settings(max_examples=12)
@given(small_problems())
def test_every_policy_gives_a_valid_schedule(case):
    priced, problem = case
    for policy in itertools.islice(portfolio(problem), 0, None, 5):
        order = schedule_by_policy(problem, policy)
        assert is_valid(priced, problem, order)
        assert problem.is_within_caps(order)


@pytest.mark.parametrize(("limit", "chunks"), [(2, 2), (3, 3), (4, 2)])
def test_chunks_do_not_deadlock_under_the_tightest_caps(limit, chunks):
    priced = job(3, 4, 6, limit, chunks=chunks)
    problem = Problem.from_job(priced, [DEAD])
    assert is_valid(priced, problem, schedule_by_policy(problem))


@settings(max_examples=40)
@given(small_problems(), st.integers(0, 99), st.sampled_from([0.0, 0.5, 2.0]), st.sampled_from([0.0, 0.5, 5.0]))
def test_any_priorities_give_a_valid_schedule(case, seed, patience, weight_patience):
    priced, problem = case
    random = np.random.default_rng(seed)
    order = schedule_by_priority(
        problem,
        hosts_in(problem, schedule_by_policy(problem)),
        random.random(problem.size),
        patience=patience,
        weight_patience=weight_patience,
        release=random.random(problem.micro_batches),
    )
    assert is_valid(priced, problem, order)


@pytest.mark.search
@settings(max_examples=25)
@given(small_problems())
def test_insertion_gives_a_valid_schedule(case):
    priced, problem = case
    inserted = list(insertion_orders(problem, possible_assignments(problem)))[::3]
    varied = (insertion_order(problem, vary_parameters(problem, parameters, Random(2))) for _, parameters in inserted)
    orders = [*(order for order, _ in inserted), *filter(None, varied)]
    assert orders
    assert all(is_valid(priced, problem, order) for order in orders)


@pytest.mark.parametrize("decoupled", [True, False])
@pytest.mark.parametrize(("chunks", "limit", "stash"), [(1, 3, 0.5), (2, 2, 1.0), (3, 4, 0.5)])
def test_waves_give_valid_schedules(chunks, limit, stash, decoupled):
    times = {"forward": [1.0, 1.3, 0.6] * chunks, "backward_weight": [0.5, 1.0, 1.4] * chunks, "link": 0.2}
    priced = job(1, 3, 5, limit, chunks=chunks, weight_stash=stash, decoupled=decoupled, **times)
    problem = Problem.from_job(priced)
    incumbents = list(itertools.islice(wave_orders(problem, [home_hosts(problem).ravel()]), 25))
    assert len({incumbent.period for incumbent in incumbents}) > 1
    for incumbent in incumbents:
        assert is_valid(priced, problem, incumbent.order)
        assert simulate(problem.schedule(incumbent.order), priced.profile()).period <= incumbent.period + 1e-9


def test_family_is_converted_to_its_own_order():
    whole, split = (Problem.from_job(job(2, 4, 8, decoupled=decoupled)) for decoupled in (False, True))
    shape = whole.shape
    assert whole.schedule(order_from_schedule(whole, one_f_one_b(shape))).text() == one_f_one_b(shape).text()
    assert split.schedule(order_from_schedule(split, zb_h1(shape))).text() == zb_h1(shape).text()
    assert order_from_schedule(whole, zb_h1(shape)) is None


@pytest.mark.parametrize(("chunks", "family"), [(1, one_f_one_b), (1, gpipe), (2, interleaved)])
def test_whole_backward_becomes_an_input_gradient_and_then_a_weight_gradient(chunks, family):
    priced = job(1, 3, 6, chunks=chunks, forward=1.3, link=0.25)
    problem = Problem.from_job(priced)
    order = order_from_schedule(problem, family(problem.shape))
    assert is_valid(priced, problem, order)
    assert time_order(problem, order).period <= simulate(family(problem.shape), priced.profile()).period + 1e-9
    text = problem.schedule(order).text()["0.0"].split()
    assert all(after == before.replace("I", "W") for before, after in itertools.pairwise(text) if "I" in before)


@pytest.mark.search
@settings(max_examples=6)
@given(small_jobs())
def test_no_family_beats_a_plan(case):
    priced, _ = case
    planned = plan(priced, steps=50)
    for name, family in FAMILIES.items():
        try:
            schedule = family(priced.shape, optimizer=planned.schedule.optimizer)
        except ScheduleError:
            continue
        fits = not check(schedule, profile=priced.profile(), limits=priced.activation_limits())
        fits = fits and (priced.planner.decoupled or not any(schedule.columns.kind == BackwardWeight.kind))
        if fits and schedule.placement == planned.schedule.placement:
            assert planned.period <= simulate(schedule, priced.profile()).period + 1e-9, name


def any_order(problem, seed):
    """An order by random priorities, half of the time on random live hosts."""
    random = np.random.default_rng(seed)
    host = hosts_in(problem, schedule_by_policy(problem))
    if random.random() < 0.5:
        host = np.array([random.choice(problem.hosts[s]) for s in problem.stage_of])
    return schedule_by_priority(
        problem, host, random.random(problem.size), patience=2 * random.random(), weight_patience=random.random()
    )


@settings(max_examples=40)
@given(small_problems(), st.integers(0, 999))
def test_timing_of_an_order_equals_the_simulators(case, seed):
    priced, problem = case
    order = any_order(problem, seed)
    timing, exact = time_order(problem, order), simulate(problem.schedule(order), priced.profile())
    assert timing.makespan == exact.makespan
    assert timing.period >= exact.period - 1e-9


@pytest.mark.parametrize("staggered", [True, False])
@pytest.mark.parametrize(
    ("ranks", "chunks", "base", "is_alike"),
    [
        (1, 2, 1.0, True),
        *((*value, alike) for value in [(2, 1, 0.25), (2, 2, 1), (3, 2, 0.5)] for alike in (True, False)),
    ],
)
def test_right_shift_gives_the_simulators_period(ranks, chunks, base, is_alike, staggered):
    """Two ranks with chunks send activations and gradients over the same lanes, one rank with chunks to peers only."""
    equal = 0
    for seed in range(12):
        draw = np.random.default_rng(seed)
        link = base * (1, 2, 4, 6)[seed % 4] if is_alike else base
        priced = job(3, ranks, 4, chunks * ranks, chunks=chunks, link=link, step=0.5, staggered=staggered)
        slow = {
            f"{k}.{r}>{h}.{(r + 1) % ranks}": Link(base * draw.integers(1, 6))
            for k, r, h in ([] if is_alike else draw.integers(0, 2, (4, 3)))
        }
        profile = replace(priced.profile(), links={pair: value for pair, value in slow.items() if pair[:3] != pair[4:]})
        problem = Problem.from_job(priced, [Worker(2, seed % ranks)], profile)
        order = any_order(problem, seed)
        timing, exact = time_order(problem, order), simulate(problem.schedule(order), profile)
        assert timing.makespan == exact.makespan
        assert timing.period >= exact.period - 1e-9
        equal += timing.period <= exact.period + 1e-9
    assert equal >= 11
