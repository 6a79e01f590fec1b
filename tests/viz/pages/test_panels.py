"""The panels of the dock: critical path, bubbles, what is in view, workers and the search, held to the timeline."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from dash import Dash, html

from recycle import Shape
from recycle.ir.families import one_f_one_b
from tests.viz.components import canvases, of_type, plain, words
from viz.lane_cache import CachedLanes, LaneCache
from viz.pages import panels, parts
from viz.pages.bench import INVITATION, TITLES, bench, register
from viz.pages.lanes_view import answer
from viz.pages.page import Mode
from viz.pages.run_page import RunPage
from viz.pages.schedule_page import SchedulePage
from viz.pages.validate_page import ValidatePage
from viz.run_files import LiveRun, load_run
from viz.sources import schedule_source

SHAPE = Shape(1, 4, 8)


@pytest.fixture(scope="module")
def page() -> SchedulePage:
    limited = one_f_one_b(SHAPE).with_metadata(limits=[4, 3, 2, 1])
    return SchedulePage([schedule_source(Path("1f1b"), limited)])


@pytest.fixture(scope="module")
def shown(page: SchedulePage) -> CachedLanes:
    return kept(page.cache, page.timelines()[0])


def kept(cache: LaneCache, component: Any, place: int = 0) -> CachedLanes:
    """What stands behind the address of a timeline on a page."""
    found = cache.get(canvases(plain(component))[place]["data-address"])
    return found


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


@pytest.mark.parametrize("window", [{}, [1], [1, "2"], [float("nan"), 1.0], "12"])
def test_what_is_no_window_shows_all(shown: CachedLanes, window: object) -> None:
    texts = words(plain(panels.in_view(shown, shown.explainer, {"window": window})))
    assert texts[0].startswith("From 0 to 33: ")


def test_the_longest_bubbles_lead_to_their_places(shown: CachedLanes) -> None:
    card = panels.longest_bubbles(shown, shown.explainer)
    assert "Idle for 6: the memory limit holds back 0F0.4; next is 0B0.0." in words(plain(card))
    gaps = shown.explainer.bubbles.gaps.longest(None, panels.BUBBLES_SHOWN)
    assert places(card) == [[[gap.worker.rank, gap.start, gap.end]] for gap in gaps]


def test_bubbles_that_are_alike_in_all_pipelines_are_listed_once() -> None:
    page = SchedulePage([schedule_source(Path("three"), one_f_one_b(Shape(3, 4, 8)))])
    lanes = kept(page.cache, page.timelines()[0])
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


def test_of_many_workers_those_that_wait_longest_are_listed() -> None:
    page = SchedulePage([schedule_source(Path("many"), one_f_one_b(Shape(40, 2, 2)))])
    lanes = kept(page.cache, page.timelines()[0])
    texts = words(plain(panels.workers(lanes, lanes.explainer)))
    assert texts[-1].startswith(f"{panels.WORKERS_SHOWN} of 80, largest inner bubble first.")
    assert texts[5] == "0.0"
    assert sum(text.endswith(".0") for text in texts) == 40


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


def test_a_search_that_finds_nothing_or_is_wrong_says_so(shown: CachedLanes) -> None:
    assert "No match for kind:F." in words(plain(panels.hits(shown, shown.explainer, found([]))))
    assert "No match for kind:F." in words(plain(panels.hits(shown, shown.explainer, found([-1, 10**9, "1", None]))))


def test_an_executed_step_is_explained_in_its_unit(run_dir: Path) -> None:
    page = RunPage(LiveRun(load_run(run_dir)))
    executed = kept(page.cache, page.timelines(4, None)[0], 1)
    texts = words(
        plain([panels.explained(executed, executed.explainer), panels.in_view(executed, executed.explainer, {})])
    )
    assert any("over the makespan of 202 ms" in text for text in texts)
    assert not any("are critical" in text for text in texts)
    assert any(text.startswith("From 0 to 202.41 ms: ") for text in texts)
    assert all(
        0 <= lane < executed.table.lanes for ((lane, _, _),) in places(panels.explained(executed, executed.explainer))
    )


def test_a_bubble_of_the_lanes_tells_its_cause_when_it_is_pressed(page: SchedulePage, shown: CachedLanes) -> None:
    address = canvases(plain(page.timelines()[0]))[0]["data-address"]
    gap = shown.explainer.bubbles.gaps.longest(None, 1)[0]
    card, _ = answer(page.cache, {"address": address, "lane": gap.worker.rank, "from": gap.start, "to": gap.end})
    assert "Idle for 6: the memory limit holds back 0F0.4; next is 0B0.0." in words(plain(card))


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
    app = Dash("test", suppress_callback_exceptions=True)
    register(app, cache)
    app.layout = html.Div()
    if asked["address"] == "bare":
        asked = {**asked, "address": cache.put(shown.table)}
    answer = answered(app.server.test_client(), asked)
    assert said in words(answer[f"panel-{asked['panel']}"]["children"])
    assert len(answer) == 1


def answered(client: Any, asked: dict[str, str]) -> Any:
    """What the callback of all panels answers."""
    (callback,) = [entry for entry in client.get("/_dash-dependencies").get_json() if "panel-found" in entry["output"]]
    outputs = [{"id": part.rsplit(".", 1)[0], "property": "children"} for part in callback["output"][2:-2].split("...")]
    request = {
        "output": callback["output"],
        "outputs": outputs,
        "inputs": [{"id": "bench-asked", "property": "data", "value": asked}],
        "changedPropIds": ["bench-asked.data"],
    }
    return client.post("/_dash-update-component", json=request).get_json()["response"]


def test_the_workbench_has_the_panels_of_its_first_mode_and_empty_places_for_the_others(page: SchedulePage) -> None:
    component = plain(bench([page, ValidatePage()], Mode("lanes", {"Figures": "figures", "Layout of all": []})))
    panels = {section["data-panel"]: section["aria-label"] for section in of_type(component, "Section")}
    assert panels == {**TITLES, "figures": "Figures", "layout": "Layout of all"}
    assert INVITATION in words(component)
    places = [part for part in of_type(component, "Div") if part.get("className") == "mode"]
    assert {part["data-page"] for part in places if part["children"]} == {"schedules"}
    assert {part["data-opened"] for part in places} == {"selection", "findings"}
