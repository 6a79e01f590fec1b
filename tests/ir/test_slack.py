"""Slack: an instruction may start that much later, and not a bit more, before the iteration takes longer."""

from __future__ import annotations

import random

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from recycle import Profile, Shape, simulate
from recycle.ir.event_graph import event_graph
from recycle.ir.families import one_f_one_b
from recycle.ir.graph import earliest
from recycle.ir.slack import slack
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


def test_of_1f1b_the_first_pipeline_stage_is_critical_throughout() -> None:
    timeline = simulate(one_f_one_b(Shape(1, 2, 3)), Profile.uniform(forward=1, backward_input=1, backward_weight=1))
    found = slack(timeline)
    assert found[timeline.critical_path].max() == 0.0
    free = {str(timeline.schedule.instruction(row)): s for row, s in enumerate(found) if s > 1e-9}
    assert free["0F0.1"] == 2.0
    assert "1B0.2" not in free
