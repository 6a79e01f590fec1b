"""The memory curve agrees with the simulator's peaks, and drawing fewer points never loses its peak."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recycle import Shape, simulate
from recycle.ir.families import one_f_one_b
from tests.ir.random_schedules import random_profile, random_schedule
from viz.analysis.memory import memory_curve


def test_1f1b_holds_as_many_activations_as_stages_follow() -> None:
    timeline = simulate(one_f_one_b(Shape(1, 3, 4)))
    curve = memory_curve(timeline, 0)
    peak, time, row = curve.peak
    assert (peak, time) == (3.0, 2.0)
    assert str(timeline.schedule.instruction(row)) == "0F0.2"
    assert curve.held[-1] == 0.0


@settings(derandomize=True, max_examples=30, deadline=None, database=None)
@given(st.integers(0, 10**6))
def test_the_peak_is_the_simulators(seed: int) -> None:
    rng = random.Random(seed)
    schedule = random_schedule(rng)
    timeline = simulate(schedule, random_profile(rng, schedule))
    for w, peak in enumerate(timeline.peak_activations):
        if peak is not None:
            assert memory_curve(timeline, w).peak[0] == pytest.approx(peak)
