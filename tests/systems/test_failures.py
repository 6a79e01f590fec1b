"""Rows become changes: what happens at one stamp is one change, faults are counted, instances take free places."""

from __future__ import annotations

import pytest

from recycle.errors import TraceError
from recycle.systems.failures import FailureTrace, NodeChange, Row, mean_per_part, trace_from_rows


def rows(*events: tuple[float, str, str]) -> list[Row]:
    return [Row(line, time, what == "remove", name) for line, (time, what, name) in enumerate(events, 1)]


def test_an_instance_takes_the_lowest_free_place() -> None:
    trace = trace_from_rows(
        rows((0, "add", "a"), (0, "add", "b"), (5, "remove", "a"), (9, "add", "c"), (12, "add", "d")), "t"
    )
    assert trace.nodes == 3
    assert trace.up == frozenset()
    assert [(m.time, set(m.failed), set(m.joined)) for m in trace.changes] == [
        (0, set(), {0, 1}),
        (5, {0}, set()),
        (9, set(), {0}),
        (12, set(), {2}),
    ]


def test_add_and_remove_of_one_stamp_are_one_moment_in_any_order() -> None:
    begin = ((0, "add", "a"), (0, "add", "b"))
    swapped = [
        trace_from_rows(rows(*begin, (7, "add", "c"), (7, "remove", "a")), "t"),
        trace_from_rows(rows(*begin, (7, "remove", "a"), (7, "add", "c")), "t"),
    ]
    for trace in swapped:
        assert trace.nodes == 2
        assert trace.changes[-1] == NodeChange(7, frozenset({0}), frozenset({0}))


def test_a_fault_of_no_length_is_a_failure_and_a_return() -> None:
    trace = trace_from_rows(rows((3, "remove", "a"), (3, "add", "a")), "t", counted=True, population=4)
    assert trace.up == frozenset(range(4))
    assert trace.changes == (NodeChange(3, frozenset({0}), frozenset({0})),)


def test_overlapping_faults_of_a_server_end_with_the_last_one() -> None:
    events = rows((1, "remove", "a"), (2, "remove", "a"), (4, "add", "a"), (9, "add", "a"))
    trace = trace_from_rows(events, "t", counted=True)
    assert [(m.time, set(m.failed), set(m.joined)) for m in trace.changes] == [(1, {0}, set()), (9, set(), {0})]
    assert trace.node_seconds() == 1.0


def test_a_server_that_returns_keeps_its_place() -> None:
    events = rows((1, "remove", "a"), (2, "remove", "b"), (4, "add", "b"), (5, "add", "a"), (6, "remove", "b"))
    trace = trace_from_rows(events, "t", population=3)
    assert trace.up == {0, 1, 2}
    assert [set(m.failed) for m in trace.changes] == [{0}, {1}, set(), set(), {1}]


@pytest.mark.parametrize(
    ("events", "said"),
    [
        ([(0, "add", "a"), (5, "remove", "b")], "t, line 2: b is removed and was never added"),
        ([(0, "add", "a"), (5, "add", "a")], "t, line 2: a is added and is there already"),
        ([(0, "add", "a"), (5, "remove", "a"), (6, "remove", "a")], "t, line 3: a is removed and was not there"),
        ([(5, "add", "a"), (4, "add", "b")], "t, line 2: 4 s comes after 5 s"),
        ([], "t: holds no event"),
    ],
)
def test_an_impossible_row_is_named(events: list[tuple[float, str, str]], said: str) -> None:
    with pytest.raises(TraceError, match=said):
        trace_from_rows(rows(*events), "t")


def test_more_nodes_than_the_population_are_refused() -> None:
    with pytest.raises(TraceError, match="3 nodes have events, which is more than the population of 2"):
        trace_from_rows(rows((0, "add", "a"), (0, "add", "b"), (0, "add", "c")), "t", population=2)


def _three() -> FailureTrace:
    return trace_from_rows(rows((1, "remove", "a"), (2, "remove", "b"), (3, "add", "a"), (4, "remove", "c")), "t")


def test_a_larger_population_is_sampled_by_seed() -> None:
    fitted = _three().fitted(2, seed=1)
    assert fitted == _three().fitted(2, seed=1)
    assert fitted.nodes == 2
    assert fitted.failures in (1, 2)
    assert {_three().fitted(1, seed).changes[0].time for seed in range(8)} == {1, 2, 4}


def test_what_a_smaller_trace_does_not_name_never_fails() -> None:
    fitted = _three().fitted(10)
    assert fitted.up == frozenset(range(10))
    assert len({node for change in fitted.changes for node in change.failed}) == 3


def test_the_share_of_nodes_alive_in_parts_of_the_time() -> None:
    changes = (NodeChange(3.0, frozenset({0, 1}), frozenset()), NodeChange(7.0, frozenset(), frozenset({0})))
    trace = FailureTrace("t", 4, frozenset(range(4)), changes, 12.0)
    assert trace.alive() == [(0.0, 4), (3.0, 2), (7.0, 3)]
    assert trace.shares_alive(3) == pytest.approx([3.5 / 4, 2.25 / 4, 3 / 4])
    assert sum(trace.shares_alive(60)) / 60 == pytest.approx(trace.node_seconds() / 48)


def test_means_of_steps_that_begin_late_or_go_beyond_the_end() -> None:
    assert mean_per_part([(2.0, 6.0), (5.0, 0.0)], 4.0, 2) == pytest.approx([0.0, 6.0])
    assert mean_per_part([(0.0, 1.0), (1.0, 3.0), (1.0, 5.0)], 2.0, 2) == pytest.approx([1.0, 5.0])
    assert mean_per_part([], 4.0, 2) == mean_per_part([(0.0, 1.0)], 0.0, 2) == [0.0, 0.0]
