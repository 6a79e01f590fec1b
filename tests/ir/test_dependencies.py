"""The one rule of what needs what: for single instructions, for whole schedules, and into the next iteration."""

from __future__ import annotations

import pytest

from recycle import MicroBatch, Schedule, Shape
from recycle.ir.dependencies import Dependencies, ValueKind, Why, dependencies, needs, tie_groups
from recycle.ir.instruction import parse_instruction

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


def test_a_compute_only_schedule_needs_producers_wherever_they_are() -> None:
    schedule = Schedule.from_text(Shape(1, 2, 1), {"0.0": "0F0 0I0 0W0", "0.1": "1F0 1B0"})
    graph = dependencies(schedule)
    assert edges(schedule, graph) == {
        ("0F0.0 0.0", "1F0.0 0.1"), ("1F0.0 0.1", "1B0.0 0.1"), ("0F0.0 0.0", "0I0.0 0.0"),
        ("1B0.0 0.1", "0I0.0 0.0"), ("0I0.0 0.0", "0W0.0 0.0"),
    }  # fmt: skip
    assert not len(graph.missing)


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
