"""Panels of the dock, details of selections and the headline: their figures are the timeline's."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from recycle import Profile, Schedule, Shape, Timeline, simulate
from recycle.ir.families import FAMILIES, one_f_one_b
from tests.viz.components import of_type, plain, words
from tests.viz.conftest import planned
from viz.details import Details, details, headline, one_f_one_b_period
from viz.lane_cache import LaneCache, TimedLanes, TimelineContext
from viz.lanes import LaneTable
from viz.pages import panels, parts
from viz.pages.bench import panel_content
from viz.run_files import load_run
from viz.sources import schedule_source


def entry_of(timeline: Timeline, limits: tuple[float, ...] | None = None) -> TimedLanes:
    context = TimelineContext.of_plan(timeline, limits)
    return TimedLanes(LaneTable.from_timeline(timeline), context)


@pytest.fixture(scope="module")
def entry() -> TimedLanes:
    return entry_of(simulate(planned(one_f_one_b(Shape(1, 4, 8)), 33.0, 33.0, (4.0, 3.0, 2.0, 1.0))))


def operation_of(entry: TimedLanes, text: str) -> int:
    return next(i for i in range(len(entry.table)) if str(entry.table.instruction(i)) == text)


def places(component: Any) -> list[Any]:
    return [json.loads(button["data-places"]) for button in of_type(plain(component), "Button")]


def test_the_critical_path_adds_up_to_the_makespan(entry: TimedLanes) -> None:
    texts = words(plain(panels.explained(entry, entry.context)))
    assert "52 of 64 instructions are critical" in " ".join(texts)
    assert {"B 22", "F 11"} <= set(texts)


def test_the_parts_of_the_time_add_up_to_the_makespan_and_lead_to_their_longest_gap(entry: TimedLanes) -> None:
    card = panels.time_card(entry, entry.context)
    texts = words(plain(card))[7:]
    rows = dict(zip(texts[::4], texts[1::4], strict=False))
    assert rows == {
        "B": "16",
        "F": "8",
        "warm-up": "1.5",
        "waits for a value": "1.5",
        "memory limit": "3",
        "no work left": "3",
    }
    assert sum(map(float, rows.values())) == entry.context.timeline.makespan
    assert places(card)[0] == [[3, 0.0, 3.0]]


def test_re_routed_work_is_listed_by_dead_worker_and_host(broken_timeline: Timeline) -> None:
    entry = entry_of(broken_timeline)
    (card,) = panels.rerouted_card(entry, entry.context)
    texts = words(plain(card))
    assert [texts[at : at + 5] for at in (8, 14)] == [
        ["1.1\N{NO-BREAK SPACE}→\N{NO-BREAK SPACE}0.1", "0", "3", "33.3 %", "27.3 %"],
        ["1.1\N{NO-BREAK SPACE}→\N{NO-BREAK SPACE}2.1", "1", "3", "33.3 %", "27.3 %"],
    ]
    starts = {str(entry.table.instruction(i)): entry.table.start[i] for i in range(len(entry.table))}
    expected = [[1, starts[f"1{kind}1.0"], starts[f"1{kind}1.0"] + 1] for kind in "FIW"]
    show = of_type(plain(card), "Button")[1]
    assert (show["data-places"], show["data-home"]) == (json.dumps(expected), 3)
    whole = entry_of(simulate(one_f_one_b(Shape(1, 2, 2))))
    assert panels.rerouted_card(whole, whole.context) == []


@pytest.mark.parametrize(
    ("window", "sentence", "share"),
    [
        (None, "From 0 to 33: 64 instructions on 4 live workers.", "24.2 %"),
        ([0.0, 2.0], "From 0 to 2: 3 instructions on 4 live workers.", "37.5 %"),
        ([5.0, 5.0], "From 5 to 5: 0 instructions on 4 live workers.", None),
    ],
)
def test_the_range_in_view_is_summed_up(
    entry: TimedLanes, window: list[float] | None, sentence: str, share: str | None
) -> None:
    texts = words(plain(panels.in_view(entry, entry.context, {"window": window})))
    assert sentence in texts
    assert (texts[texts.index("F") + 2] if "F" in texts else None) == share


def test_the_longest_bubbles_have_causes_and_places(entry: TimedLanes) -> None:
    card = panels.longest_bubbles(entry, entry.context)
    assert "Idle for 6: the memory limit holds back 0F0.4 (here +1 activation, limit 4); next is 0B0.0." in words(
        plain(card)
    )
    gaps = entry.context.bubbles.gaps.longest(None, panels.MAX_BUBBLES_LISTED)
    assert places(card) == [[[gap.worker.rank, gap.start, gap.end]] for gap in gaps]
    three = entry_of(simulate(one_f_one_b(Shape(3, 4, 8))))
    card = panels.longest_bubbles(three, three.context)
    bubbles = {(lane % 4, start, end) for ((lane, start, end),) in places(card)}
    assert len(bubbles) == len(places(card)) == panels.MAX_BUBBLES_LISTED
    assert "0.0, and 2 similar on its rank" in words(plain(card))
    many = entry_of(simulate(one_f_one_b(Shape(96, 4, 8))))
    texts = words(plain(panels.longest_bubbles(many, many.context)))
    assert {text for text in texts if "similar" in text} == {
        f"0.{rank}, and 95 similar on its rank" for rank in range(4)
    }


def test_every_worker_has_its_busy_time_peak_and_limit(entry: TimedLanes) -> None:
    texts = words(plain(panels.workers(entry, entry.context)))
    assert [texts[6 + 6 * rank : 12 + 6 * rank] for rank in (0, 3)] == [
        ["0.0", "24", "9", "9", "0", "4 of 4"],
        ["0.3", "24", "9", "0", "0", "1 of 1"],
    ]


def test_a_heat_map_shows_the_workers_of_several_pipelines(broken_timeline: Timeline) -> None:
    entry = entry_of(broken_timeline)

    def buttons_of(entry: TimedLanes) -> Any:
        (graph,) = of_type(plain(panels.workers(entry, entry.context)), "Graph")
        return graph["figure"]["layout"]["updatemenus"][0]["buttons"]

    buttons = buttons_of(entry)
    shown = {button["label"]: np.array(button["args"][0]["z"][0], dtype=float) for button in buttons}
    expected = {"busy": broken_timeline.busy, "bubble": broken_timeline.bubble}
    for name, values in expected.items():
        assert shown[name].ravel() == pytest.approx(np.array(values, dtype=float), nan_ok=True)
        assert np.isnan(shown[name]).sum() == len(broken_timeline.schedule.failed)
    assert list(shown) == [*expected, "peak memory"]
    (busy,) = buttons_of(entry_of(simulate(one_f_one_b(Shape(2, 2, 2)))))[0]["args"]
    assert (busy["zmin"], busy["zmax"]) == (0, 6)  # equal values fill the scale


def test_search_results_have_the_reason_of_their_start(entry: TimedLanes) -> None:
    operations = [operation_of(entry, f"3F0.{j}") for j in (0, 1)]
    card = panels.hits(entry, entry.context, {"query": "kind:F", "operations": operations, "total": 7})
    texts = words(plain(card))
    assert {"3F0.0 on 0.3", "Waited for 2F0.0 on 0.2 (its value), ended 3, arrived 3"} <= set(texts)
    assert "7 found, the first 2 by time." in texts
    assert places(card) == [[[3, 3.0, 4.0]], [[3, 6.0, 7.0]]]


@pytest.mark.parametrize(
    ("name", "request_", "text"),
    [
        ("explain", {"address": "lanes/gone.bin"}, parts.NOT_CACHED),
        ("workers", {"address": "bare"}, "There are only the lanes: no details are available."),
        ("found", {"address": "bare", "problem": "knd is not a field"}, "knd is not a field"),
    ],
)
def test_a_panel_without_content_says_why(entry: TimedLanes, name: str, request_: dict[str, str], text: str) -> None:
    cache = LaneCache()
    address = cache.put(TimedLanes(entry.table)) if request_["address"] == "bare" else request_["address"]
    assert text in words(plain(panel_content(cache, name, {**request_, "address": address})))


def details_of(entry: TimedLanes, **choice: Any) -> Details:
    selection = details(entry, choice)
    assert selection is not None
    return selection


def test_an_operation_lists_its_inputs_with_slack(broken_timeline: Timeline) -> None:
    entry = entry_of(broken_timeline)
    selection = details_of(entry, operation=operation_of(entry, "1F1.0"))
    assert selection.needs == [
        ["1F0.0", "0.1", "before it in the program", "2", "none: waited for this"],
        ["0F1.0", "1.0", "its value", "1", "1"],
    ]
    linked = {name: operation_of(entry, text) for name, text in (("inputs", "0F1.0"), ("outputs", "1I1.0"))}
    assert selection.links == {
        **{name: [operation] for name, operation in linked.items()},
        "waited": operation_of(entry, "1F0.0"),
    }


def test_an_executed_operation_has_its_executed_inputs(run_dir: Path) -> None:
    lanes = load_run(run_dir).executed_lanes(4)
    assert lanes is not None
    table, context = lanes.table, lanes.context
    for operation in range(len(table)):
        row = int(table.instruction_id[operation])
        assert str(context.timeline.schedule.instruction(row)) == str(table.instruction(operation))
        assert context.timeline.start[row] == pytest.approx(table.start[operation])
    entry = lanes
    selection = details_of(entry, operation=operation_of(entry, "1F1.0"))
    assert {need[0] for need in selection.needs} == {"0F1.0", "1F0.0"}
    assert selection.links["outputs"] == [operation_of(entry, "1I1.0")]


def test_a_worker_is_summed_up(broken_timeline: Timeline) -> None:
    entry = entry_of(broken_timeline, limits=(4.0, 3.0))
    assert details_of(entry, lane=1).lines == [
        "7 instructions, busy 81.8 % of the time",
        "3 of them re-routed to it",
        "holds at most 2 of 3 activations, from 1F1.0 on",
        "holds then: 1F0.0, 1F1.0",
    ]
    assert details_of(entry, lane=3).lines[-1] == "has failed"


def test_the_peak_of_a_worker_with_unequal_stages_is_that_of_its_bytes() -> None:
    profile = replace(Profile.uniform(), activation=[4e9, 4e9, 1e9, 1e9])
    entry = entry_of(simulate(FAMILIES["interleaved"](Shape(1, 2, 4, chunks=2)), profile))
    assert details_of(entry, lane=0).lines[1:] == [
        "holds at most 17 GB, from 0F0.3 on",
        "holds then: 0F0.0, 0F0.1, 2F0.1, 0F0.2, 0F0.3",
    ]


@pytest.mark.parametrize("choice", [{}, {"operation": -1}, {"operation": 10**9}, {"operation": "1"}, {"lane": 6}])
def test_other_selections_have_no_details(broken_timeline: Timeline, choice: dict[str, Any]) -> None:
    assert details(entry_of(broken_timeline), choice) is None


def test_the_cache_keeps_the_last_used_lanes(broken_timeline: Timeline, healthy: Schedule) -> None:
    first, second = (TimedLanes(LaneTable.from_timeline(each)) for each in (broken_timeline, simulate(healthy)))
    cache = LaneCache(max_bytes=1, min_tables=1)
    digest = cache.put(first)
    assert cache.get(cache.put(second)) is not None
    assert cache.get(digest) is None
    assert cache.put(first) == digest
    assert cache.get(digest) is not None


def test_1f1b_has_its_published_figures() -> None:
    figures = headline(entry_of(simulate(one_f_one_b(Shape(3, 4, 8))), limits=(4, 4, 4, 4)))
    assert {figure.name: figure.value for figure in figures} == {
        "period": "33",
        "bubbles": "27.3 %",
        "peak memory": "4 of 4",
        "1F1B": "× 1",
    }


@pytest.mark.parametrize("name", ["interleaved", "zb-v"])
def test_chunks_are_compared_with_1f1b_of_the_same_work_per_worker(name: str) -> None:
    halves = simulate(FAMILIES[name](Shape(1, 4, 8, chunks=2)), Profile.uniform(0.5, 0.5, 0.5))
    assert one_f_one_b_period(halves) == pytest.approx(33)


def test_executed_lanes_have_no_period_and_lanes_alone_no_figures() -> None:
    source = schedule_source(Path("x"), one_f_one_b(Shape(1, 2, 2)))
    executed = TimedLanes(source.lanes, TimelineContext(source.timeline, executed=True))
    assert [figure.name for figure in headline(executed)] == ["makespan", "bubbles"]
    assert headline(TimedLanes(source.lanes, None)) == []
