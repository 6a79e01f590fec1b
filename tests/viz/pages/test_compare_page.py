"""The compare page: figures, the split, where two part, one axis for all, and what is said when it cannot be."""

from __future__ import annotations

from pathlib import Path

import pytest

from recycle import Schedule, Shape, simulate
from recycle.ir.families import one_f_one_b, zb_h1
from tests.viz.components import graphs, of_type, plain, words
from viz.analysis.differences import match
from viz.figures import delta as delta_module
from viz.figures.delta import delta_figure
from viz.figures.timeline import BAR_LIMIT, CONFIG
from viz.pages.compare_page import ComparePage
from viz.run import load_run
from viz.sources import schedule_source


@pytest.fixture
def page(healthy: Schedule, broken: Schedule) -> ComparePage:
    return ComparePage(lambda: [schedule_source(Path("healthy"), healthy), schedule_source(Path("broken"), broken)])


def test_two_plans_are_drawn_on_one_axis_with_the_differences_of_their_starts(page: ComparePage) -> None:
    component = plain(page.compare(["file/0", "file/1"]))
    drawn = graphs(component)
    assert [graph["id"] for graph in drawn] == [{"type": "compare-graph", "place": place} for place in range(3)]
    assert len({tuple(graph["figure"]["layout"]["xaxis"]["range"]) for graph in drawn}) == 1
    assert all(graph["config"] == CONFIG for graph in drawn)
    lane = drawn[2]["figure"]["data"]
    assert {trace["name"] for trace in lane} == {"Forward", "Backward", "Backward, weight", "Reduce and step"} - {
        "Backward, weight"
    }
    assert len({trace["marker"]["symbol"] for trace in lane}) == len(lane)  # never colour alone
    hovers = [text for trace in lane for text in trace["hovertext"]]
    assert "<b>1F1.0</b><br>on 1.1, then on 0.1<br>starts +1" in hovers


def test_the_parts_of_the_difference_and_the_first_divergence_are_told(page: ComparePage) -> None:
    component = plain(page.compare(["file/0", "file/1"]))
    texts = words(component)
    row = texts.index("extra work (re-routed)")
    assert texts[row + 1 : row + 4] == ["0", "1.2", "+1.2"]
    row = len(texts) - 1 - texts[::-1].index("makespan")
    assert texts[row + 1 : row + 4] == ["9", "11", "+2"]
    assert any("1F1.0 on 1.1 in the first; this worker has failed in the second" in text for text in texts)
    assert "+22.2%" in texts
    buttons = [button["id"] for button in of_type(component, "Button")]
    assert buttons == [{"type": "compare-show", "place": 0, "which": which} for which in range(2)]


def test_the_first_one_is_outlined_in_the_others_when_asked(page: ComparePage) -> None:
    plainly, outlined = (graphs(plain(page.compare(["file/0", "file/1"], ghost=ghost))) for ghost in (False, True))
    names = [[trace.get("name") for trace in graph["figure"]["data"]] for graph in outlined]
    assert ["before" in given for given in names] == [False, True, False]
    assert not any(trace.get("name") == "before" for graph in plainly for trace in graph["figure"]["data"])


def test_a_divergence_is_shown_where_it_lies(page: ComparePage) -> None:
    place = page.place_of(["file/0", "file/1"], "stage", 0, 0)
    assert (place["graph"], place["lane"]) == (0, 4)  # 1.1 comes fifth when peers lie side by side
    assert (place["from"], place["to"]) == (1.0, 2.0)
    assert place["begin"] < 1.0 < 2.0 < place["end"]


def test_the_same_twice_does_not_differ(page: ComparePage) -> None:
    texts = words(plain(page.compare(["file/0", "file/0"])))
    assert "They do the same at the same times." in texts


def test_plan_and_executed_step_are_compared_in_seconds(run_dir: Path) -> None:
    page = ComparePage(lambda: [load_run(run_dir)])
    component = plain(page.compare(page.operands.first_choice()))
    texts = words(component)
    assert "makespan (s)" in texts
    assert "the same" in texts
    assert any("1 unit = 0.0173 s" in text for text in texts)
    assert graphs(component)[0]["figure"]["layout"]["xaxis"]["title"]["text"] == "time (ms)"
    assert "They do the same at the same times." in texts


def test_what_cannot_be_compared_says_why(page: ComparePage) -> None:
    assert "Choose two or more to compare." in words(plain(page.compare(["file/0"])))
    assert any("is not there to be compared" in text for text in words(plain(page.compare(["file/0", "file/9"]))))
    alone = ComparePage(lambda: [])
    assert "There is nothing to compare yet." in words(plain(alone.layout()))


def test_at_most_four_are_compared(page: ComparePage) -> None:
    component = plain(page.compare(["file/0", "file/1", "file/0", "file/1", "file/0"]))
    assert "only the first 4 are compared" in words(component)
    assert len(graphs(component)) == 7


def test_large_schedules_go_to_the_canvas_whole() -> None:
    shape = Shape(16, 4, 20)
    files = [schedule_source(Path("a"), one_f_one_b(shape)), schedule_source(Path("b"), zb_h1(shape))]
    assert all(len(file.lanes) > BAR_LIMIT for file in files)
    page = ComparePage(lambda: files)
    component = plain(page.compare(["file/0", "file/1"]))
    canvases = [view for view in of_type(component, "Div") if view.get("className") == "lanes-view"]
    assert [(view["data-name"], view["data-linked"]) for view in canvases] == [
        ("compare-0", "compare"),
        ("compare-1", "compare"),
    ]
    assert {view["data-span"] for view in canvases} == {str(max(file.lanes.span for file in files))}
    shown = page.shelf.get(canvases[1]["data-address"].removeprefix("lanes/").removesuffix(".bin"))
    assert shown is not None
    assert shown.table.lanes == 64
    place = page.place_of(["file/0", "file/1"], "stage", 0, 0)
    worker = shape.worker_at(place["worker"])
    assert files[0].lanes.ordered("stage").workers[place["lane"]] == worker


def test_many_differences_are_drawn_as_the_least_and_the_most(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delta_module, "POINTS", 10)
    shape = Shape(1, 4, 8)
    a, b = simulate(one_f_one_b(shape)), simulate(zb_h1(shape))
    found = match(a, b)
    figure = delta_figure(a, b, found, a.makespan, 1.0, "")
    least, most = figure.data
    assert max(most.y) == found.delta.max()
    assert min(least.y) == found.delta.min()
