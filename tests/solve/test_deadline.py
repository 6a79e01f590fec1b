import threading

import pytest

from recycle.solve import effort
from recycle.solve.effort import Deadline, Pace


@pytest.fixture
def clock(monkeypatch):
    """A clock that tests set: `clock[0]` is the time in seconds."""
    now = [100.0]
    monkeypatch.setattr(effort.time, "monotonic", lambda: now[0])
    return now


def test_parts_and_earlier_deadlines_count_from_now(clock):
    whole = Deadline(10.0)
    clock[0] += 2.0
    assert (whole.left, whole.part(0.5).left, whole.earlier(3.0).left) == (8.0, 4.0, 5.0)
    assert Deadline(None).earlier(3.0).left == float("inf")


def test_a_loop_ends_before_a_step_that_would_not_fit(clock):
    pace, steps = Pace(Deadline(10.0)), 0
    while not pace.is_over():
        clock[0] += 3.0
        steps += 1
    assert (steps, clock[0]) == (3, 109.0)


def test_a_stop_ends_what_has_no_limit():
    stop = threading.Event()
    pace = Pace(Deadline(None, stop).earlier(5.0))
    assert not pace.is_over()
    stop.set()
    assert pace.is_over()
