import itertools

import pytest

from recycle.ir.check import check
from recycle.ir.simulate import simulate
from recycle.job.shape import Worker
from recycle.solve.assignment import at_home
from recycle.solve.deadline import Deadline
from recycle.solve.effort import STEPS_OF_ORDER, Effort
from recycle.solve.problem import Problem
from recycle.solve.search.building_blocks import block_orders
from recycle.solve.search.initial_orders import best_of_portfolio
from recycle.solve.search.timing import time_order
from recycle.solve.search.waves import best_wave, wave_orders
from tests.solve.jobs import job


def home(problem):
    return [at_home(problem).ravel()]


@pytest.mark.parametrize("decoupled", [True, False])
@pytest.mark.parametrize(("chunks", "limit", "stash"), [(1, 3, 0.5), (2, 2, 1.0), (2, 4, 0.0), (3, 4, 0.5)])
def test_waves_are_schedules_without_findings_within_the_caps(chunks, limit, stash, decoupled):
    times = {"forward": [1.0, 1.3, 0.6] * chunks, "backward_weight": [0.5, 1.0, 1.4] * chunks, "link": 0.2}
    made = job(1, 3, 5, limit, chunks=chunks, weight_stash=stash, decoupled=decoupled, **times)
    problem = Problem.of(made)
    found = list(itertools.islice(wave_orders(problem, home(problem)), 60))
    assert len({one.period for one in found}) > 1
    for one in found:
        schedule = problem.schedule(one.order)
        assert check(schedule, profile=made.profile(), limits=made.activation_limits()) == []
        assert simulate(schedule, made.profile()).period <= one.period + 1e-9


@pytest.mark.slow
def test_with_little_memory_and_unlike_stages_waves_beat_blocks_and_list_scheduling():
    draw = [1.3, 0.7, 1.0, 1.6, 0.9, 1.2, 0.6, 1.4, 1.1, 0.8, 1.5, 1.0]
    times = {"forward": draw, "backward_input": draw[3:] + draw[:3], "backward_weight": draw[5:] + draw[:5]}
    problem = Problem.of(job(1, 6, 24, 7, chunks=2, **times))
    listed = best_of_portfolio(problem, Effort(0.0))[0].period
    blocks = itertools.islice(block_orders(problem, steps=300), 24)
    repeated = min(time_order(problem, order).period for order, *_ in blocks if order is not None)
    waves = best_wave(problem, Effort(0.0, steps=400 * STEPS_OF_ORDER))
    assert waves.period < 0.97 * min(listed, repeated)


def test_the_search_of_waves_ends_at_the_bound_at_its_number_of_orders_and_at_the_deadline():
    problem = Problem.of(job(1, 4, 8, 8, chunks=2))
    first = next(wave_orders(problem, home(problem)))
    assert best_wave(problem, Effort(first.period)) == first
    effort = Effort(0.0, steps=7 * STEPS_OF_ORDER)
    best_wave(problem, effort)
    assert effort.spent == 7 * STEPS_OF_ORDER
    assert best_wave(problem, Effort(0.0, Deadline(0.0))) == first


def test_the_same_seed_gives_the_same_waves():
    problem = Problem.of(job(1, 3, 6, 4, chunks=2))

    def periods(seed):
        return [one.period for one in itertools.islice(wave_orders(problem, home(problem), seed), 150)]

    assert periods(0) == periods(0) != periods(1)


@pytest.mark.slow
def test_waves_of_all_pipelines_find_hosts_for_the_micro_batches_of_dead_workers():
    made = job(4, 4, 12, 5, chunks=2)
    problem = Problem.of(made, [Worker(0, 1), Worker(2, 3)])
    waves = best_wave(problem, Effort(0.0, steps=200 * STEPS_OF_ORDER))
    schedule = problem.schedule(waves.order)
    assert check(schedule, profile=made.profile(), limits=made.activation_limits()) == []
    assert simulate(schedule, made.profile()).period == waves.period
    assert waves.period < best_of_portfolio(problem, Effort(0.0))[0].period
