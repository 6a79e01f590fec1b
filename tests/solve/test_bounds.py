"""Bounds: what they prove of known jobs, and that none is above the period of a valid schedule.

They are held against constructed schedules, exhaustive search and CP-SAT, on jobs of every kind: dead and slow workers,
chunks, tight memory, transfers that queue, both optimizers. CP-SAT's schedules count only once `check` has passed them,
and with the period that `simulate` gives them, so an error in its model cannot make a sound bound look wrong.
"""

import importlib.util
import itertools
import random
import threading
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import pytest
from hypothesis import given, settings, strategies as st

from benchmarks import cp_sat
from recycle import Profile, Worker, simulate
from recycle.ir.families import interleaved, looped_bfs
from recycle.job import PricedJob
from recycle.plans import Plan
from recycle.solve import bounds, time_indexed
from recycle.solve.bounds import RisingBound, closed_form, fluid, lower_bound, rising_bounds
from recycle.solve.bounds.bound import Bound, certify
from recycle.solve.effort import Deadline
from recycle.solve.problem import Problem
from recycle.solve.search.list_scheduling import portfolio, schedule_by_policy
from recycle.solve.search.order_kernels import time_order
from tests.solve.exhaustive import best_of_all, count_of_orders
from tests.solve.jobs import DEAD, job, small_jobs, small_problems, worked_example

FEW_SLOTS = [4, 3, 2, 1]
MOST_ORDERS = 300
needs_ortools = pytest.mark.skipif(
    importlib.util.find_spec("ortools") is None, reason="ortools is missing: pip install '.[test]'"
)


@pytest.mark.parametrize(
    ("shape", "keys", "dead", "bound"),
    [
        ((4, 8, 8, 8), {}, [(1, 3)], 35),
        ((24, 64, 64, 64), {}, [(0, 40)], 256),  # the round trip of stage 0 dwarfs its load
        ((24, 64, 64, 64), {}, [(0, 3)], 258),  # 67 micro-batches, 64 slots: the trip of 121 is not filled
        ((1, 4, 8), {"chunks": 2}, [], 8 * 2 * 3),
        ((1, 4, 8, 8), {"chunks": 2}, [], 48 + 3),  # rank 0: 8 F down, 3 I back up to stage 4, 8 forwards meanwhile
        ((1, 2, 4, 2), {"chunks": 2}, [], 33),  # chunks of a rank share its memory
        ((16, 8, 6, 16), {"chunks": 2}, [], 47),  # no rank reduces before its last host is done
        ((4, 4, 8), {"chunks": 2}, [(1, 2)], 22 * 3),  # 64 units on 3 hosts
        ((3, 1, 3), {}, [(0, 0)], 15),  # 9 for 2 live workers: one has 5
        ((1, 4, 8, 8), {"chunks": 2, "placement": "v"}, [], 48),  # the first micro-batch returns at 7, after 7 of 8 F
        ((1, 2, 4), {"chunks": 2, "placement": "v", "link": 2}, [], 24 + 3),  # rank 0: 4 F, the first one returns at 7
        ((1, 4, 8, 8), {"chunks": 2, "staggered": False}, [], 51),
        ((1, 4, 1), {"chunks": 2, "staggered": False}, [], 8 + 8 + 1),  # one micro-batch, and its W
        ((1, 2, 4), {"link": 3}, [], 1 + 4 * 3 + 2 + 3 + 2),  # the fourth activation waits for the lane
        ((2, 2, 4), {"link": 12}, [], 1 + 2 * 12 + 2 + 12 + 2),  # eight over four lanes
        ((1, 2, 2), {"chunks": 2, "link": 3}, [], 30),  # activations of the second boundary wait for a lane
        ((1, 1, 4), {"chunks": 2, "link": 5}, [], 24),  # a worker that hosts all stages transfers nothing
        ((1, 2, 1), {"forward": [3.0, 1.0], "backward_input": [5.0, 1.0], "backward_weight": 2.0}, [], 12),
    ],
)
def test_bounds_of_known_jobs(shape, keys, dead, bound):
    assert lower_bound(Problem.from_job(job(*shape, **keys), [Worker(*w) for w in dead])) == bound


def test_bound_with_a_slow_host():
    slow = Profile(speed={"0.0": 2.0})
    least = min(max(3 * a * 2, 3 * (6 - a)) for a in range(7))
    for limit in (None, 1):
        assert lower_bound(Problem.from_job(job(2, 1, 3, limit), [], slow)) == least == 12


