"""Looking around by pointer and keys: what they select and show, and that zooming asks the server for nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from recycle import Schedule, Shape, simulate
from recycle.ir.families import one_f_one_b
from tests.viz.canvas.page import COLUMN, VIEW, Page
from viz.figures import palette
from viz.lanes import LaneTable

pytestmark = pytest.mark.browser


def rgb(colours: list[str]) -> Any:
    return np.array([[int(colour[i : i + 2], 16) for i in (1, 3, 5)] for colour in colours], dtype=float)


def test_zoom_pan_hover_and_grouping_ask_the_server_for_nothing(page: Page) -> None:
    page.page.mouse.move(*page.point(1.5, 0.5))
    for key in "wwdasgghh0pr":
        page.page.keyboard.press(key)
        page.page.wait_for_timeout(40)
    page.page.keyboard.down("Control")
    page.page.mouse.wheel(0, -200)
    page.page.keyboard.up("Control")
    x, y = page.point(3.0, 1.0)
    page.page.mouse.move(x, y)
    page.page.mouse.down()
    page.page.mouse.move(x + 150, y + 60, steps=4)
    page.page.mouse.up()
    page.page.wait_for_timeout(700)
    assert page.requests == []
    assert page.complaints == []


def test_hover_names_the_operation_under_the_pointer(page: Page) -> None:
    page.page.mouse.move(*page.point(2.5, 1.5))
    tip = page.page.inner_text(".lanes-tip").splitlines()
    assert tip[:5] == [
        "1F1.0", "forward", "worker 0.1, stage 1", "start 2, end 3, takes 1", "home pipeline 1, re-routed to this peer"
    ]  # fmt: skip
    page.page.mouse.move(*page.point(4.0, 0.5))
    assert page.page.inner_text(".lanes-tip").splitlines() == ["worker 0.0: idle", "from 2 to 5, 3"]
    page.page.mouse.move(*page.point(4.0, 3.5))
    assert page.page.inner_text(".lanes-tip").splitlines() == ["worker 1.1: has failed"]


def test_a_movement_of_the_pointer_styles_the_page_once(page: Page) -> None:
    metrics = page.page.context.new_cdp_session(page.page)
    metrics.send("Performance.enable")

    def styled() -> float:
        found = metrics.send("Performance.getMetrics")["metrics"]
        return next(one["value"] for one in found if one["name"] == "RecalcStyleCount")

    x, y = page.point(0.5, 0.5)
    page.page.mouse.move(x, y)
    page.page.wait_for_timeout(300)
    before, moves = styled(), 40
    for step in range(moves):
        page.page.mouse.move(x + 5 * step, y)
        page("() => 0")
    assert styled() - before < 1.5 * moves


def test_a_click_tells_what_was_needed_and_a_gap_why(page: Page, broken: Schedule) -> None:
    page.page.mouse.click(*page.point(2.5, 1.5))
    page.page.wait_for_selector(".selection")
    assert page.page.inner_text(".selection h4") == "1F1.0"
    rows = [row.split("\t") for row in page.page.inner_text(".selection tbody").splitlines()]
    assert [row[:2] + row[3:] for row in rows] == [
        ["1F0.0", "0.1", "2", "none: waited for this"],
        ["0F1.0", "1.0", "1", "1"],
    ]
    page.page.wait_for_function(f"() => {VIEW}.links")
    table = LaneTable.from_timeline(simulate(broken))
    linked = page(f"() => {VIEW}.links")
    assert linked["memory"]["worker"] == "0.1"
    names = {key: [str(table.instruction(i)) for i in linked[key]] for key in ("inputs", "outputs")}
    assert names == {"inputs": ["0F1.0"], "outputs": ["1I1.0"]}
    page.page.mouse.click(*page.point(4.0, 0.5))
    page.page.wait_for_function("() => document.querySelector('.selection h4').textContent.includes('idle')")
    assert "0B0.0 waits for 1B0.0 on 0.1, which ends at 5." in page.page.inner_text(".selection")


def test_keys_walk_along_lanes_bubbles_and_dependencies(page: Page) -> None:

    def press(*keys: str) -> str:
        for key in keys:
            page.page.keyboard.press(key)
        return page.status().split(";")[0]

    assert press(".") == "0F0.0"
    assert press(".", ".") == "0B0.0"
    assert press(",") == "0F0.1"
    assert press("ArrowDown") == "1F0.0"
    page.page.wait_for_function(f"() => {VIEW}.links && {VIEW}.links.inputs.length")
    assert press("[") == "0F0.0"
    assert press("b") == "worker 0.0 idle from 2 to 5"
    assert press("Escape") == ""
    page.page.keyboard.press("/")
    page.page.keyboard.type("kind:w mb:1.1 is:rerouted")
    page.page.keyboard.press("Enter")
    assert page.status().startswith("1 of 1: 1W1.1")
    page.page.keyboard.type("w")
    assert page.page.input_value(".lanes-search").endswith("w")
    page.page.fill(".lanes-search", "nonsense:1")
    page.page.keyboard.press("Enter")
    assert page.status().startswith("nonsense:1: nonsense is no field; known are kind, mb, stage")
    page.page.keyboard.press("Escape")
    assert press("Escape", "r").startswith("0 to 11, 6 rows: busy 54.5 %, bubble 45.5 %")
    assert page.complaints == []


def test_what_is_in_view_is_a_table_to_read_and_to_copy(page: Page) -> None:
    assert page.page.locator(".lanes-listing").count() == 0
    page.page.keyboard.press("t")
    page.page.wait_for_selector(".lanes-listing tbody tr")
    assert page.page.get_attribute("[data-action=table]", "aria-pressed") == "true"
    assert page.page.get_attribute(".lanes-listing", "aria-label") == "Table of what is in view"
    assert page.page.inner_text(".lanes-listing caption") == "37 operations from 0 to 11."
    page.show(t0=2.1, t1=2.9, y0=0, y1=2)
    page.page.wait_for_function("() => document.querySelectorAll('.lanes-listing tbody tr').length === 1")
    cells = page.page.locator(".lanes-listing tbody tr").first.inner_text().split("\t")
    assert cells == ["0.1", "1F1.0", "forward", "1", "2", "3", "1", "re-routed, critical path"]
    head = page.page.locator(".lanes-listing thead th").all_inner_texts()
    assert head == ["Worker", "Instruction", "Kind", "Stage", "Start", "End", "Takes", "Marks"]
    page.page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page.page.click(".lanes-listing button")
    page.page.wait_for_function(f"() => {VIEW}.status.textContent === 'copied'")
    copied = page("() => navigator.clipboard.readText()").splitlines()
    assert [line.split("\t") for line in copied] == [head, cells]
    page.page.keyboard.press("t")
    page.page.wait_for_function("() => !document.querySelector('.lanes-listing')")
    assert page.complaints == []


def test_the_table_says_what_it_leaves_out(opened: Callable[..., Page]) -> None:
    page = opened(one_f_one_b(Shape(pipelines=16, ranks=4, micro_batches=16)))
    page.page.keyboard.press("t")
    page.page.wait_for_selector(".lanes-listing tbody tr")
    said = page.page.inner_text(".lanes-listing caption")
    total = page(f"() => {VIEW}.table.length")
    assert said.startswith(f"{total:,} operations from 0 to ")
    assert said.endswith(f"; the first 200, {total - 200:,} are left out: zoom in to see them.")
    assert page.page.locator(".lanes-listing tbody tr").count() == 200


def test_lanes_by_stage_and_folded_groups(page: Page) -> None:
    page.page.keyboard.press("g")
    page.page.wait_for_function(f"() => {VIEW}.rows.grouping === 'stage' && !{VIEW}.asked")
    assert page(f"() => Array.from({VIEW}.rows.order, lane => {VIEW}.table.labels[lane])") == [
        "0.0", "1.0", "2.0", "0.1", "1.1", "2.1"
    ]  # fmt: skip
    assert page.colour(1.5, 4.5) in (palette.FAILURE_BAND, palette.FAILURE_HATCH)
    page.page.keyboard.press("h")
    page.page.wait_for_function(f"() => {VIEW}.rows.count === 2 && !{VIEW}.asked")
    # at 5.5 two of the three workers of stage 0 run the input half of a backward
    x, _ = page.at(5.5, 0)
    column = page(COLUMN, int(x))
    upper = column[: len(column) // 2]
    assert sum(colour == palette.BACKWARD_INPUT.fill for colour in upper) / len(upper) == pytest.approx(2 / 3, abs=0.03)


def test_the_first_worker_of_a_group_can_be_selected_by_its_name(page: Page) -> None:
    left, middle = page.point(page(f"() => {VIEW}.view.t0"), 0.5)
    page.page.mouse.click(left - 12, middle)
    page.page.wait_for_function(f"() => {VIEW}.status.textContent === 'worker 0.0'")
    rows = page(f"() => {VIEW}.rows.count")
    page.page.mouse.click(left - page(f"() => {VIEW}.place.left") + 12, middle)  # the name of the pipeline
    page.page.wait_for_function(f"rows => {VIEW}.rows.count < rows", arg=rows)


def test_a_micro_batch_is_shown_end_to_end_by_one_key(page: Page) -> None:
    page(f"() => {VIEW}.select(recycle.search({VIEW}.table, '1F1.0')[0])")
    page.page.keyboard.press("u")
    assert page.status() == "Micro-batch 1.0: 6 instructions from 0 to 10"
    flow = page(f"() => {VIEW}.flow.map(i => {VIEW}.table.instruction(i))")
    assert flow == ["0F1.0", "1F1.0", "1I1.0", "0I1.0", "0W1.0", "1W1.0"]
    page.page.wait_for_function(f"() => !{VIEW}.asked")
    assert page.colour(2.12, 1.2) == palette.FORWARD.fill
    assert rgb([page.colour(1.12, 0.2)]).mean() > rgb([palette.FORWARD.fill]).mean() + 60  # another one is pale
    page.page.keyboard.press("u")
    page.page.wait_for_function(f"() => !{VIEW}.asked && !{VIEW}.flow")
    assert page.colour(1.12, 0.2) == palette.FORWARD.fill
    page.page.keyboard.press("Escape")
    page.page.keyboard.press("u")
    assert page.status() == "Select an instruction of a micro-batch first."


def test_a_drag_along_the_axis_marks_a_range_and_tells_how_it_is_spent(page: Page) -> None:
    (x0, y), (x1, _) = page.point(2.0, 0), page.point(5.0, 0)
    page.page.mouse.move(x0, y - 6)
    page.page.mouse.down()
    page.page.mouse.move((x0 + x1) / 2, y - 6)
    page.page.mouse.move(x1, y - 6)
    page.page.mouse.up()
    found = page(f"() => {VIEW}.range")
    assert [found["t0"], found["t1"]] == pytest.approx([2, 5], abs=0.03)
    assert page(f"() => {VIEW}.view.t0") < 0  # nothing was zoomed
    page.page.wait_for_function(
        "() => /^From (2|1.9|2.0)/.test(document.querySelector('[data-panel=view] .hint')?.textContent)"
    )
    page.page.keyboard.press("Escape")
    assert page(f"() => {VIEW}.range") is None


def test_the_window_before_comes_back(page: Page) -> None:
    def window() -> list[float]:
        found = page(f"() => {VIEW}.view")
        return [found[key] for key in ("t0", "t1", "y0", "y1")]

    whole = window()
    page.show(t0=2, t1=4, y0=1, y1=3)
    near = window()
    page(f"() => {{ {VIEW}.leftAt = 0; }}")  # as long ago as one may think
    page.show(t0=2.5, t1=3)
    page.page.keyboard.press("z")
    assert window() == pytest.approx(near)
    page.page.keyboard.press("z")
    assert window() == pytest.approx(whole)
    page.page.keyboard.press("z")
    assert page.status() == "Nothing was zoomed or moved before."


def test_a_box_drawn_by_hand_shows_whole_rows(page: Page) -> None:
    (x0, y0), (x1, y1) = page.point(2.0, 1.3), page.point(6.0, 3.6)
    page.page.mouse.move(x0, y0)
    page.page.mouse.down()
    page.page.mouse.move(x1, y1, steps=4)
    page.page.mouse.up()
    page.page.wait_for_function(f"() => {VIEW}.view.t0 > 1 && !{VIEW}.asked && {VIEW}.view.y0 === 1")
    assert page(f"() => {VIEW}.view.y1") == 4


def test_the_tooltip_follows_what_moves_below_a_resting_pointer(page: Page) -> None:
    page.page.mouse.move(*page.point(2.5, 1.5))
    assert page.page.inner_text(".lanes-tip").startswith("1F1.0")
    page.page.keyboard.press("g")  # by stage: the second row is worker 1.0 now
    page.page.wait_for_function(f"() => {VIEW}.rows.grouping === 'stage' && !{VIEW}.asked")
    page.page.wait_for_function("() => document.querySelector('.lanes-tip').textContent.includes('worker 1.0')")


@pytest.mark.parametrize(
    ("shape", "width", "height"),
    [
        (Shape(3, 4, 6), 1280, 800),
        (Shape(32, 8, 8), 2560, 1440),
        (Shape(96, 16, 2), 1280, 800),
        pytest.param(Shape(3, 4, 6), 2560, 1440, marks=pytest.mark.soak),
        pytest.param(Shape(32, 8, 8), 1280, 800, marks=pytest.mark.soak),
        pytest.param(Shape(96, 16, 2), 2560, 1440, marks=pytest.mark.soak),
    ],
)
def test_lanes_and_what_a_press_tells_are_in_sight_together(
    opened: Callable[..., Page], shape: Shape, width: int, height: int
) -> None:
    page = opened(one_f_one_b(shape), size={"width": width, "height": height})
    page.page.keyboard.press("ArrowDown")
    page.page.keyboard.press("b")
    page.page.wait_for_selector(".selection")
    page.page.wait_for_function(f"() => !{VIEW}.asked")
    names = [".bar", ".lanes-tools", ".lanes-minimap", ".lanes-stage", ".legend", ".selection"]
    places = page(
        """names => names.map(name => {
      const { left, top, right, bottom } = document.querySelector(name).getBoundingClientRect();
      return [name, left, top, right, bottom];
    })""",
        names,
    )
    for name, left, top, right, bottom in places:
        assert 0 <= left < right <= width, name
        assert 0 <= top < bottom <= height, name
    (_, _, top, _, bottom) = next(place for place in places if place[0] == ".lanes-stage")
    assert bottom - top > 0.7 * height or shape.worker_count < 64


def test_a_worker_that_is_kept_on_top_stays_there_in_a_link(page: Page) -> None:
    page(f"() => {VIEW}.select({VIEW}.table.offsets[4])")
    page.page.keyboard.press("k")
    order = f"() => Array.from({VIEW}.rows.order, lane => {VIEW}.table.labels[lane])"
    assert page(order) == ["2.0", "0.0", "0.1", "1.0", "1.1", "2.1"]
    assert page(f"() => {VIEW}.rows.groups.map(group => [group.name, group.size])")[0] == ["pinned", 1]
    page(f"() => {VIEW}.select({VIEW}.table.offsets[1])")
    page.page.keyboard.press("k")
    assert page(order)[:3] == ["2.0", "0.1", "0.0"]
    page.page.wait_for_function("() => location.search.includes('pins=4.1')")
    page.page.reload()
    page.page.wait_for_selector(".lanes-view[data-drawn]")
    assert page(order)[:3] == ["2.0", "0.1", "0.0"]
    page.page.keyboard.press("k")  # the selection came with the link
    assert page(order)[:3] == ["2.0", "0.0", "0.1"]


def test_what_a_selection_waited_for_can_be_read_without_scrolling_sideways(opened: Callable[..., Page]) -> None:
    page = opened(one_f_one_b(Shape(3, 4, 6)), size={"width": 1280, "height": 800})
    page(f"() => {VIEW}.select({VIEW}.table.offsets[5] + 3)")
    page.page.wait_for_selector(".selection tbody tr")
    table = "document.querySelector('.selection .facts')"
    assert page(f"() => {table}.scrollWidth - {table}.clientWidth") <= 0
