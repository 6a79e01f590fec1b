"""Lowering: the instructions that it adds, that they cost nothing, and that the order stays safe."""

import pytest
from hypothesis import given, settings, strategies as st

from recycle import Profile, Schedule, Shape, lower, simulate
from recycle.ir.dependencies import tie_groups
from recycle.ir.event_graph import event_graph
from recycle.ir.families import one_f_one_b
from recycle.ir.simulate import time_graph
from tests.ir.random_schedules import random_schedule


def test_send_follows_its_producer_and_receive_precedes_its_consumer():
    schedule = lower(one_f_one_b(Shape(1, 2, 2)))
    assert schedule.text() == {
        "0.0": "0F0.0 0SEND_F0.0@0.1 0F0.1 0SEND_F0.1@0.1 0RECV_B0.0@0.1 0B0.0 0RECV_B0.1@0.1 0B0.1 0REDUCE_GRAD 0STEP",
        "0.1": "1RECV_F0.0@0.0 1F0.0 1RECV_F0.1@0.0 1B0.0 1SEND_B0.0@0.0 1F0.1 1B0.1 1SEND_B0.1@0.0 1REDUCE_GRAD 1STEP",
    }


def test_a_re_routed_micro_batch_crosses_pipelines_and_comes_back():
    text = {"0.0": "0F0.0 0B0.0", "1.0": "0F1.0 0B1.0", "0.1": "1F0.0 1F1.0 1B1.0 1B0.0"}
    lowered = lower(Schedule.from_text(Shape(2, 2, 1), text, failed=["1.1"]))
    assert lowered.text() == {
        "0.0": "0F0.0 0SEND_F0.0@0.1 0RECV_B0.0@0.1 0B0.0 0REDUCE_GRAD 0STEP",
        "0.1": "1RECV_F0.0@0.0 1F0.0 1RECV_F1.0@1.0 1F1.0 1B1.0 1SEND_B1.0@1.0 1B0.0 1SEND_B0.0@0.0 1REDUCE_GRAD 1STEP",
        "1.0": "0F1.0 0SEND_F1.0@0.1 0RECV_B1.0@0.1 0B1.0 0REDUCE_GRAD 0STEP",
    }


def test_a_failed_worker_and_an_empty_schedule_are_lowered_too():
    assert lower(Schedule.from_text(Shape(1, 1, 1), {})).text() == {"0.0": "0REDUCE_GRAD 0STEP"}
    assert lower(Schedule.from_text(Shape(1, 1, 1), {}, failed=["0.0"])).text() == {}


@settings(max_examples=80)
@given(st.randoms(use_true_random=False), st.sampled_from([(1.0, 1.0, 1.0), (2.0, 3.0, 1.0), (0.7, 1.3, 0.4)]))
def test_lowering_is_idempotent_keeps_the_makespan_and_is_safe_on_serialised_transports(rng, times):
    schedule, profile = random_schedule(rng), Profile.uniform(*times)
    lowered = lower(schedule)
    assert lower(lowered) == lowered
    assert event_graph(lowered, serialised=True).is_acyclic
    without_transfers = time_graph(event_graph(schedule), profile)
    assert simulate(lowered, profile).makespan == pytest.approx(without_transfers.makespan)


def test_ties_that_share_a_stage_make_one_group():
    ties = [[5, 4], [0, 2], [1, 3], [2, 5], [6], [9, -1, 6]]
    assert tie_groups(8, tuple(map(tuple, ties))).tolist() == [0, 1, 0, 1, 0, 0, 2, 3]