def test_closed_form_of_many_workers_is_fast():
    problem = Problem.from_job(job(32, 64, 64, 128, chunks=2), [Worker(3, 7)])
    begun = time.process_time()
    assert closed_form(problem) == 64 * 2 * 3 + 64  # 192 slots to stage 127 and back to 64, and 128 forwards
    assert time.process_time() - begun < 2.0


@pytest.mark.search
@settings(max_examples=10)
@given(small_problems())
def test_no_constructed_schedule_beats_the_bound(case):
    priced, problem = case
    bound = lower_bound(problem)
    assert closed_form(problem) <= bound + 1e-9
    for policy in itertools.islice(portfolio(problem), 3):
        timeline = simulate(problem.schedule(schedule_by_policy(problem, policy)), priced.profile())
        assert timeline.period >= bound - 1e-9
        if not priced.planner.staggered:
            assert timeline.period == pytest.approx(timeline.makespan)


@pytest.mark.search
@settings(max_examples=12)
@given(st.integers(1, 3), st.integers(2, 4), st.integers(1, 3), st.integers(2, 3), st.booleans())
def test_no_family_beats_the_bound_for_its_own_memory(pipelines, ranks, groups, chunks, staggered):
    optimizer = "staggered" if staggered else "barrier"
    for family in (interleaved, looped_bfs):
        shape = job(pipelines, ranks, groups * ranks, chunks=chunks).shape
        timeline = simulate(family(shape, optimizer))
        peaks = [int(timeline.peak_activations[rank]) for rank in range(ranks)]
        limited = job(pipelines, ranks, groups * ranks, peaks, chunks=chunks, staggered=staggered, decoupled=False)
        assert lower_bound(Problem.from_job(limited)) <= timeline.period + 1e-9


def max_completed(problem, window, stages, points=None):
    return fluid.FluidRelaxation(problem, window, stages, points).solve(Deadline(None))


