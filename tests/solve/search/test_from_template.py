import pytest

from recycle.job.shape import Worker
from recycle.solve.effort import Effort
from recycle.solve.problem import Problem
from recycle.solve.search import from_template
from recycle.solve.search.initial_orders import initial_orders
from tests.solve.jobs import job


@pytest.mark.search
def test_each_of_two_templates_is_searched_and_then_the_one_with_more_hope():
    problem = Problem.of(job(4, 4, 8, 4, chunks=2), [Worker(3, 2)])
    templates = list(initial_orders(problem, Effort(0.0)).templates)
    assert [one.assignment.slots for one in templates] == [8, 11]
    effort = Effort(0.0, steps=2_000)
    tried = from_template._search_templates(problem, templates, effort)
    assert [one.before.assignment.slots for one in tried] == [8, 11, 8]
    assert tried[2].before is tried[0].template
    for one in tried:
        assert one.template.beginning.best.period <= one.before.beginning.best.period
        assert one.template.unfolded.period <= one.before.unfolded.period
    assert 1_500 < effort.spent < 3_000
