"""A Chromium for all tests of the canvas: Debian's `chromium` and Playwright for Python, else they are skipped."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from recycle import Schedule
from tests.viz.browser.page import Page, served

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


@pytest.fixture
def opened(chromium: Any, tmp_path: Path) -> Iterator[Callable[..., Page]]:
    contexts = []

    def open_(schedule: Schedule, size: dict[str, int] | None = None, **options: Any) -> Page:
        schedule.save(tmp_path / "plan.json")
        context = chromium.new_context(viewport=size or {"width": 1280, "height": 900}, **options)
        contexts.append(context)
        return Page(context.new_page(), served(tmp_path / "plan.json"))

    yield open_
    for context in contexts:
        context.close()


@pytest.fixture(scope="package")
def shared(chromium: Any, broken: Schedule, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    path = tmp_path_factory.mktemp("shared") / "plan.json"
    broken.save(path)
    context = chromium.new_context(viewport={"width": 1280, "height": 900})
    yield Page(context.new_page(), served(path))
    context.close()


@pytest.fixture
def page(shared: Page) -> Page:
    """The page of the schedule `broken`, just opened."""
    shared.open("")
    shared.complaints.clear()
    return shared
