"""The search language: each field against a slow reading of it, and one clear line for each mistake."""

from __future__ import annotations

from dataclasses import replace

import pytest

from recycle import Profile, Schedule, simulate
from viz.analysis.search import SearchError, parse, search
from viz.lanes import LaneTable


@pytest.fixture(scope="module")
def table(broken: Schedule) -> LaneTable:
    return LaneTable.from_timeline(simulate(broken, Profile.uniform(link=0.1, step=0.5)))


def found(table: LaneTable, query: str) -> set[str]:
    return {str(table.instruction(operation)) for operation in search(table, query)}


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ("kind:W", {"1W1.0", "0W1.0", "1W1.1"}),
        ("kind:w mb:1.0", {"1W1.0", "0W1.0"}),
        ("kind:W stage:1 mb:1.1", {"1W1.1"}),
        ("kind:I,W stage:0", {"0I1.0", "0W1.0"}),
        ("kind:F mb:1 worker:0.*", {"0F0.1", "1F0.1"}),
        ("kind:F worker:*.1 -is:rerouted mb:*.0", {"1F0.0", "1F2.0"}),
        ("is:rerouted kind:F", {"1F1.0", "1F1.1"}),
        ("kind:step", {"0STEP", "1STEP"}),
        ("kind:F mb:0..0 stage:0..0 pipeline:1..2", {"0F1.0", "0F2.0"}),
        ("dur>1.5 stage=0 pipeline:2", {"0B2.0", "0B2.1"}),
        ("kind:F start<0.5", {"0F0.0", "0F1.0", "0F2.0"}),
        ("1W1", {"1W1.0", "1W1.1"}),
        ("", set()),
    ],
)
def test_a_query_finds(table: LaneTable, query: str, expected: set[str]) -> None:
    assert found(table, query) == expected


def test_times_are_those_of_the_axis(table: LaneTable) -> None:
    executed = replace(table, unit="s", start=table.start / 100, end=table.end / 100)
    assert executed.span < 2.0  # so that its axis is in milliseconds
    assert found(executed, "dur>15 stage=0 pipeline:2") == found(table, "dur>1.5 stage=0 pipeline:2") != set()
    tenth = replace(table, start=table.start + 0.1, end=table.end + 0.1)
    assert found(tenth, "dur=2 stage:0 mb:2.0") == {"0B2.0"}  # as people read it, not to the last bit


def test_what_is_found_comes_by_time(table: LaneTable) -> None:
    starts = table.start[search(table, "kind:F")]
    assert (starts[1:] >= starts[:-1]).all()


@pytest.mark.parametrize(
    ("query", "message"),
    [
        ("knd:W", "'knd:W': knd is no field; known are kind, mb, stage"),
        ("kind:Q", "q is no kind; known are f, b"),
        ("kind:W kind:", "a value is missing after kind:"),
        ("dur:3", "dur is compared as dur>1"),
        ("mb>3", "mb takes values as mb:…"),
        ("dur>x", "x is not a number"),
        ("mb:1.2.3", "is no micro-batch; write mb:1.3"),
        ("worker:7", "is no worker; write worker:1.2"),
        ("stage:a", "a is no number; write stage:2 or stage:2..5"),
        ("is:red", "red is no mark; known are rerouted, critical, violation"),
        ("a" * 1001, "1001 characters"),
        ("f " * 41, "41 terms"),
        (">5", "write field:value"),
    ],
)
def test_a_mistake_is_one_line_that_names_the_term(query: str, message: str) -> None:
    with pytest.raises(SearchError) as raised:
        parse(query)
    assert message in str(raised.value)