def window(problem, order, rank):
    """E - S of all stages of a rank; with the barrier, of all together."""
    started = time_order(problem, order).latest_starts.tolist()
    host = {x: w for w, program in enumerate(order) for x in program}
    n, stages = problem.micro_batches, problem.shape.stages
    places = [(x, x // n // stages, x // n % stages) for x in range(problem.size)]
    chosen = [place for place in places if problem.shape.rank_of(place[2]) == rank or not problem.staggered]
    times = problem.times.reshape(3, -1)
    ends = (started[x] + times[kind, s] * problem.speed[host[x]] + problem.update_seconds[s] for x, kind, s in chosen)
    return max(ends) - min(started[x] for x, _, _ in chosen)


@pytest.mark.search
@settings(max_examples=8)
@given(small_jobs())
def test_fluid_admits_every_schedule_in_its_own_window(case):
    problem = Problem.from_job(*case)
    ranks, stages = problem.shape.ranks, problem.shape.stages
    chains = {(0,), tuple(range(stages)), tuple(sorted({0, stages - 1})), tuple(range(0, stages, ranks))}
    if problem.staggered:
        chains |= {tuple(range(ranks // 2, stages)), tuple(range(ranks - 1, stages, ranks))}
    for policy in itertools.islice(portfolio(problem), 3):
        order = schedule_by_policy(problem, policy)
        if time_order(problem, order).period == float("inf"):
            continue  # with several chunks some orders wait for themselves
        for chain, points in itertools.product(chains, (None, 30)):
            completed = max_completed(problem, window(problem, order, chain[0]), chain, points)
            assert completed >= problem.micro_batches - 1e-6


def test_program_that_presolve_spoils_is_solved_without_it():
    times = {"forward": [16, 8, 9], "backward_input": [10, 8, 9], "backward_weight": [14, 11, 7]}
    problem = Problem.from_job(job(1, 3, 5, 2, **times))
    assert max_completed(problem, 222.0, (0,)) == pytest.approx(4.85)
    assert max(fluid.rising_bounds(problem, 222.0, [(0,)])) == 228


@pytest.mark.search
def test_aligned_grid_is_tighter_with_little_memory():
    """Of 72 slots a third has nothing to hold until the first micro-batch is at the second chunk, and again at the end;
    the unaligned grid rounds away more of how long activations are held than that."""
    problem = Problem.from_job(job(8, 11, 14, 3, chunks=2, link=0.05)).in_bound_units()
    assert closed_form(problem) == pytest.approx(333.3 * 20)
    assert max_completed(problem, 345 * 20, (0, 11)) == pytest.approx(112)
    assert max_completed(problem, 345 * 20, (0, 11), 400) < 111.9


def tiny_problems(count: int) -> list[tuple[PricedJob, Problem]]:
    """The first jobs, by seed, that have few enough orders to try them all, and more than one."""
    problems = []
    seed = 0
    while len(problems) < count:
        priced, dead = cp_sat.small_job(random.Random(seed), most=2)
        problem = Problem.from_job(priced, dead)
        if problem.size <= 24 and 1 < count_of_orders(problem) <= MOST_ORDERS:
            problems.append((priced, problem))
        seed += 1
    return problems


def proven_of(priced: PricedJob, problem: Problem, bound: Bound) -> float | None:
    """What the verifier says to the certificate of a bound, in a plan without instructions."""
    schedule = problem.schedule([[] for _ in problem.cap])
    limits = None if priced.limits is None else tuple(priced.limits)
    planner = {"decoupled": priced.planner.decoupled}
    plan = Plan(schedule, *[float(bound)] * 3, 0.0, priced.prices.digest(), limits, planner)
    return certify(plan, bound, priced.prices).certified_bound


@pytest.mark.search
def test_bounds_are_not_above_the_optimum_of_exhaustive_search():
    met = 0
    for priced, problem in tiny_problems(80):
        optimum, bound = best_of_all(problem, priced.prices), lower_bound(problem)
        assert bound <= optimum + 1e-9, (priced, problem.dead)
        assert proven_of(priced, problem, bound) == bound
        for rule, *place in itertools.chain(
            (("load", r) for r in range(problem.shape.ranks)),
            (("lane", s) for s in range(problem.shape.stages)),
            (("detour", *ranks) for ranks in itertools.product(range(problem.shape.ranks), repeat=2)),
        ):
            false = Bound.of_rule(optimum * (1 + 1e-6), False, rule, *place)
            assert proven_of(priced, problem, false) is None
        met += bound > optimum - 1e-9
    assert met > 74


@needs_ortools
@pytest.mark.search
@pytest.mark.process
def test_bounds_are_not_above_the_periods_that_cp_sat_finds():
    met = 0
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        for seed in range(24):
            priced, dead = cp_sat.small_job(random.Random(seed), 2)
            problem = Problem.from_job(priced, dead)
            answer = pool.submit(cp_sat.solve, problem, 1.0, 1).result()
            if answer.order is None:
                continue
            best, bound = cp_sat.valid_period(priced, problem, answer.order), lower_bound(problem)
            solved = time_indexed.solve(problem, schedule_by_policy(problem), bound, 1.0)
            assert max(bound, solved.bound) <= best + 1e-6, f"seed {seed}: {priced}, dead {sorted(problem.dead)}"
            met += max(bound, solved.bound) > best - problem.grain - 1e-6
    assert met > 13


def test_bound_rises_during_a_search_and_ends_it_once_it_is_met():
    problem = Problem.from_job(worked_example(4), [DEAD])
    rising = list(rising_bounds(problem))
    assert rising == sorted(rising)
    assert (rising[0], rising[-1]) == (closed_form(problem), lower_bound(problem)) == (28.0, 29.0)
    with RisingBound(problem, Deadline(None)) as bound:
        assert not bound.is_set()
        bound.report_period(29.0)
        end = time.monotonic() + 10
        while not bound.is_set() and time.monotonic() < end:
            time.sleep(0.005)
        assert bound.is_set()
        assert bound.until(Deadline(60.0)).is_over
        assert bound.until(Deadline(None)).is_over
    assert bound.value == 29.0


def test_bound_that_is_computed_first_is_known_at_once():
    problem = Problem.from_job(worked_example(4), [DEAD])
    with RisingBound(problem, Deadline(None), is_first=True) as bound:
        assert bound.value == 29.0
        bound.report_period(30.0)
        assert not bound.is_set()
        bound.report_period(29.0)
        assert bound.is_set()


def test_stop_of_the_deadline_stops_search_and_bound():
    stop = threading.Event()
    stop.set()
    problem = Problem.from_job(job(16, 16, 64, 16), [Worker(1, 4)])
    with RisingBound(problem, Deadline(None, stop)) as bound:
        assert bound.is_set()
    assert bound.value == closed_form(problem)


def test_error_in_the_thread_of_the_bound_is_raised_at_its_end(monkeypatch):
    def broken(problem, deadline):
        raise ZeroDivisionError("in the thread")

    monkeypatch.setattr(bounds, "rising_bounds", broken)
    problem = Problem.from_job(job(1, 2, 2))
    with pytest.raises(ZeroDivisionError, match="in the thread"), RisingBound(problem, Deadline(None)):
        pass
