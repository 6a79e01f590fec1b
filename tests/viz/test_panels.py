"""What the dock and the headline say of a timeline, held to the timeline."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from recycle import Profile, Schedule, Shape, Timeline, simulate
from recycle.ir.families import FAMILIES, one_f_one_b
from tests.viz.components import drawn, of_type, plain, words
from viz.details import Details, details, headline, usual_period
from viz.lane_cache import CachedLanes, Explainer, LaneCache
from viz.lanes import LaneTable
from viz.pages import panels, parts
from viz.pages.bench import panel_content
from viz.pages.schedule_page import SchedulePage
from viz.run_files import load_run
from viz.sources import schedule_source

SHAPE = Shape(1, 4, 8)


@pytest.fixture(scope="module")
def page() -> SchedulePage:
    limited = one_f_one_b(SHAPE).with_metadata(limits=[4, 3, 2, 1])
    return SchedulePage([schedule_source(Path("1f1b"), limited)])


@pytest.fixture(scope="module")
def shown(page: SchedulePage) -> CachedLanes:
    return drawn(page.cache, page.timelines())[0]


def places(component: Any) -> list[Any]:
    """Where the buttons of a component lead."""
    return [json.loads(button["data-places"]) for button in of_type(plain(component), "Button")]


def test_the_critical_path_adds_up_to_the_makespan(shown: CachedLanes) -> None:
    texts = words(plain(panels.explained(shown, shown.explainer)))
    assert "One chain of waits over the makespan of 33; key p draws it. 52 of 64 instructions are critical" in " ".join(
        text.split(":")[0] for text in texts
    )
    at = texts.index("share")
    rows = [texts[at + 1 + 4 * i : at + 5 + 4 * i] for i in range(2)]
    assert [(row[0], float(row[2])) for row in rows] == [("B", 22.0), ("F", 11.0)]
    assert sum(float(row[3].rstrip("%")) for row in rows) == pytest.approx(100, abs=0.1)


def test_what_is_in_view_follows_the_zoom(shown: CachedLanes) -> None:
    whole, warm_up = (
        words(plain(panels.in_view(shown, shown.explainer, {"window": window}))) for window in (None, [0.0, 2.0])
    )
    assert whole[0] == "From 0 to 33: 64 instructions on 4 live workers."
    assert warm_up[0] == "From 0 to 2: 3 instructions on 4 live workers."
    at = warm_up.index("F")
    assert warm_up[at : at + 3] == ["F", "3", "37.5 %"]
    assert "idle: waits for a value" in warm_up
    nothing = words(plain(panels.in_view(shown, shown.explainer, {"window": [5.0, 5.0]})))
    assert nothing[0] == "From 5 to 5: 0 instructions on 4 live workers."


def test_the_longest_bubbles_lead_to_their_places(shown: CachedLanes) -> None:
    card = panels.longest_bubbles(shown, shown.explainer)
    assert "Idle for 6: the memory limit holds back 0F0.4; next is 0B0.0." in words(plain(card))
    gaps = shown.explainer.bubbles.gaps.longest(None, panels.BUBBLES_SHOWN)
    assert places(card) == [[[gap.worker.rank, gap.start, gap.end]] for gap in gaps]


def test_bubbles_that_are_alike_in_all_pipelines_are_listed_once() -> None:
    page = SchedulePage([schedule_source(Path("three"), one_f_one_b(Shape(3, 4, 8)))])
    (lanes,) = drawn(page.cache, page.timelines())
    card = panels.longest_bubbles(lanes, lanes.explainer)
    found = places(card)
    assert len({(lane % 4, start, end) for ((lane, start, end),) in found}) == len(found) == panels.BUBBLES_SHOWN
    assert "0.0, and 2 on its rank alike" in words(plain(card))


def test_every_worker_has_its_busy_time_peak_and_limit(shown: CachedLanes) -> None:
    texts = words(plain(panels.workers(shown, shown.explainer)))
    assert texts[:6] == ["worker", "busy", "bubble", "inner bubble", "peak activations", "limit"]
    assert [texts[6 + 6 * rank : 12 + 6 * rank] for rank in (0, 3)] == [
        ["0.0", "24", "9", "9", "4", "4"],
        ["0.3", "24", "9", "0", "1", "1"],
    ]


def found(operations: list[object], total: int | None = None) -> dict[str, object]:
    """What the browser's search hands over."""
    return {"query": "kind:F", "operations": operations, "total": total or len(operations)}


