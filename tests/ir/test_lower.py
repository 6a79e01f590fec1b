"""Lowering: what it writes, that it costs nothing, and that it never makes an order unsafe."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recycle import Profile, Schedule, Shape, Worker, lower, simulate
from recycle.ir.columns import compute_order
from recycle.ir.dependencies import dependencies
from recycle.ir.event_graph import durations, earliest, event_graph, group_edges, topological_order
from recycle.ir.families import one_f_one_b
from recycle.ir.lower import lower_with_origin
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


def test_neighbours_on_one_worker_hand_over_without_a_transfer() -> None:
    text = {"0.0": "0F0 3F0 3B0 0B0", "0.1": "1F0 2F0 2B0 1B0"}
    lowered = lower(Schedule.from_text(Shape(1, 2, 1, 2), text, placement={"0.0": [0, 3], "0.1": [1, 2]}))
    assert lowered.text()["0.1"].startswith("1RECV_F0.0@0.0 1F0.0 2F0.0 2SEND_F0.0@0.0 2RECV_B0.0@0.0 2B0.0 1B0.0 ")


def test_reduces_come_last_stage_first_and_all_before_the_steps() -> None:
    lowered = lower(Schedule.from_text(Shape(1, 1, 1, 2), {"0.0": "0F0 1F0 1B0 0B0"}))
    assert lowered.text()["0.0"].split()[4:] == ["1REDUCE_GRAD", "0REDUCE_GRAD", "1STEP", "0STEP"]


def test_only_what_is_left_out_is_added() -> None:
    text = {"0.0": "0F0 0SEND_F0@0.1 0RECV_B0@0.1 0B0", "0.1": "1RECV_F0@0.0 1F0 1B0 1SEND_B0@0.0"}
    lowered = lower(Schedule.from_text(Shape(1, 2, 1), text)).text()
    assert lowered["0.0"] == "0F0.0 0SEND_F0.0@0.1 0RECV_B0.0@0.1 0B0.0 0REDUCE_GRAD 0STEP"


def test_a_failed_worker_and_an_empty_schedule_are_lowered_too() -> None:
    assert lower(Schedule.from_text(Shape(1, 1, 1), {})).text() == {"0.0": "0REDUCE_GRAD 0STEP"}
    assert lower(Schedule.from_text(Shape(1, 1, 1), {}, failed=["0.0"])).text() == {}


def test_origin_names_the_row_that_each_row_came_from() -> None:
    schedule = one_f_one_b(Shape(2, 3, 4))
    lowered, origin = lower_with_origin(schedule)
    kept = np.flatnonzero(origin >= 0)
    assert sorted(origin[kept].tolist()) == list(range(len(schedule.columns)))
    assert all(lowered.instruction(row) == schedule.instruction(int(origin[row])) for row in kept.tolist())


def test_a_receive_stays_before_its_consumer_in_an_order_that_deadlocks() -> None:
    lowered = lower(Schedule.from_text(Shape(1, 2, 2), {"0.0": "0F0 0B0 0F1 0B1", "0.1": "1F1 1F0 1B0 1B1"}))
    program = [str(i) for i in lowered.program(Worker(0, 0))]
    assert program.index("0RECV_B0.0@0.1") < program.index("0B0.0")


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
