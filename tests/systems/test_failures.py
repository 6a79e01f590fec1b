"""Rows become changes: what happens at one stamp is one change, faults are counted, instances take free places."""

from __future__ import annotations

from typing import Any

import pytest

from recycle.errors import TraceError
from recycle.systems.failures import FailureTrace, NodeChange, Row, mean_per_part, trace_from_rows


def rows(text: str) -> list[Row]:
    """Events as "5 -a; 9 +c": a goes after 5 seconds, c comes after 9."""
    events = [event.split() for event in text.split("; ") if event]
    return [Row(line, float(time), what[0] == "-", what[1:]) for line, (time, what) in enumerate(events, 1)]


def told(trace: FailureTrace) -> str:
    """Its changes in the same way, by place."""
    return "; ".join(
        " ".join([f"{each.time:g}", *(f"-{node}" for node in each.failed), *(f"+{node}" for node in each.joined)])
        for each in trace.changes
    )


@pytest.mark.parametrize(
    ("events", "options", "nodes", "up", "changes"),
    [
        # An instance takes the lowest free place.
        ("0 +a; 0 +b; 5 -a; 9 +c; 12 +d", {}, 3, 0, "0 +0 +1; 5 -0; 9 +0; 12 +2"),
        # What comes and goes at one stamp is one change, in any order.
        ("0 +a; 0 +b; 7 +c; 7 -a", {}, 2, 0, "0 +0 +1; 7 -0 +0"),
        ("0 +a; 0 +b; 7 -a; 7 +c", {}, 2, 0, "0 +0 +1; 7 -0 +0"),
        # A fault of no length is a failure and a return.
        ("3 -a; 3 +a", {"counted": True, "population": 4}, 4, 4, "3 -0 +0"),
        # Overlapping faults of a server end with the last one.
        ("1 -a; 2 -a; 4 +a; 9 +a", {"counted": True}, 1, 1, "1 -0; 9 +0"),
        # A server that returns keeps its place.
        ("1 -a; 2 -b; 4 +b; 5 +a; 6 -b", {"population": 3}, 3, 3, "1 -0; 2 -1; 4 +1; 5 +0; 6 -1"),
        ("0 +a; 1 +b; 2 -a; 3 +c; 4 +a", {}, 3, 0, "0 +0; 1 +1; 2 -0; 3 +2; 4 +0"),
    ],
)
def test_rows_become_changes(events: str, options: dict[str, Any], nodes: int, up: int, changes: str) -> None:
    trace = trace_from_rows(rows(events), "t", **options)
    assert (trace.nodes, trace.up, told(trace)) == (nodes, frozenset(range(up)), changes)


@pytest.mark.parametrize(
    ("events", "options", "said"),
    [
        ("0 +a; 5 -b", {}, "t, line 2: b is removed and was never added"),
        ("0 +a; 5 +a", {}, "t, line 2: a is added and is there already"),
        ("0 +a; 5 -a; 6 -a", {}, "t, line 3: a is removed and was not there"),
        ("5 +a; 4 +b", {}, "t, line 2: 4 s comes after 5 s"),
        ("", {}, "t: holds no event"),
        ("0 +a; 0 +b; 0 +c", {"population": 2}, "3 nodes have events, which is more than the population of 2"),
    ],
)
def test_an_impossible_row_is_named(events: str, options: dict[str, Any], said: str) -> None:
    with pytest.raises(TraceError, match=said):
        trace_from_rows(rows(events), "t", **options)


THREE = trace_from_rows(rows("1 -a; 2 -b; 3 +a; 4 -c"), "t")


def test_a_larger_population_is_sampled_by_seed() -> None:
    fitted = THREE.fitted(2, seed=1)
    assert fitted == THREE.fitted(2, seed=1)
    assert fitted.nodes == 2
    assert fitted.failures in (1, 2)
    assert {THREE.fitted(1, seed).changes[0].time for seed in range(8)} == {1, 2, 4}


def test_what_a_smaller_trace_does_not_name_never_fails() -> None:
    fitted = THREE.fitted(10)
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
