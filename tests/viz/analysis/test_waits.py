"""Inputs and outputs of an instruction: who makes them, what carries them, and which one decided."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from recycle import Profile, Shape, Timeline, simulate
from recycle.ir.dependencies import Cause
from recycle.ir.families import one_f_one_b
from recycle.ir.instruction import Transfer, is_kind
from tests.ir.random_schedules import random_profile, random_schedule
from viz.analysis.waits import Waits, name


def row_of(timeline: Timeline, text: str) -> int:
    return next(row for row, word in enumerate(timeline.schedule.words()) if word == text)


def test_a_value_from_another_worker_is_told_with_its_maker_and_its_carrier() -> None:
    timeline = simulate(one_f_one_b(Shape(1, 2, 2)), Profile.uniform(link=0.5))
    waits = Waits(timeline)
    (need, *others), total = waits.inputs(row_of(timeline, "0B0.0"))
    assert total == 3
    assert name(timeline, need.row) == "1B0.0 on 0.1"
    assert (need.made, need.arrived, need.slack) == (4.5, 5.0, 0.0)
    assert str(timeline.schedule.instruction(need.carrier)) == "1SEND_B0.0@0.0"
    assert [(name(timeline, other.row), other.cause) for other in others] == [
        ("0F0.1 on 0.0", Cause.ORDER),
        ("0F0.0 on 0.0", Cause.DATA),
    ]
    assert waits.reason(row_of(timeline, "0B0.0")) == "Waited for 1B0.0 on 0.1 (its value), ended 4.5, arrived 5"
    assert waits.reason(0) == "It needs nothing: it starts when the iteration does."


def test_a_reduce_waits_for_the_last_of_all_hosts() -> None:
    timeline = simulate(one_f_one_b(Shape(3, 2, 2)), Profile.uniform(step=0.5))
    reduce = row_of(timeline, "0REDUCE_GRAD")
    needs, total = Waits(timeline).inputs(reduce, most=2)
    assert len(needs) == 2
    assert total > 6
    assert all(need.cause in (Cause.REDUCE, Cause.ORDER) for need in needs)


def test_outputs_are_found_through_transfers() -> None:
    timeline = simulate(one_f_one_b(Shape(1, 2, 2)), Profile.uniform(link=0.5))
    uses = Waits(timeline).outputs(row_of(timeline, "0F0.0"))
    assert [(name(timeline, use.row), use.slack) for use in uses] == [
        ("1F0.0 on 0.1", 0.0),
        ("0B0.0 on 0.0", 4.0),
    ]


@settings(derandomize=True, max_examples=30, deadline=None, database=None)
@given(st.integers(0, 10**6))
def test_inputs_and_outputs_are_each_others_reverse_and_the_decisive_input_has_no_slack(seed: int) -> None:
    rng = random.Random(seed)
    schedule = random_schedule(rng)
    timeline = simulate(schedule, random_profile(rng, schedule))
    waits, kind = Waits(timeline), timeline.schedule.columns.kind
    for row in rng.sample(range(len(kind)), min(6, len(kind))):
        if is_kind(kind[row], Transfer):
            continue
        for use in waits.outputs(row, 10**6):
            needs, _ = waits.inputs(use.row, 10**6)
            assert row in {need.row for need in needs}
        if timeline.start[row] > 0:
            (decided,), _ = waits.inputs(row, 1)
            assert decided.slack <= timeline.makespan * 1e-9
