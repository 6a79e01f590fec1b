import time

import pytest

from recycle.job.shape import Worker
from recycle.solve import bounds
from recycle.solve.bounds import RisingBound, closed_form, lower_bound, rising_bounds
from recycle.solve.effort import Deadline
from recycle.solve.problem import Problem
from tests.solve.jobs import DEAD, job, worked_example


class Stopped:
    def is_set(self):
        return True


def waited_for(is_true):
    """Whether something is so within ten seconds."""
    end = time.monotonic() + 10
    while not is_true() and time.monotonic() < end:
        time.sleep(0.005)
    return is_true()


def test_bounds_rise_from_the_closed_form_to_the_best():
    problem = Problem.of(worked_example(4), [DEAD])
    found = list(rising_bounds(problem))
    assert found == sorted(found)
    assert (found[0], found[-1]) == (closed_form(problem), lower_bound(problem)) == (28.0, 29.0)


def test_a_bound_beside_a_search_rises_to_the_best_and_ends_the_search_once_it_is_met():
    problem = Problem.of(worked_example(4), [DEAD])
    with RisingBound(problem, Deadline(None)) as bound:
        assert not bound.is_set()
        bound.found(29.0)
        assert waited_for(bound.is_set)
        assert bound.until(Deadline(60.0)).is_over
        assert bound.until(Deadline(None)).is_over
    assert bound.value == 29.0


def test_a_bound_that_comes_first_is_there_at_once_and_rises_no_more():
    problem = Problem.of(worked_example(4), [DEAD])
    with RisingBound(problem, Deadline(None), is_first=True) as bound:
        assert bound.value == 29.0
        bound.found(30.0)
        assert not bound.is_set()
        bound.found(29.0)
        bound.found(31.0)
        assert bound.is_set()


def test_who_stops_the_deadline_stops_the_search_and_the_bound():
    problem = Problem.of(job(16, 16, 64, 16), [Worker(1, 4)])
    with RisingBound(problem, Deadline(None, Stopped())) as bound:
        assert bound.is_set()
    assert bound.value == closed_form(problem)


def test_what_goes_wrong_beside_a_search_is_raised_at_its_end(monkeypatch):
    def broken(problem, deadline):
        raise ZeroDivisionError("in the thread")

    monkeypatch.setattr(bounds, "rising_bounds", broken)
    with pytest.raises(ZeroDivisionError, match="in the thread"), RisingBound(Problem.of(job(1, 2, 2)), Deadline(None)):
        pass
