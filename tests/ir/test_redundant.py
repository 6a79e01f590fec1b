"""Redundant forwards: an instruction that costs time and memory, needs its input, and counts for nothing."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recycle import MicroBatch, Profile, Schedule, Shape, check, lower, simulate
from recycle.ir.instruction import (
    Backward,
    BackwardInput,
    BackwardWeight,
    Compute,
    Forward,
    OverlappedPair,
    RedundantForward,
)
from tests.ir.random_schedules import random_profile, random_schedule, with_redundancy
from tests.ir.reference_runtime import growth

bounded = settings(derandomize=True, max_examples=60, deadline=None, database=None)

SHAPE = Shape(1, 3, 2)
COPIES = {"0.0": [0, 1], "0.1": [1, 2]}
PROGRAMS = {
    "0.0": "0F0.0 0F0.1 1R0.0 0B0.0 1R0.1 0B0.1",
    "0.1": "1F0.0 1F0.1 2R0.0 1B0.0 2R0.1 1B0.1",
    "0.2": "2F0.0 2B0.0 2F0.1 2B0.1",
}


def schedule(**programs: str) -> Schedule:
    return Schedule.from_text(SHAPE, PROGRAMS | programs, placement=COPIES, optimizer="barrier")


def test_it_takes_its_time_and_no_more() -> None:
    """The last stage makes the first gradient at 3, worker 0.1 has it at 5 without redundant work, at 6 with it."""
    timeline = simulate(lower(schedule()), Profile.uniform(backward_weight=1))
    assert timeline.makespan == timeline.period == 12
    assert simulate(lower(schedule()), Profile(redundant_forward=0.0)).makespan == 12
    assert timeline.busy == [8, 8, 6]
    assert simulate(lower(schedule()), Profile(redundant_forward=[9, 2.0, 3.0])).busy == [10, 12, 6]
    assert simulate(lower(schedule()), Profile(speed={"0.1": 2.0})).busy == [8, 16, 6]


def test_nothing_is_sent_for_it_and_both_hosts_of_a_copy_reduce_and_step() -> None:
    lowered = lower(schedule())
    assert check(schedule()) == check(lowered) == []
    assert lowered.text()["0.0"] == (
        "0F0.0 0SEND_F0.0@0.1 0F0.1 0SEND_F0.1@0.1 1R0.0 0RECV_B0.0@0.1 0B0.0 1R0.1 0RECV_B0.1@0.1 0B0.1"
        " 1REDUCE_GRAD 0REDUCE_GRAD 1STEP 0STEP"
    )
    assert Schedule.from_text(SHAPE, lowered.text(), placement=COPIES, optimizer="barrier") == lowered


def test_its_input_is_made_by_its_own_worker() -> None:
    shape = Shape(2, 2, 1)
    programs = {"0.0": "0F0.0 1R1.0 0B0.0", "1.0": "0F1.0 0B1.0", "0.1": "1F0.0 1B0.0", "1.1": "1F1.0 1B1.0"}
    found = check(Schedule.from_text(shape, programs, placement={"0.0": [0, 1]}))
    assert [(f.rule, f.instruction) for f in found] == [("redundant", "1R1.0")]
    assert "made on another worker" in found[0].message


def test_it_stands_in_for_no_forward_that_is_missing() -> None:
    findings = check(schedule(**{"0.2": "2F0.0 2B0.0"}))
    assert [f.rule for f in findings] == ["missing"]
    assert "stage 2 does not run micro-batch 0.1" in findings[0].message


@pytest.mark.slow
@bounded
@given(st.randoms(use_true_random=False))
def test_random_ones_pass_check_read_back_and_take_the_time_of_a_slow_runtime(rng: random.Random) -> None:
    made = with_redundancy(rng, random_schedule(rng))
    assert check(made) == check(lower(made), about_to_run=True) == []
    for one in (made, lower(made)):
        read = Schedule.from_text(
            one.shape, one.text(), placement=one.placement, failed=one.failed, optimizer=one.optimizer
        )
        assert read == one
    profile = random_profile(rng, made)
    timeline = simulate(lower(made), profile)
    end, period = growth(made, profile, iterations=36, window=12)
    assert timeline.makespan == pytest.approx(end)
    assert timeline.period == pytest.approx(period, rel=1e-6)


@bounded
@given(st.randoms(use_true_random=False))
def test_random_ones_hold_what_a_count_by_hand_says(rng: random.Random) -> None:
    made = with_redundancy(rng, random_schedule(rng))
    stages = made.shape.stages
    weights = [float(2**s) for s in range(stages)]
    share, stash = rng.choice([0.0, 0.5, 1.0]), rng.choice([0.0, 0.5, 1.0])
    profile = Profile(activation=weights, weight_stash=share, redundant_stash=stash)
    peaks = simulate(lower(made), profile).peak_bytes
    for worker, peak in zip(made.shape.workers(), peaks, strict=True):
        held: dict[tuple[int, MicroBatch, str], float] = {}
        most = 0.0
        for one in made.program(worker):
            parts = [one.forward, one.backward] if isinstance(one, OverlappedPair) else [one]
            for piece in parts:
                assert isinstance(piece, Compute)
                if isinstance(piece, Forward | RedundantForward):
                    held[piece.stage, piece.micro_batch, piece.token] = weights[piece.stage]
            most = max(most, sum(held.values()))
            for piece in parts:
                assert isinstance(piece, Compute)
                mine, copy = (piece.stage, piece.micro_batch, "F"), (piece.stage + 1, piece.micro_batch, "R")
                if isinstance(piece, RedundantForward):
                    held[piece.stage, piece.micro_batch, "R"] *= stash
                if isinstance(piece, Backward | BackwardInput):
                    held.pop(copy, None)
                if isinstance(piece, BackwardInput):
                    held[mine] *= share
                if isinstance(piece, Backward | BackwardWeight):
                    del held[mine]
        assert worker in made.failed if peak is None else peak == pytest.approx(most)
