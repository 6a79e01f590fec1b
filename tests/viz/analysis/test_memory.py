"""The memory curve agrees with the simulator's peaks, and drawing fewer points never loses its peak."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recycle import Shape, simulate
from recycle.ir.families import one_f_one_b
from tests.ir.random_schedules import random_profile, random_schedule
from viz.analysis.memory import MemoryCurve, memory_curve, sampled


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


def test_fewer_points_keep_the_peak_and_stay_within_four_a_pixel() -> None:
    rng = np.random.default_rng(0)
    held = rng.uniform(0, 5, 10_000)
    held[7_777] = 9.0
    curve = MemoryCurve(np.arange(10_000.0), held, np.arange(10_000))
    time, drawn = sampled(curve, 0.0, 10_000.0, 100)
    assert len(time) <= 401
    assert (np.diff(time) >= 0).all()
    assert drawn.max() == 9.0
    assert drawn.min() == held.min()


def test_a_window_begins_with_what_is_held_then() -> None:
    curve = memory_curve(simulate(one_f_one_b(Shape(1, 3, 4))), 0)
    time, held = sampled(curve, 2.5, 6.5, 50)
    assert (time[0], held[0], time[-1]) == (2.5, 3.0, 6.5)
