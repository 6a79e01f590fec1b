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
from viz.sources import schedule_source
from viz.what_if import WhatIf

__all__ = ["browser", "pytestmark"]
RANGES = """
return Array.from(document.querySelectorAll('.linked .js-plotly-plot')).map(g => g.layout.xaxis.range)
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


def test_the_start_page_opens_the_comparison_and_its_graphs_zoom_together(browser: Any, address: str) -> None:
    browser.get(address)
    press(browser, ".start button", "Compare")
    wait(browser, lambda: len(browser.execute_script(RANGES)) == 3)
    before = browser.execute_script(RANGES)
    press(browser, "button.quiet", "Show it")
    wait(browser, lambda: browser.execute_script(RANGES)[0] != before[0])
    wait(browser, lambda: len({json.dumps(one) for one in browser.execute_script(RANGES)}) == 1)
    assert browser.find_elements("css selector", "b") == []  # a name is text
    assert browser.execute_script(FOREIGN, address) == []
    assert browser.get_log("browser") == []


def test_a_pressed_worker_fails_the_address_says_so_and_undo_takes_it_back(browser: Any, address: str) -> None:
    browser.get(address + "/?pages=plans&fail=1.1")
    wait(browser, lambda: "Without 1.1" in text(browser))
    press(browser, ".workers button", "0.0")
    wait(browser, lambda: "Without 0.0, 1.1" in text(browser))
    wait(browser, lambda: browser.current_url.endswith("&fail=0.0,1.1"))
    press(browser, ".workers button", "0.1")
    wait(browser, lambda: "Without 0.0, 0.1, 1.1" in text(browser))
    press(browser, ".workers button", "2.1")
    wait(browser, lambda: "no live worker is left for stage 1" in text(browser))
    press(browser, ".row button", "Undo")
    wait(browser, lambda: browser.current_url.endswith("&fail=0.0,1.1"))
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
    wait(browser, lambda: len(browser.execute_script(RANGES)) == 1)
    before = browser.execute_script(RANGES)
    press(browser, "button.quiet", "Show it")
    wait(browser, lambda: browser.execute_script(RANGES) != before)
    assert "harmed" not in browser.title
    assert browser.find_elements("css selector", "img") == []
    assert browser.get_log("browser") == []


def test_tabs_are_reached_and_opened_by_keyboard(browser: Any, address: str) -> None:
    browser.get(address)
    first = wait(browser, lambda: browser.find_elements("css selector", "[role=tab]"))[0]
    browser.execute_script("arguments[0].focus()", first)
    names = [tab.text for tab in browser.find_elements("css selector", "[role=tab]")]
    for _ in range(len(names) - 1):
        browser.switch_to.active_element.send_keys("\ue014")
    browser.switch_to.active_element.send_keys("\ue007")
    wait(browser, lambda: "Drop a schedule file here" in text(browser))
    selected = browser.find_elements("css selector", "[role=tab][aria-selected=true]")
    assert [tab.text for tab in selected] == [names[-1]]
    assert browser.get_log("browser") == []
