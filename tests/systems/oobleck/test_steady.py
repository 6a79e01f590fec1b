"""Ends of any number of micro-batches from those of a few."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recycle import Profile, Shape
from recycle.ir.families import one_f_one_b
from recycle.systems.oobleck.steady import SETTLED, ends
from recycle.systems.sync import computed

times = st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=5)


@settings(derandomize=True, max_examples=60, deadline=None, database=None)
@given(times, st.sampled_from([0.0, 0.5, 3.0]), st.integers(1, 40))
def test_they_are_those_of_the_simulation(stages: list[tuple[int, int]], latency: float, more: int) -> None:
    profile = Profile([float(f) for f, _ in stages], [float(b) for _, b in stages], 0.0, latency=latency)

    def simulated(micro_batches: int) -> list[float]:
        return [end for end, _ in computed(one_f_one_b(Shape(1, len(stages), micro_batches)), profile)]

    count = SETTLED * len(stages) + more
    assert ends(simulated, max(f + b for f, b in stages), count) == pytest.approx(simulated(count))


def test_many_micro_batches_cost_no_more_than_a_few() -> None:
    asked = []

    def simulated(micro_batches: int) -> list[float]:
        asked.append(micro_batches)
        profile = Profile([1.0, 2.0], [2.0, 4.0], 0.0)
        return [end for end, _ in computed(one_f_one_b(Shape(1, 2, micro_batches)), profile)]

    assert ends(simulated, 6.0, 10_000) == [3 + 60_000, 60_001]
    assert max(asked) == SETTLED * 2
