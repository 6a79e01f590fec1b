"""Lowering: what it writes, that it costs nothing, and that it never makes an order unsafe.

The one rule of what needs what: for single instructions, for whole schedules, and into the next iteration.
"""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recycle import MicroBatch, Profile, Schedule, Shape, lower, simulate
from recycle.ir.columns import compute_order
from recycle.ir.dependencies import Dependencies, ValueKind, Why, dependencies, needs, tie_groups
from recycle.ir.event_graph import durations, earliest, event_graph, group_edges, topological_order
from recycle.ir.families import one_f_one_b
from recycle.ir.instruction import parse_instruction
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


def test_a_failed_worker_and_an_empty_schedule_are_lowered_too() -> None:
    assert lower(Schedule.from_text(Shape(1, 1, 1), {})).text() == {"0.0": "0REDUCE_GRAD 0STEP"}
    assert lower(Schedule.from_text(Shape(1, 1, 1), {}, failed=["0.0"])).text() == {}


def test_origin_names_the_row_that_each_row_came_from() -> None:
    schedule = one_f_one_b(Shape(2, 3, 4))
    lowered, origin = lower_with_origin(schedule)
    kept = np.flatnonzero(origin >= 0)
    assert sorted(origin[kept].tolist()) == list(range(len(schedule.columns)))
    assert all(lowered.instruction(row) == schedule.instruction(int(origin[row])) for row in kept.tolist())


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


A, G = ValueKind.ACTIVATION, ValueKind.INPUT_GRADIENT


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0F0.1", set()), ("1F0.1", {(A, 0)}), ("2B0.1", {(A, 2)}), ("1B0.1", {(A, 1), (G, 2)}),
        ("0I0.1", {(A, 0), (G, 1)}), ("1W0.1", {(G, 1)}), ("1SEND_F0.1@0.2", {(A, 1)}), ("1SEND_B0.1@0.0", {(G, 1)}),
        ("1RECV_F0.1@0.0", {(A, 0)}), ("1RECV_B0.1@0.2", {(G, 2)}), ("1REDUCE_GRAD", set()), ("1STEP", set()),
        ("(1F0.1;2B0.1)", {(A, 0), (A, 2)}),
    ],
)  # fmt: skip
def test_an_instruction_needs_these_values_of_its_micro_batch(text: str, expected: set[tuple[int, int]]) -> None:
    found = needs(parse_instruction(text), stages=3)
    assert {(value.kind, value.stage) for value in found} == expected
    assert all(value.micro_batch == MicroBatch(0, 1) for value in found)


def edges(schedule: Schedule, graph: Dependencies) -> set[tuple[str, str]]:
    """Edges between rows as `instruction of worker` pairs."""
    name = [f"{schedule.instruction(row)} {schedule.position(row)[0]}" for row in range(graph.rows)]
    rows = (graph.source < graph.rows) & (graph.target < graph.rows)
    return {(name[a], name[b]) for a, b in zip(graph.source[rows], graph.target[rows], strict=True)}


def test_a_lowered_schedule_needs_its_transfers() -> None:
    schedule = Schedule.from_text(
        Shape(1, 2, 1),
        {"0.0": "0F0 0SEND_F0@0.1 0RECV_B0@0.1 0B0 0REDUCE_GRAD 0STEP",
         "0.1": "1RECV_F0@0.0 1F0 1B0 1SEND_B0@0.0 1REDUCE_GRAD 1STEP"},
    )  # fmt: skip
    graph = dependencies(schedule)
    assert edges(schedule, graph) == {
        ("0F0.0 0.0", "0SEND_F0.0@0.1 0.0"), ("0SEND_F0.0@0.1 0.0", "1RECV_F0.0@0.0 0.1"),
        ("1RECV_F0.0@0.0 0.1", "1F0.0 0.1"), ("1F0.0 0.1", "1B0.0 0.1"), ("1B0.0 0.1", "1SEND_B0.0@0.0 0.1"),
        ("1SEND_B0.0@0.0 0.1", "0RECV_B0.0@0.1 0.0"), ("0RECV_B0.0@0.1 0.0", "0B0.0 0.0"), ("0F0.0 0.0", "0B0.0 0.0"),
        ("0REDUCE_GRAD 0.0", "0STEP 0.0"), ("1REDUCE_GRAD 0.1", "1STEP 0.1"),
    }  # fmt: skip


def test_ties_that_share_a_stage_make_one_group() -> None:
    ties = [[5, 4], [0, 2], [1, 3], [2, 5], [6], [9, -1, 6]]
    assert tie_groups(8, tuple(map(tuple, ties))).tolist() == [0, 1, 0, 1, 0, 0, 2, 3]


@pytest.mark.parametrize(
    ("row_0", "row_1", "why"),
    [
        ("0F0", "1F0 1B0", set()),
        ("0F0 0B0", "1B0", {Why.NO_PRODUCER}),
        ("0F0 0SEND_F0@0.1 0B0", "1F0 1RECV_F0@0.0 1B0", {Why.NOT_RECEIVED}),
        ("0F0 0B0 0STEP", "1F0 1B0", {Why.NO_PREDECESSOR}),
        ("0F0 0B0", "1RECV_F0@0.0 1F0 1B0 1SEND_B0@0.0", {Why.NO_SEND, Why.NOT_RECEIVED}),
        ("0F0 1B0 0B0", "1F0", {Why.NOT_LOCAL}),
    ],
)
def test_what_nothing_meets_is_listed_with_its_reason(row_0: str, row_1: str, why: set[Why]) -> None:
    graph = dependencies(Schedule.from_text(Shape(1, 2, 1), {"0.0": row_0, "0.1": row_1}))
    assert {Why(number) for number in graph.missing.why} == why
