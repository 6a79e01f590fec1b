"""Compare, what-if and validate in a real browser: linked zoom, a worker failed by a press, a file that means harm."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest

from recycle import Schedule
from recycle.cli.view import _planner
from recycle.job import Job
from tests.viz.test_browser import FOREIGN, browser, pytestmark, wait
from viz.app import build_app, serve
from viz.dropped import MOST_BYTES
from viz.figures import palette
from viz.sources import schedule_source
from viz.what_if import WhatIf

__all__ = ["browser", "pytestmark"]
RANGES = """
return Array.from(document.querySelectorAll('.linked :is(.js-plotly-plot, .lanes-axes)')).map(g => recycle.axes(g).x)
"""
JOB = "[shape]\npipelines = 3\nranks = 2\nmicro_batches = 2\n"


@pytest.fixture(scope="module")
def address(healthy: Schedule, broken: Schedule) -> str:
    job = Job.from_toml(JOB)
    sources: list[Any] = [
        schedule_source(Path("whole.json"), healthy),
        schedule_source(Path("<b>broken</b>.json"), broken),
    ]
    app = build_app(sources, WhatIf(job, None, _planner(job)), is_example=True)
    ready, addresses = threading.Event(), []

    def on_ready(given: str) -> None:
        addresses.append(given)
        ready.set()

    threading.Thread(target=serve, args=(app, 0, on_ready), daemon=True).start()
    assert ready.wait(30)
    return addresses[0]


def press(browser: Any, selector: str, text: str) -> None:
    def found() -> Any:
        matching = [one for one in browser.find_elements("css selector", selector) if text in one.text]
        return matching[0] if matching else None

    element = wait(browser, found)
    browser.execute_script("arguments[0].scrollIntoView({block: 'center'})", element)
    element.click()


def text(browser: Any) -> str:
    return str(browser.find_element("tag name", "body").text)


def ready(browser: Any, *names: str) -> None:
    """Waits until the timelines are drawn."""
    script = "return arguments[0].every(name => window.recycle?.views.get(name)?.drawn)"
    wait(browser, lambda: browser.execute_script(script, list(names)))


def test_the_start_page_opens_the_comparison_and_its_graphs_zoom_together(browser: Any, address: str) -> None:
    browser.get(address)
    press(browser, ".start button", "Compare")
    ready(browser, "compare-0", "compare-1")
    wait(browser, lambda: len(browser.execute_script(RANGES)) == 3)
    before = browser.execute_script(RANGES)
    press(browser, "button.quiet", "Show it")
    wait(browser, lambda: browser.execute_script(RANGES)[0] != before[0])
    wait(browser, lambda: len({json.dumps(one) for one in browser.execute_script(RANGES)}) == 1)
    assert browser.find_elements("css selector", "b") == []  # a name is text
    assert browser.execute_script(FOREIGN, address) == []
    assert browser.get_log("browser") == []


SHADED = """
const view = recycle.views.get(arguments[0]), {table} = view, all = Array.from({length: table.length}, (_, i) => i);
return arguments[1].map(text => {
  const i = all.find(one => table.instruction(one) === text);
  return [table.label(i), table.describe(i, table.laneOf(i)).pop()];
});
"""
COLOUR = """
const [name, t, row] = arguments, view = recycle.views.get(name), {left, top, width, height} = view.place;
const {t0, t1, y0, y1} = view.view, x = left + (t - t0) / (t1 - t0) * width, y = top + (row - y0) / (y1 - y0) * height;
return [...view.context.getImageData(Math.round(x), Math.round(y), 1, 1).data.slice(0, 3)];
"""


def test_work_has_the_colour_of_how_much_later_it_starts(browser: Any, address: str) -> None:
    browser.get(address + "/?pages=compare")
    ready(browser, "compare-0", "compare-1")
    assert browser.execute_script(SHADED, "compare-1", ["0F0.0", "1F1.0", "1W1.0"]) == [
        ["F0", "starts as in whole.json"],
        ["F1.0›", "starts 1 later than in whole.json"],
        ["W1.0»", "starts 6 later than in whole.json"],
    ]
    later = [[int(fill[i : i + 2], 16) for i in (1, 3, 5)] for fill in (palette.LATER.fill, palette.LATER.hatch)]
    assert browser.execute_script(COLOUR, "compare-1", 2.12, 1.2) in later
    browser.find_element("tag name", "body").send_keys("t")  # of the page in sight
    listed = ".lanes-view[data-name=compare-0] .lanes-listing tbody tr"
    wait(browser, lambda: browser.find_elements("css selector", listed))
    press(browser, "label", "kind of work")
    wait(browser, lambda: not browser.find_elements("css selector", ".lanes-view[data-shades]"))
    ready(browser, "compare-1")
    wait(browser, lambda: browser.execute_script(SHADED, "compare-1", ["0F0.0"])[0][0] == "F0")
    assert browser.get_log("browser") == []


def test_what_a_search_finds_is_listed_with_why_it_starts_when_it_does(browser: Any, address: str) -> None:
    from selenium.webdriver.common.keys import Keys

    browser.get(address + "/?pages=schedules")
    ready(browser, "schedules-0", "schedules-1")
    browser.execute_script("recycle.use(recycle.views.get('schedules-1'))")
    search = browser.find_element("css selector", ".lanes-search")
    search.send_keys("kind:W stage:1", Keys.ENTER)
    wait(browser, lambda: "2 found." in text(browser))
    assert "Waited for 1B0.1 on 0.1 (before it in the program)" in text(browser)
    browser.execute_script("recycle.views.get('schedules-1').clear()")
    press(browser, ".bench-panel button.quiet", "Show it")
    wait(browser, lambda: browser.execute_script("return recycle.views.get('schedules-1').selected") >= 0)
    search.send_keys(" knd:W", Keys.ENTER)
    wait(browser, lambda: "knd is no field" in text(browser))
    assert browser.get_log("browser") == []


def test_the_panel_tells_of_the_timeline_in_use_and_a_link_opens_it(browser: Any, address: str) -> None:
    browser.get(address + "/?pages=schedules&panel=explain")
    ready(browser, "schedules-0", "schedules-1")
    wait(browser, lambda: "over the makespan of 9;" in text(browser))
    browser.execute_script("recycle.use(recycle.views.get('schedules-1'))")
    wait(browser, lambda: "over the makespan of 11;" in text(browser))
    headline = browser.find_element("id", "headline")
    wait(browser, lambda: headline.text.split("\n")[0].startswith("period 11"))
    press(browser, ".bench-tab", "Workers")
    wait(browser, lambda: "inner bubble" in text(browser))
    assert "over the makespan of" not in text(browser)
    browser.find_element("tag name", "body").send_keys("o")
    wait(browser, lambda: browser.execute_script("return document.documentElement.dataset.dock") == "below")
    browser.find_element("tag name", "body").send_keys("i")
    wait(browser, lambda: not browser.find_element("css selector", ".bench-dock").is_displayed())
    browser.get(address + "/?pages=schedules")  # where it stands is remembered
    ready(browser, "schedules-0")
    assert browser.execute_script("return document.documentElement.dataset.dock") == "shut"
    browser.execute_script("localStorage.clear()")
    assert browser.get_log("browser") == []


def test_lane_under_lane_and_a_selection_is_described_by_the_right_one(browser: Any, address: str) -> None:
    browser.get(address + "/?pages=compare")
    ready(browser, "compare-0", "compare-1")
    press(browser, "label", "lane under lane")
    ready(browser, "compare-all")
    view = "recycle.views.get('compare-all')"
    labels = browser.execute_script(f"return Array.from({view}.rows.order, lane => {view}.table.labels[lane])")
    assert labels[:4] == ["0.0 A", "0.0 B", "0.1 A", "0.1 B"]
    assert browser.execute_script(f"return {view}.view.y1") == 12
    for lane, expected in ((2, "1B0.0"), (3, "1F1.0")):
        browser.execute_script(f"{view}.select({view}.table.offsets[{lane}] + 1)")
        wait(browser, lambda: browser.execute_script(f"return {view}.links !== null"))
        assert browser.execute_script(f"return {view}.table.instruction({view}.selected)") == expected
        wait(browser, lambda expected=expected: expected == browser.find_element("css selector", ".selection h4").text)
        named = f"return {view}.links.outputs.map(i => {view}.table.labels[{view}.table.laneOf(i)].slice(-1))"
        assert set(browser.execute_script(named)) == {"AB"[lane % 2]}
    assert browser.get_log("browser") == []


def test_one_cursor_is_on_all_graphs_of_a_comparison(browser: Any, address: str) -> None:
    from selenium.webdriver.common.action_chains import ActionChains

    browser.get(address + "/?pages=compare")
    ready(browser, "compare-0", "compare-1")
    canvas = browser.find_elements("css selector", ".lanes-view[data-name=compare-0] .lanes-stage > canvas")[0]
    browser.execute_script("arguments[0].scrollIntoView()", canvas)
    ActionChains(browser).move_to_element(canvas).perform()
    lines = "return [...document.querySelectorAll('.lanes-cursor')].map(l => [l.style.display, l.style.transform])"
    wait(browser, lambda: len(browser.execute_script(lines)) == 3)
    assert {shown for shown, _ in browser.execute_script(lines)} == {"block"}
    assert len({place for _, place in browser.execute_script(lines)}) == 1


def test_a_pressed_worker_fails_the_address_says_so_and_undo_takes_it_back(browser: Any, address: str) -> None:
    browser.get(address + "/?fail=1.1")
    wait(browser, lambda: "Without 1.1" in text(browser))
    press(browser, ".workers button", "0.0")
    wait(browser, lambda: "Without 0.0, 1.1" in text(browser))
    wait(browser, lambda: "fail=0.0,1.1" in browser.current_url)
    press(browser, ".workers button", "0.1")
    wait(browser, lambda: "Without 0.0, 0.1, 1.1" in text(browser))
    wait(browser, lambda: browser.execute_script("return recycle.views.get('plans-all')?.ghost?.failed") == [0, 3])
    press(browser, ".workers button", "2.1")
    wait(browser, lambda: "no live worker is left for stage 1" in text(browser))
    press(browser, ".row button", "Undo")
    wait(browser, lambda: "fail=0.0,1.1" in browser.current_url)
    dead = (
        "const view = recycle.views.get('plans-all'); return view?.drawn && view.root.isConnected && view.table.failed"
    )
    wait(browser, lambda: browser.execute_script(dead) == [0, 3])
    browser.execute_script("recycle.views.get('plans-all').sendLane(3)")  # a press on the name of 1.1
    wait(browser, lambda: "fail=0.0" in browser.current_url and "1.1" not in browser.current_url.split("fail=")[1])
    assert browser.get_log("browser") == []


def test_a_file_that_means_harm_is_shown_as_text(browser: Any, address: str, tmp_path: Path, broken: Schedule) -> None:
    browser.get(address)
    press(browser, ".tab", "Validate")
    harm = "<img src=x onerror=\"document.title='harmed'\">"
    file = tmp_path / "<img src=x onerror=alert(1)>.json"
    Schedule.from_text(
        broken.shape, {**broken.text(), "0.0": "0F0.0 0B0.0 0F0.1 0F0.1 0B0.1"}, failed=["1.1"], metadata={"a": harm}
    ).save(file)
    wait(browser, lambda: browser.find_elements("css selector", "input[type=file]"))
    browser.find_element("css selector", "input[type=file]").send_keys(str(file))
    wait(browser, lambda: "Not valid" in text(browser))
    assert "<img src=x onerror=alert(1)>.json: Not valid" in text(browser)
    ready(browser, "validate-0")
    window = "const { t0, t1 } = recycle.views.get('validate-0').view; return [t0, t1];"
    before = browser.execute_script(window)
    press(browser, "button.quiet", "Show it")
    wait(browser, lambda: browser.execute_script(window) != before)
    framed = browser.execute_script("return recycle.views.get('validate-0').places")
    assert [place["lane"] for place in framed] == [0, 0]  # what is there twice, and where it was first
    assert "harmed" not in browser.title
    assert browser.find_elements("css selector", "img:not(.lanes-first > img)") == []
    assert browser.get_log("browser") == []


def test_a_file_beyond_the_limit_is_refused_in_words_and_stays_in_the_browser(
    browser: Any, address: str, tmp_path: Path
) -> None:
    browser.get(address + "/?pages=validate")
    with (tmp_path / "large.json").open("wb") as file:
        file.truncate(MOST_BYTES + 2**20)
    wait(browser, lambda: browser.find_elements("css selector", "input[type=file]"))
    browser.find_element("css selector", "input[type=file]").send_keys(str(tmp_path / "large.json"))
    wait(browser, lambda: "large.json: 33 MB is too large for the page (at most 32 MB)" in text(browser))
    assert browser.get_log("browser") == []


def test_back_leads_to_the_page_before(browser: Any, address: str) -> None:
    browser.get(address)
    press(browser, ".tab", "Compare")
    wait(browser, lambda: "pages=compare" in browser.current_url)
    press(browser, ".tab", "Validate")
    wait(browser, lambda: "pages=validate" in browser.current_url)
    for title in ("Compare", "Start"):
        browser.back()
        wait(browser, lambda title=title: browser.find_element("css selector", ".tab--selected").text == title)
    browser.forward()
    wait(browser, lambda: browser.find_element("css selector", ".tab--selected").text == "Compare")
    assert browser.get_log("browser") == []


def test_tabs_are_reached_and_opened_by_keyboard(browser: Any, address: str) -> None:
    browser.get(address)
    first = wait(browser, lambda: browser.find_elements("css selector", ".tab[role=tab]"))[0]
    browser.execute_script("arguments[0].focus()", first)
    names = [tab.text for tab in browser.find_elements("css selector", ".tab[role=tab]")]
    for _ in range(len(names) - 1):
        browser.switch_to.active_element.send_keys("\ue014")
    browser.switch_to.active_element.send_keys("\ue007")
    wait(browser, lambda: "Drop a schedule file here" in text(browser))
    selected = browser.find_elements("css selector", ".tab[role=tab][aria-selected=true]")
    assert [tab.text for tab in selected] == [names[-1]]
    assert browser.get_log("browser") == []


def test_a_mode_shows_the_window_and_the_selection_of_the_one_before_on_its_lanes(browser: Any, address: str) -> None:
    browser.get(address + "/?pages=schedules")
    ready(browser, "schedules-0", "schedules-1")
    browser.execute_script(
        "const view = recycle.views.get('schedules-1'); view.show({ t0: 0.5, t1: 4 });"
        "view.select(view.table.offsets[1]); recycle.use(view);"
    )
    wait(browser, lambda: browser.find_elements("css selector", ".selection h4"))
    chosen = browser.find_element("css selector", ".selection h4").text
    press(browser, ".tab", "Compare")
    ready(browser, "compare-0", "compare-1")
    in_sight = (
        "return [...document.querySelectorAll('.lanes-view')].filter(v => v.offsetParent).map(v => v.dataset.name)"
    )
    wait(browser, lambda: browser.execute_script(in_sight) == ["compare-0", "compare-1"])
    shown = "const { view, selected } = recycle.views.get(arguments[0]); return [view.t0, view.t1, selected]"
    *window, selected = browser.execute_script(shown, "compare-1")
    assert (window, selected > 0) == ([0.5, 4], True)
    assert browser.execute_script(shown, "compare-0") == [0.5, 4, -1]
    assert len(browser.find_elements("css selector", ".bench-dock")) == 1
    wait(browser, lambda: "against whole.json" in text(browser))  # the panel of the mode is open
    press(browser, ".bench-tab", "Selection")
    wait(browser, lambda: browser.find_element("css selector", ".selection h4").text == chosen)
    press(browser, ".tab", "Validate")  # which has no lanes until a file is dropped, so these stay
    wait(browser, lambda: "Drop a schedule file here" in text(browser))
    assert browser.execute_script(in_sight) == ["compare-0", "compare-1"]
    browser.execute_script("recycle.views.get('compare-1').show({ t0: 3, t1: 5 })")
    browser.back()
    wait(browser, lambda: "pages=compare" in browser.current_url)
    browser.back()
    wait(browser, lambda: browser.execute_script(in_sight) == ["schedules-0", "schedules-1"])
    press(browser, ".tab", "Plans and what-if")
    ready(browser, "plans-all")
    wait(browser, lambda: browser.execute_script(in_sight) == ["plans-all"])
    browser.execute_script("localStorage.clear()")
    assert browser.get_log("browser") == []


def test_a_server_that_is_gone_is_told_and_what_is_drawn_stays(browser: Any, address: str) -> None:
    def connect(is_connected: bool) -> None:
        conditions = {"offline": not is_connected, "latency": 0, "downloadThroughput": -1, "uploadThroughput": -1}
        browser.execute_cdp_cmd("Network.emulateNetworkConditions", conditions)

    browser.get(address + "/?pages=schedules")
    ready(browser, "schedules-0", "schedules-1")
    browser.execute_cdp_cmd("Network.enable", {})
    try:
        connect(False)
        press(browser, ".tab", "Compare")
        wait(browser, lambda: "The viewer's server does not answer" in text(browser))
        assert browser.execute_script("return recycle.views.get('schedules-1').root.offsetParent !== null")
        connect(True)
        press(browser, ".tab", "Validate")
        wait(browser, lambda: "does not answer" not in text(browser))
    finally:
        connect(True)
        browser.get_log("browser")
