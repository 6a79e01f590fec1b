"""Statistics of a range: work and bubbles are all of the time, and the whole range is the timeline."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recycle import Schedule, Shape, Timeline, simulate
from recycle.ir.families import one_f_one_b
from recycle.ir.gaps import GapCause
from recycle.ir.instruction import Forward
from tests.ir.random_schedules import random_profile, random_schedule
from viz.analysis.bubbles import range_statistics


@settings(derandomize=True, max_examples=30, deadline=None, database=None)
@given(st.integers(0, 10**6))
def test_work_and_bubbles_fill_every_range(seed: int) -> None:
    rng = random.Random(seed)
    schedule = random_schedule(rng)
    timeline = simulate(schedule, random_profile(rng, schedule))
    begin, end = sorted((rng.uniform(-1, timeline.makespan), rng.uniform(0, timeline.makespan + 1)))
    found = range_statistics(timeline, timeline.gaps(), begin, end)
    assert sum(found.work.values()) + sum(found.bubbles.values()) == pytest.approx(found.total)
    whole = range_statistics(timeline, timeline.gaps(), 0, timeline.makespan)
    assert sum(whole.work.values()) == pytest.approx(sum(busy for busy in timeline.busy if busy is not None))


def test_the_warm_up_of_1f1b(broken_timeline: Timeline, broken: Schedule) -> None:
    timeline = simulate(one_f_one_b(Shape(1, 2, 3)))
    found = range_statistics(timeline, timeline.gaps(), 2, 0)  # ends in either order
    assert (found.work, found.bubbles) == ({Forward.kind: 3.0}, {GapCause.INPUT: 1.0})
    assert found.operations == 3
    assert found.share(found.work[Forward.kind]) == 0.75


def test_re_routed_work_is_counted_and_the_dead_are_not(broken_timeline: Timeline) -> None:
    found = range_statistics(broken_timeline, broken_timeline.gaps(), 0, broken_timeline.makespan)
    assert found.workers == 5
    assert found.rerouted == 6.0
