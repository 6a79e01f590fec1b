"""Slack: an instruction may start that much later, and not a bit more, before the iteration takes longer."""

from __future__ import annotations

import random

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from recycle import simulate
from recycle.ir.event_graph import earliest, event_graph
from recycle.ir.simulate import slack
from tests.ir.random_schedules import random_profile, random_schedule


@settings(derandomize=True, max_examples=40, deadline=None, database=None)
@given(st.integers(0, 10**6))
def test_starting_so_much_later_costs_nothing_and_more_costs_as_much(seed: int) -> None:
    rng = random.Random(seed)
    schedule = random_schedule(rng)
    timeline = simulate(schedule, random_profile(rng, schedule))
    free = slack(timeline)
    graph = event_graph(timeline.schedule)
    seconds = np.zeros(graph.dependencies.nodes)
    seconds[: len(free)] = timeline.end - timeline.start
    for row in rng.sample(range(len(free)), min(5, len(free))):
        for later, expected in ((free[row], 0.0), (free[row] + 1.0, 1.0)):
            release = np.zeros(len(seconds))
            release[row] = timeline.start[row] + later
            start, _ = earliest(graph.order, graph.offsets, graph.sources, seconds, release)
            assert np.isclose((start + seconds).max() - timeline.end.max(), expected, atol=1e-9)
