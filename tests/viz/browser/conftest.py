"""A Chromium for all tests of the canvas: Debian's `chromium` and Playwright for Python, else they are skipped."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from recycle import Schedule
from tests.viz.browser.page import Page, complaints_of, served

CHROMIUM = shutil.which("chromium")


@pytest.fixture(scope="package")
def chromium() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    if not CHROMIUM:
        pytest.skip("chromium is not installed")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        yield browser
        browser.close()


@pytest.fixture(scope="package")
def tab(chromium: Any) -> Iterator[Any]:
    """The browser's tab for all tests: another one would load and compile all scripts again."""
    context = chromium.new_context(viewport={"width": 1280, "height": 900})
    yield context.new_page()
    context.close()


@pytest.fixture
def journey(tab: Any) -> Iterator[Callable[[str], Any]]:
    """Opens an address with nothing stored; whatever the pages complain of fails the test."""
    complaints = complaints_of(tab)

    def go(address: str) -> Any:
        tab.goto(address)
        return tab

    yield go
    tab.evaluate("() => localStorage.clear()")
    tab.emulate_media(color_scheme="light")
    tab.goto("about:blank")
    assert complaints == []


@pytest.fixture
def opened(tab: Any, tmp_path: Path) -> Callable[[Schedule], Page]:
    def open_(schedule: Schedule) -> Page:
        schedule.save(tmp_path / "plan.json")
        return Page(tab, served(tmp_path / "plan.json"))

    return open_


@pytest.fixture(scope="package")
def broken_address(broken: Schedule, tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("shared") / "plan.json"
    broken.save(path)
    return served(path)


@pytest.fixture
def page(tab: Any, broken_address: str) -> Page:
    """The page of the schedule `broken`, just opened."""
    return Page(tab, broken_address)