def test_a_hit_of_the_search_says_why_it_starts_when_it_does(shown: CachedLanes) -> None:
    table = shown.table
    first, second = (next(i for i in range(len(table)) if str(table.instruction(i)) == f"3F0.{j}") for j in (0, 1))
    card = panels.hits(shown, shown.explainer, found([first, second], 7))
    texts = words(plain(card))
    assert "3F0.0 on 0.3" in texts
    assert "Waited for 2F0.0 on 0.2 (its value), ended 3, arrived 3" in texts
    assert "7 found, the first 2 by time." in texts
    assert places(card) == [[[3, 3.0, 4.0]], [[3, 6.0, 7.0]]]


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"panel": "explain", "address": "lanes/gone.bin"}, parts.NOT_KEPT),
        ({"panel": "workers", "address": "bare"}, "Nothing more is known of these lanes."),
        ({"panel": "found", "address": "bare", "problem": "knd is no field"}, "knd is no field"),
    ],
)
def test_lanes_that_are_gone_and_lanes_that_nothing_explains_say_so(
    shown: CachedLanes, asked: dict[str, str], said: str
) -> None:
    cache = LaneCache()
    address = cache.put(shown.table) if asked["address"] == "bare" else asked["address"]
    assert said in words(plain(panel_content(cache, {**asked, "address": address})))


def shown_of(timeline: Timeline, limits: tuple[float, ...] | None = None) -> CachedLanes:
    cache = LaneCache()
    found = cache.get(cache.put(LaneTable.from_timeline(timeline), Explainer(timeline, limits=limits)))
    return found


def place(shown: CachedLanes, text: str) -> int:
    return next(i for i in range(len(shown.table)) if str(shown.table.instruction(i)) == text)


def details_of(shown: CachedLanes, **choice: Any) -> Details:
    answer = details(shown, choice)
    return answer


def texts(shown: CachedLanes, operations: list[int]) -> list[str]:
    return [str(shown.table.instruction(operation)) for operation in operations]


def test_an_operation_lists_what_it_needed_with_slack(broken_timeline: Timeline) -> None:
    shown = shown_of(broken_timeline)
    answer = details_of(shown, operation=place(shown, "1F1.0"))
    assert answer.title == "1F1.0"
    assert answer.needs == [
        ["1F0.0", "0.1", "before it in the program", "2", "none: waited for this"],
        ["0F1.0", "1.0", "its value", "1", "1"],
    ]
    assert texts(shown, answer.links["inputs"]) == ["0F1.0"]
    assert texts(shown, answer.links["outputs"]) == ["1I1.0"]
    assert texts(shown, [answer.links["waited"]]) == ["1F0.0"]


def test_an_executed_operation_is_explained_by_what_ran(run_dir: Path) -> None:
    run = load_run(run_dir)
    ran = run.executed(4)
    table, explainer = ran
    cache = LaneCache()
    shown = cache.get(cache.put(table, explainer))
    for operation in range(len(table)):
        row = explainer.row(table, operation)
        assert str(explainer.timeline.schedule.instruction(row)) == str(table.instruction(operation))
        assert explainer.timeline.start[row] == pytest.approx(table.start[operation])
    answer = details_of(shown, operation=place(shown, "1F1.0"))
    assert {need[0] for need in answer.needs} == {"0F1.0", "1F0.0"}
    assert texts(shown, answer.links["outputs"]) == ["1I1.0"]


