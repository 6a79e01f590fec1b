import itertools

import pytest

from recycle.ir.check import check
from recycle.ir.simulate import simulate
from recycle.solve.assignment import at_home
from recycle.solve.effort import STEPS_OF_ORDER, Deadline, Effort
from recycle.solve.problem import Problem
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


def test_the_search_of_waves_ends_at_the_bound_at_its_number_of_orders_and_at_the_deadline():
    problem = Problem.of(job(1, 4, 8, 8, chunks=2))
    first = next(wave_orders(problem, home(problem)))
    assert best_wave(problem, Effort(first.period)) == first
    effort = Effort(0.0, steps=7 * STEPS_OF_ORDER)
    best_wave(problem, effort)
    assert effort.spent == 7 * STEPS_OF_ORDER
    assert best_wave(problem, Effort(0.0, Deadline(0.0))) == first
