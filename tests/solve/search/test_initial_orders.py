import pytest

from recycle.job.shape import Worker
from recycle.solve.effort import Effort
from recycle.solve.problem import Problem
from recycle.solve.search.initial_orders import ALL_POLICIES, initial_orders
from tests.solve.jobs import job


def begun(made, dead, most):
    return initial_orders(Problem.of(made, [Worker(*one) for one in dead]), Effort(0.0), most)


@pytest.mark.slow
def test_stages_with_unlike_numbers_of_dead_meet_their_bound_when_dealt_by_load():
    per_stage = {key: [1.0, 3.0] for key in ("forward", "backward_input", "backward_weight")}
    assert begun(job(4, 2, 12, **per_stage), [(0, 0), (2, 0), (2, 1)], ALL_POLICIES).best.period == 144