def test_every_gap_that_the_canvas_can_show_has_causes_that_cover_it(broken_timeline: Timeline) -> None:
    shown = shown_of(broken_timeline)
    table = shown.table
    for lane in np.flatnonzero(~table.failed).tolist():
        idle = 0.0
        for i in range(int(table.offsets[lane]), int(table.offsets[lane + 1])):
            if table.start[i] > idle + 1e-9:
                answer = details_of(shown, lane=lane, **{"from": idle, "to": float(table.start[i])})
                assert len(answer.lines) >= 2
            idle = max(idle, float(table.end[i]))


def test_a_worker_is_summed_up(broken_timeline: Timeline) -> None:
    shown = shown_of(broken_timeline)
    assert details_of(shown, lane=1).lines[0] == "7 instructions, busy 81.8 % of the time"
    assert "3 of them re-routed to it" in details_of(shown, lane=1).lines
    assert details_of(shown, lane=3).lines[-1] == "has failed"
    limited = shown_of(broken_timeline, limits=(4.0, 3.0))
    assert "holds at most 2 of 3 activations, from 1F1.0 on" in details_of(limited, lane=1).lines


@pytest.mark.parametrize(
    "choice", [{}, {"operation": -1}, {"operation": 10**9}, {"operation": "1"}, {"lane": 6}, {"lane": None}]
)
def test_what_is_not_there_has_no_details(broken_timeline: Timeline, choice: dict[str, Any]) -> None:
    assert details(shown_of(broken_timeline), choice) is None


def test_the_shelf_keeps_what_was_used_last(broken_timeline: Timeline, healthy: Schedule) -> None:
    first, second = LaneTable.from_timeline(broken_timeline), LaneTable.from_timeline(simulate(healthy))
    cache = LaneCache(most_bytes=1, at_least=1)
    digest = cache.put(first)
    assert cache.put(first) == digest
    other = cache.put(second)
    assert cache.get(digest) is None
    assert cache.get(other) is not None
    assert cache.put(first) == digest
    assert cache.get(digest) is not None


def of(schedule: Schedule, profile: Profile | None = None, limits: tuple[float, ...] | None = None) -> dict[str, str]:
    timeline = simulate(schedule, profile or Profile.uniform())
    shown = CachedLanes(LaneTable.from_timeline(timeline), b"", Explainer(timeline, limits=limits))
    return {figure.name: figure.value for figure in headline(shown)}


def test_1f1b_has_its_published_figures() -> None:
    found = of(one_f_one_b(Shape(3, 4, 8)), limits=(4, 4, 4, 4))
    assert found == {"period": "33", "bubbles": "27.3 %", "peak memory": "4 of 4", "1F1B": "× 1"}


def test_a_plan_without_a_worker_is_compared_with_all_workers(broken: Schedule) -> None:
    found = of(broken)
    assert (found["period"], found["1F1B"]) == ("11", f"× {11 / 9:.3g}")
    assert found["bound"] == "10 (gap 10 %)"


def test_a_bound_of_other_times_is_left_out(broken: Schedule) -> None:
    assert "bound" not in of(broken, Profile.uniform(2, 3, 1))


@pytest.mark.parametrize("name", ["interleaved", "zb-v"])
def test_chunks_are_compared_with_1f1b_of_the_same_work_per_worker(name: str) -> None:
    shape = Shape(1, 4, 8, chunks=2)
    halves = simulate(FAMILIES[name](shape), Profile.uniform(0.5, 0.5, 0.5))
    assert usual_period(halves) == pytest.approx(33)


def test_of_unlike_workers_there_is_no_usual_period() -> None:
    timeline = simulate(one_f_one_b(Shape(2, 2, 2)), replace(Profile.uniform(), speed={"0.0": 2.0}))
    assert usual_period(timeline) is None


def test_what_ran_has_no_period_and_lanes_alone_have_nothing() -> None:
    source = schedule_source(Path("x"), one_f_one_b(Shape(1, 2, 2)))
    ran = CachedLanes(source.lanes, b"", Explainer(source.timeline, executed=True))
    assert [figure.name for figure in headline(ran)] == ["makespan", "bubbles"]
    assert headline(CachedLanes(source.lanes, b"", None)) == []
