"""The compare page: figures, the split, where two part, one axis for all, and what is said when it cannot be."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from dash import Dash, html

from recycle import Schedule, Shape
from recycle.ir.families import one_f_one_b, zb_h1
from tests.viz.components import canvases, of_type, plain, words
from viz.lanes import LaneTable
from viz.pages.compare_page import ComparePage
from viz.run_files import load_run
from viz.sources import schedule_source

KEYS = ["file/0", "file/1"]


@pytest.fixture
def page(healthy: Schedule, broken: Schedule) -> ComparePage:
    return ComparePage(lambda: [schedule_source(Path("healthy"), healthy), schedule_source(Path("broken"), broken)])


def table_of(page: ComparePage, address: str) -> LaneTable:
    shown = page.cache.get(Path(address).stem)
    return shown.table


def shown(component: Any) -> list[tuple[str, Any]]:
    """Where the buttons of a component lead: the place of the timeline, and places in it."""
    buttons = of_type(plain(component), "Button")
    return [(button["data-graph"], json.loads(button["data-places"])) for button in buttons]


def test_two_plans_are_drawn_on_one_axis_with_the_differences_of_their_starts(page: ComparePage) -> None:
    views = canvases(plain(page.lanes(KEYS)))
    assert [(view["data-name"], view["data-linked"]) for view in views] == [
        ("compare-0", "compare"),
        ("compare-1", "compare"),
    ]
    assert {view["data-span"] for view in views} == {"11.0"}


def test_each_operation_has_how_much_later_it_starts(page: ComparePage) -> None:
    first, second = canvases(plain(page.lanes(KEYS)))
    assert "data-shades" not in first
    (shade,) = json.loads(second["data-shades"])
    content = page.shades.get(Path(shade["address"]).stem)
    table, found = table_of(page, second["data-address"]), np.frombuffer(content, "<f4")
    named = {str(table.instruction(i)): float(found[i]) for i in range(len(table))}
    assert named["1F1.0"] == 1.0
    assert named["0F0.0"] == 0.0
    assert named["0W1.0"] == 3.0  # in the fault-free plan the later half of its whole backward
    assert shade["title"] == "healthy"
    assert shade["edges"] == [0.01 * 9.0, max(abs(v) for v in named.values() if v == v) / 2]
    assert [paint["key"] for paint in shade["paints"]][2] == "unchanged"
    (kinds,) = json.loads(canvases(plain(page.lanes(KEYS, "kind")))[1]["data-shades"])
    assert (shade["is_shaded"], kinds["is_shaded"], kinds["address"]) == (True, False, shade["address"])


def test_the_differences_are_served_once_and_for_ever(page: ComparePage) -> None:
    app = Dash("test")
    app.layout = html.Div()
    page.register(app)
    (shade,) = json.loads(canvases(plain(page.lanes(KEYS)))[1]["data-shades"])
    answer = app.server.test_client().get("/" + shade["address"])
    assert len(answer.data) == 4 * len(page.compared(KEYS).tables[1])
    assert "immutable" in answer.headers["Cache-Control"]
    assert app.server.test_client().get("/shades/0.bin").status_code == 404


def test_lane_under_lane_is_one_canvas_with_room_for_all(page: ComparePage) -> None:
    component = plain(page.lanes(KEYS, "later", "interleaved"))
    (view,) = canvases(component)
    assert len(json.loads(view["data-with"])) == 1
    assert [shade and shade["title"] for shade in json.loads(view["data-shades"])] == [None, "healthy"]
    assert next(part for part in of_type(component, "Div") if part.get("className") == "lanes")["style"] == {
        "--lanes": 12
    }
    first, *_ = shown(page.compare(KEYS, "interleaved"))
    assert first == ("0", [[2 * 3, 1.0, 2.0]])  # of the fourth worker the first one's lane


def test_lanes_of_other_workers_are_not_laid_under_each_other(healthy: Schedule) -> None:
    other = schedule_source(Path("other"), one_f_one_b(Shape(2, 2, 2)))
    page = ComparePage(lambda: [schedule_source(Path("healthy"), healthy), other])
    component = plain(page.lanes(KEYS, "later", "interleaved"))
    assert any("have other workers" in text for text in words(component))
    assert len(canvases(component)) == 2


def test_the_parts_of_the_difference_and_the_first_divergence_are_shown(page: ComparePage) -> None:
    component = plain(page.compare(KEYS))
    texts = words(component)
    row = texts.index("extra work (re-routed)")
    assert texts[row + 1 : row + 4] == ["0", "1.2", "+1.2"]
    row = len(texts) - 1 - texts[::-1].index("makespan")
    assert texts[row + 1 : row + 4] == ["9", "11", "+2"]
    assert any(
        "worker 1.1: the first runs 1F1.0, the second runs nothing, as the worker has failed" in text for text in texts
    )
    assert "+22.2 %" in texts
    assert len(shown(page.compare(KEYS))) == 2


def test_the_half_of_a_whole_backward_that_starts_late_is_named() -> None:
    """Worker 0.0 of ZB-H1 runs the weight gradient of its last micro-batch after the next input gradient."""
    shape = Shape(1, 4, 8)
    files = [schedule_source(Path("whole"), one_f_one_b(shape)), schedule_source(Path("split"), zb_h1(shape))]
    page = ComparePage(lambda: files)
    texts = words(plain(page.compare(KEYS)))
    assert "the weight half of 3B0.0 on 0.3 starts" in " ".join(texts)
    assert any(text.endswith("(weight half)") for text in texts)


def test_the_first_one_is_outlined_in_the_others_when_asked(page: ComparePage) -> None:
    plainly, outlined = (canvases(plain(page.lanes(KEYS, ghost=ghost))) for ghost in (False, True))
    assert [view.get("data-ghost") for view in plainly] == [None, None]
    assert [view.get("data-ghost") for view in outlined] == [None, outlined[0]["data-address"]]


def test_plan_and_executed_step_are_compared_in_the_unit_of_their_axis(run_dir: Path) -> None:
    page = ComparePage(lambda: [load_run(run_dir)])
    keys = page.operands.first_choice()
    texts = words(plain(page.compare(keys)))
    assert "per live worker (ms)" in texts
    assert "the same" in texts
    assert any("1 unit = 0.0173 s" in text for text in texts)
    assert {view["data-word"] for view in canvases(plain(page.lanes(keys)))} == {"ms"}
    assert "They do the same at the same times." in texts


def test_what_cannot_be_compared_says_why(page: ComparePage) -> None:
    assert "Choose two or more to compare." in words(plain(page.lanes(["file/0"])))
    assert any("is not there to be compared" in text for text in words(plain(page.lanes(["file/0", "file/9"]))))
    assert page.compare(["file/0"]) == page.compare(["file/0", "file/9"]) == []
    alone = ComparePage(lambda: [])
    assert "There is nothing to compare yet." in words(plain(alone.layout()))


def test_the_answer_does_not_grow_with_the_schedules() -> None:
    def answer(shape: Shape) -> int:
        files = [schedule_source(Path("a"), one_f_one_b(shape)), schedule_source(Path("b"), zb_h1(shape))]
        page = ComparePage(lambda: files)
        component = [plain(page.lanes(KEYS, ghost=True)), plain(page.compare(KEYS))]
        assert len(page.compared(KEYS).tables[1]) > 3 * shape.stages * shape.global_micro_batches
        return len(json.dumps(component))

    assert answer(Shape(16, 16, 40)) < 1.2 * answer(Shape(4, 4, 60))
