"""The canvas in a real browser: its pixels are the model's, at each level of detail, light and dark."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from recycle import Schedule, Shape, Timeline, simulate
from recycle.ir.families import one_f_one_b
from tests.viz.canvas.page import COLUMN, PIXEL, VIEW, Page
from viz.figures import palette
from viz.figures.boxes import boxes
from viz.figures.raster import BUSY, utilisation
from viz.lanes import LaneTable

pytestmark = pytest.mark.browser


def rgb(colours: list[str]) -> Any:
    return np.array([[int(colour[i : i + 2], 16) for i in (1, 3, 5)] for colour in colours], dtype=float)


def test_every_box_has_its_colour_and_idle_time_has_none(page: Page, broken_timeline: Timeline) -> None:
    table = LaneTable.from_timeline(broken_timeline)
    for box in (box for box in boxes(table) if box.end > box.start):
        # near the upper left corner: no text there, and of stripes either colour may be
        t, y = box.start + 0.12 * (box.end - box.start), box.lane + 0.5 + box.top + 0.16 * (box.bottom - box.top)
        allowed = {box.paint.fill, box.paint.hatch} if box.rerouted else {box.paint.fill}
        assert page.colour(t, y) in allowed, (box, page.colour(t, y))
    assert page.colour(4.5, 0.5) == palette.BAND
    assert page.complaints == []


def test_a_failed_lane_is_striped_and_rerouted_work_is_striped_and_bordered(page: Page) -> None:
    along = {page.colour(1.0 + step / 40, 3.5) for step in range(40)}
    assert along == {palette.FAILURE_BAND, palette.FAILURE_HATCH}
    rerouted = {page.colour(2.1 + step / 60, 1.2) for step in range(40)}
    assert rerouted == {palette.FORWARD.fill, palette.FORWARD.hatch}
    x, y = page.at(2.5, 1 + 0.5 - 0.4)
    assert page(PIXEL, [x, y + 0.6]) == palette.INK


def test_bands_hold_the_exact_shares_of_time(opened: Callable[..., Page]) -> None:
    schedule = one_f_one_b(Shape(pipelines=64, ranks=8, micro_batches=64))
    table = LaneTable.from_timeline(simulate(schedule))
    page = opened(schedule)
    assert page.show(t0=0.0, t1=table.span, y0=0, y1=table.lanes) == 0
    width = page(f"() => Math.round({VIEW}.place.width)")
    shares = utilisation(table, table.span, width, table.lanes)[0]
    for x in (width // 50, width // 7, width // 2, width - width // 50):
        column = rgb(page(COLUMN, x))
        edge = 64 / len(column)  # a pixel of ground above the band of each pipeline
        work = sum(
            share * rgb([palette.PAINTS[paint].fill])[0] for paint, share in zip(BUSY, shares[:, x], strict=True)
        )
        ground = rgb([palette.BAND])[0]
        expected = edge * ground + (1 - edge) * (work + (1 - shares[:, x].sum()) * ground)
        assert column.mean(axis=0) == pytest.approx(expected, abs=1.0)
    assert page.complaints == []


def test_levels_of_detail_follow_the_zoom(opened: Callable[..., Page]) -> None:
    schedule = one_f_one_b(Shape(pipelines=64, ranks=8, micro_batches=64))
    page = opened(schedule)
    assert [
        page.show(t0=0, t1=300, y0=0, y1=512),
        page.show(t0=0, t1=60, y0=0, y1=100),
        page.show(t0=20, t1=50, y0=0, y1=16),
    ] == [0, 1, 2]


def test_dark_pages_keep_the_colours_of_work_and_change_the_ground(
    opened: Callable[..., Page], broken: Schedule
) -> None:
    page = opened(broken, color_scheme="dark")
    assert page.colour(0.12, 0.25) == palette.FORWARD.fill
    assert rgb([page.colour(4.5, 0.5)]).mean() < 80


def test_before_the_lanes_are_there_the_servers_picture_stands_in_their_place(
    opened: Callable[..., Page], broken: Schedule
) -> None:
    page = opened(broken)
    ticks = "nodes => nodes.map(tick => [tick.textContent, Math.round(tick.getBoundingClientRect().x)])"
    drawn = page.page.eval_on_selector_all(".lanes-axes .tick", ticks)
    plot = page.page.evaluate(f"""() => {{
      const box = {VIEW}.canvas.getBoundingClientRect(), {{ left, top, width, height }} = {VIEW}.place;
      return [box.x + left, box.y + top, width, height];
    }}""")
    assert not page.page.is_visible(".lanes-first")
    page.page.route("**/lanes/*.bin", lambda route: None)  # never answered
    page.page.goto(page.address)
    page.page.wait_for_function("() => document.querySelector('.lanes-first img')?.naturalWidth === 1200")
    first = page.page.locator(".lanes-first").bounding_box()
    assert [first[key] for key in ("x", "y", "width", "height")] == pytest.approx(plot, abs=1)
    early = page.page.eval_on_selector_all(".lanes-first .tick", ticks)
    assert [text for text, _ in early] == [text for text, _ in drawn]
    assert [x for _, x in early] == pytest.approx([x for _, x in drawn], abs=2)
    names = page.page.eval_on_selector_all(".lanes-first .name", "nodes => nodes.map(name => name.textContent)")
    assert names == ["0.0", "0.1", "1.0", "1.1", "2.0", "2.1"]


def test_without_a_canvas_the_servers_picture_stays(opened: Callable[..., Page], broken: Schedule) -> None:
    page = opened(broken)
    page.page.add_init_script("HTMLCanvasElement.prototype.getContext = () => null")
    page.page.goto(page.address)
    page.page.wait_for_function("() => document.querySelector('.lanes-first img')?.naturalWidth > 400")
    page.page.wait_for_function("() => document.querySelector('.lanes-status').textContent.includes('no canvas')")
    assert page.page.is_visible(".lanes-first")
    assert page.complaints == []


def test_the_timeline_says_what_it_shows_to_a_screen_reader(page: Page) -> None:
    canvas = page.page.locator(".lanes-stage > canvas")
    assert canvas.get_attribute("role") == "img"
    assert "failed: 1.1; 6 instructions re-routed" in canvas.get_attribute("aria-label")
    assert page.page.locator(".lanes-status").get_attribute("aria-live") == "polite"
    page.page.keyboard.press("?")
    assert page.page.locator("dialog.lanes-help").is_visible()
    page.page.keyboard.press("Escape")
    assert not page.page.locator("dialog.lanes-help").is_visible()


def test_nothing_comes_from_elsewhere_and_no_graph_offers_to_upload(page: Page) -> None:
    foreign = page(
        "own => performance.getEntriesByType('resource').map(r => r.name).filter(n => !n.startsWith(own))", page.address
    )
    assert foreign == []
    assert page("() => document.querySelectorAll('.modebar-btn').length") == 0


def test_the_memory_strip_follows_the_selection_on_the_same_axis(page: Page) -> None:
    assert not page.page.locator(".lanes-memory").is_visible()
    page.page.keyboard.press(".")
    page.page.keyboard.press("m")
    page.page.wait_for_function(f"() => {VIEW}.memory && document.querySelector('.lanes-memory canvas')")
    page.page.wait_for_function(f"() => !{VIEW}.asked")
    label = page.page.get_attribute(".lanes-memory canvas", "aria-label")
    assert label == "Activations held by 0.0: most 2 at 1 by 0F0.1"
    # of the peak's height (2 of 2.16): half until 1, all until 7, half until 11
    filled = """([t, share]) => {
      const strip = document.querySelector('.lanes-memory canvas'), v = VIEW.view, p = VIEW.place;
      const high = strip.height - 24;
      const x = p.left + (t - v.t0) / (v.t1 - v.t0) * p.width, y = 18 + high * (1 - share * 2 / 2.16);
      const ground = strip.getContext('2d').getImageData(p.left + p.width - 3, 20, 1, 1).data.slice(0, 3).join();
      return strip.getContext('2d').getImageData(Math.round(x), Math.round(y), 1, 1).data.slice(0, 3).join() !== ground;
    }""".replace("VIEW", VIEW)
    seen = [[page(filled, [t, share]) for share in (0.25, 0.75)] for t in (0.5, 4.0, 9.0, 11.02)]
    assert seen == [[True, False], [True, True], [True, False], [False, False]]


def test_what_all_workers_hold_takes_the_place_of_their_work(page: Page) -> None:
    page.page.keyboard.press("Shift+M")
    page.page.wait_for_function(f"() => {VIEW}.held?.found && !{VIEW}.asked")
    assert page.page.get_attribute("[data-action=held]", "aria-pressed") == "true"
    found = page(f"() => ({{ from: [...{VIEW}.held.found.from.slice(0, 4)], most: {VIEW}.held.found.most }})")
    assert found["from"] == [1, 2, 2, 1]  # 0F0.0, 0F0.1, 0B0.0, 0B0.1 of worker 0.0
    assert found["most"] == pytest.approx(2.1)
    assert page.colour(4.0, 0.6) == page.colour(4.0, 0.4) != palette.BAND  # two of 2.1 are held while it waits
    assert page.colour(0.4, 0.4) == palette.BAND  # one, in the lower half
    page.page.keyboard.press("Shift+M")
    page.page.wait_for_function(f"() => !{VIEW}.asked && !{VIEW}.showsHeld")
    assert page.colour(0.12, 0.2) == palette.FORWARD.fill
