"""The explain page: critical path, bubbles, memory, what is in view and the search, each against the timeline."""

from __future__ import annotations

from pathlib import Path

import pytest

from recycle import RecycleError, Schedule, Shape, Worker
from recycle.ir.families import one_f_one_b
from tests.viz.components import canvases, graphs, of_type, plain, words
from viz.pages.explain_page import ExplainPage, is_range
from viz.pages.lanes_view import answer
from viz.run import load_run
from viz.sources import schedule_source

SHAPE = Shape(1, 4, 8)


@pytest.fixture
def page() -> ExplainPage:
    limited = one_f_one_b(SHAPE).with_metadata(limits=[4, 3, 2, 1])
    return ExplainPage(lambda: [schedule_source(Path("1f1b"), limited)])


def test_the_critical_path_adds_up_to_the_makespan(page: ExplainPage) -> None:
    texts = words(plain(page.path(page.explained("file/0"))))
    assert "1f1b: makespan 33" in texts
    at = texts.index("share")
    rows = [texts[at + 1 + 4 * i : at + 5 + 4 * i] for i in range(2)]
    assert [(row[0], float(row[2])) for row in rows] == [("B", 22.0), ("F", 11.0)]
    assert sum(float(row[3].rstrip("%")) for row in rows) == pytest.approx(100, abs=0.1)


def test_lanes_and_memory_lie_on_one_axis_and_the_peak_is_named(page: ExplainPage) -> None:
    lanes, memory = graphs(plain(page.lanes(page.explained("file/0"))))
    assert lanes["figure"]["layout"]["xaxis"]["range"] == memory["figure"]["layout"]["xaxis"]["range"]
    assert lanes["figure"]["layout"]["margin"]["l"] == memory["figure"]["layout"]["margin"]["l"]
    assert memory["id"] == {"type": "explain-graph", "place": 1}
    (note,) = [note for note in memory["figure"]["layout"]["annotations"] if note["name"] == "limit"]
    assert note["text"] == "limit 4"
    assert "Worker 0.0 holds at most 4 activations, from 0F0.3 on; its limit is 4." in words(
        plain(page.lanes(page.explained("file/0")))
    )


def test_another_workers_memory_is_drawn_when_chosen(page: ExplainPage) -> None:
    (graph,) = graphs(plain(page.memory(page.explained("file/0"), Worker(0, 2), 60)))
    assert [note["text"] for note in graph["figure"]["layout"]["annotations"]] == ["limit 2"]
    assert graph["figure"]["data"][1]["text"] == ["peak 2: 2F0.1"]


def test_what_is_in_view_follows_the_zoom(page: ExplainPage) -> None:
    one = page.explained("file/0")
    whole, warm_up = (words(plain(page.in_view(one, shown))) for shown in (None, (0.0, 2.0)))
    assert whole[0] == "From 0 to 33: 64 instructions on 4 live workers."
    assert warm_up[0] == "From 0 to 2: 3 instructions on 4 live workers."
    at = warm_up.index("F")
    assert warm_up[at : at + 3] == ["F", "3", "37.5%"]
    assert "idle: waits for a value" in warm_up
    assert page.in_view(one, (5.0, 5.0)) is not None  # nothing in view


@pytest.mark.parametrize("shown", [[1, 2.5], [0.0, 0.0]])
def test_two_times_are_a_range(shown: list[float]) -> None:
    assert is_range(shown)


@pytest.mark.parametrize("shown", [None, {}, [1], [1, "2"], [float("nan"), 1.0], "12"])
def test_anything_else_is_none(shown: object) -> None:
    assert not is_range(shown)


def test_the_longest_bubbles_lead_to_their_places(page: ExplainPage) -> None:
    one = page.explained("file/0")
    texts = words(plain(page.longest(one)))
    assert "Idle for 6: the memory limit holds back 0F0.4; next is 0B0.0." in texts
    gap = one.explainer.bubbles.gaps.longest(None, 1)[0]
    place = page.place_of("file/0", "bubble", 0)
    assert place["places"] == [[gap.worker.rank, gap.start, gap.end]]


def found(page: ExplainPage, operations: list[object], total: int | None = None) -> dict[str, object]:
    """What the browser's search hands over."""
    address = page.explained("file/0").address
    return {"query": "kind:F", "address": address, "operations": operations, "total": total or len(operations)}


def test_a_hit_of_the_search_says_why_it_starts_when_it_does(page: ExplainPage) -> None:
    table = page.explained("file/0").table
    first, second = (next(i for i in range(len(table)) if str(table.instruction(i)) == f"3F0.{j}") for j in (0, 1))
    component = plain(page.hits("file/0", found(page, [first, second], 7)))
    texts = words(component)
    assert "3F0.0 on 0.3" in texts
    assert "Waited for 2F0.0 on 0.2 (its value), ended 3, arrived 3" in texts
    assert "7 found, the first 2 by time." in texts
    assert len(of_type(component, "Button")) == 2
    assert page.place_of("file/0", "hit", second)["places"] == [[3, 6.0, 7.0]]


def test_a_search_that_finds_nothing_or_is_wrong_says_so(page: ExplainPage) -> None:
    assert "No match for kind:F." in words(plain(page.hits("file/0", found(page, []))))
    assert any("knd is no field" in text for text in words(plain(page.hits("file/0", {"problem": "knd is no field"}))))
    assert page.hits("file/0", None) == []


def test_hits_that_are_no_operations_of_these_lanes_are_passed_over(page: ExplainPage) -> None:
    assert "No match for kind:F." in words(plain(page.hits("file/0", found(page, [-1, 10**9, "1", None]))))
    other = {**found(page, [1]), "address": "lanes/x.bin"}
    assert "No match for kind:F." in words(plain(page.hits("file/0", other)))


def test_an_executed_step_is_explained_in_seconds(run_dir: Path) -> None:
    page = ExplainPage(lambda: [load_run(run_dir)])
    one = page.explained(page.operands.first_choice()[-1])
    texts = words(plain([page.path(one), page.in_view(one, None)]))
    assert any(text.startswith("run: executed step 4: makespan 0.2024") for text in texts)
    assert not any("are critical" in text for text in texts)
    assert any(text.startswith("From 0 to 202.41 ms: ") for text in texts)
    assert graphs(plain(page.lanes(one)))[0]["figure"]["layout"]["xaxis"]["title"]["text"] == "time (ms)"


def test_a_bubble_of_the_lanes_tells_its_cause_when_it_is_pressed(page: ExplainPage) -> None:
    one = page.explained("file/0")
    (canvas,) = canvases(plain(page.lanes(one)))
    assert canvas["data-name"] == "explain-0"
    shown = page.cache.get(Path(canvas["data-address"]).stem)
    assert shown is not None
    assert shown.explainer is one.explainer
    gap = one.explainer.bubbles.gaps.longest(None, 1)[0]
    lane = one.timeline.schedule.shape.worker_index(gap.worker)
    card, _ = answer(page.cache, {"address": canvas["data-address"], "lane": lane, "from": gap.start, "to": gap.end})
    assert "Idle for 6: the memory limit holds back 0F0.4; next is 0B0.0." in words(plain(card))


def test_nothing_to_explain_is_said(broken: Schedule) -> None:
    assert "There is nothing to explain yet." in words(plain(ExplainPage(lambda: []).layout()))
    with pytest.raises(RecycleError, match="is not there to be compared"):
        ExplainPage(lambda: []).explained("file/0")
