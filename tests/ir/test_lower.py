"""Lowering: the instructions that it adds, that they cost nothing, and that the order stays safe."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recycle import Profile, Schedule, Shape, lower, simulate
from recycle.ir.columns import compute_order
from recycle.ir.dependencies import dependencies, tie_groups
from recycle.ir.event_graph import durations, earliest, event_graph, group_edges, topological_order
from recycle.ir.families import one_f_one_b
from tests.ir.random_schedules import random_schedule

bounded = settings(derandomize=True, max_examples=40, deadline=None, database=None)
randoms = st.randoms(use_true_random=False)


def test_send_follows_its_producer_and_receive_precedes_its_consumer() -> None:
    schedule = lower(one_f_one_b(Shape(1, 2, 2)))
    assert schedule.text() == {
        "0.0": "0F0.0 0SEND_F0.0@0.1 0F0.1 0SEND_F0.1@0.1 0RECV_B0.0@0.1 0B0.0 0RECV_B0.1@0.1 0B0.1 0REDUCE_GRAD 0STEP",
        "0.1": "1RECV_F0.0@0.0 1F0.0 1RECV_F0.1@0.0 1B0.0 1SEND_B0.0@0.0 1F0.1 1B0.1 1SEND_B0.1@0.0 1REDUCE_GRAD 1STEP",
    }


def test_a_re_routed_micro_batch_crosses_pipelines_and_comes_back() -> None:
    text = {"0.0": "0F0.0 0B0.0", "1.0": "0F1.0 0B1.0", "0.1": "1F0.0 1F1.0 1B1.0 1B0.0"}
    lowered = lower(Schedule.from_text(Shape(2, 2, 1), text, failed=["1.1"]))
    assert lowered.text() == {
        "0.0": "0F0.0 0SEND_F0.0@0.1 0RECV_B0.0@0.1 0B0.0 0REDUCE_GRAD 0STEP",
        "0.1": "1RECV_F0.0@0.0 1F0.0 1RECV_F1.0@1.0 1F1.0 1B1.0 1SEND_B1.0@1.0 1B0.0 1SEND_B0.0@0.0 1REDUCE_GRAD 1STEP",
        "1.0": "0F1.0 0SEND_F1.0@0.1 0RECV_B1.0@0.1 0B1.0 0REDUCE_GRAD 0STEP",
    }


def test_a_failed_worker_and_an_empty_schedule_are_lowered_too() -> None:
    assert lower(Schedule.from_text(Shape(1, 1, 1), {})).text() == {"0.0": "0REDUCE_GRAD 0STEP"}
    assert lower(Schedule.from_text(Shape(1, 1, 1), {}, failed=["0.0"])).text() == {}


@bounded
@given(randoms)
def test_lowering_twice_is_lowering_once(rng: random.Random) -> None:
    lowered = lower(random_schedule(rng))
    assert lower(lowered) == lowered


@bounded
@given(randoms, st.sampled_from([(1.0, 1.0, 1.0), (2.0, 3.0, 1.0), (0.7, 1.3, 0.4)]))
def test_without_link_time_lowering_never_lengthens_the_makespan(rng: random.Random, times: tuple[float, ...]) -> None:
    schedule, profile = random_schedule(rng), Profile.uniform(*times)
    graph = dependencies(schedule)
    before, after = compute_order(schedule.columns)
    source, target = np.concatenate([graph.source, before]), np.concatenate([graph.target, after])
    order = topological_order(source, target, graph.nodes)
    seconds = np.zeros(graph.nodes)
    seconds[: graph.rows] = durations(schedule, profile)
    start, _ = earliest(order, *group_edges(source, target, graph.nodes), seconds, np.zeros(graph.nodes))
    assert simulate(lower(schedule), profile).makespan == pytest.approx(float((start + seconds).max()))


@bounded
@given(randoms)
def test_a_lowered_order_is_safe_where_transfers_are_serialised(rng: random.Random) -> None:
    assert event_graph(lower(random_schedule(rng)), serialised=True).is_acyclic


def test_ties_that_share_a_stage_make_one_group() -> None:
    ties = [[5, 4], [0, 2], [1, 3], [2, 5], [6], [9, -1, 6]]
    assert tie_groups(8, tuple(map(tuple, ties))).tolist() == [0, 1, 0, 1, 0, 0, 2, 3]
