"""Every page keeps the rules of accessibility, light and dark, with each panel open, and is walked by keyboard."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from recycle import Schedule
from tests.viz.canvas.page import VIEW, Page
from tests.viz.serving import served

pytestmark = pytest.mark.browser
FAULTS = (Path(__file__).parent / "accessibility.js").read_text(encoding="utf-8")
"""Gives the rules that a page breaks, and where."""


@pytest.mark.parametrize("theme", ["light", pytest.param("dark", marks=pytest.mark.soak)])
def test_no_page_has_a_serious_fault(
    chromium: Any, run_dir: Path, schedule_file: Path, healthy: Schedule, theme: str
) -> None:
    healthy.save(schedule_file.parent / "whole.json")
    address = served(run_dir, schedule_file, schedule_file.parent / "whole.json")
    page = chromium.new_page(viewport={"width": 1280, "height": 800}, color_scheme=theme)
    found: dict[str, list[str]] = {}
    page.goto(address)
    for title in page.locator(".tab").all_text_contents():
        page.locator(".tab", has_text=title).first.click()
        page.wait_for_load_state("networkidle")
        page.wait_for_timeout(300)
        tabs = page.locator(".bench-tab:visible")
        for place in range(tabs.count()):
            tabs.nth(place).click()
            page.wait_for_timeout(250)
            found |= {fault: [title] for fault in page.evaluate(FAULTS)}
        found |= {fault: [title] for fault in page.evaluate(FAULTS)}
    page.close()
    assert found == {}


def test_the_rules_find_what_breaks_them(page: Page) -> None:
    page(
        """() => { const add = (html) => document.querySelector("main").insertAdjacentHTML("beforeend", html);
          add('<button id=twice></button><img id=twice src="data:,x"><input><span role=tab>x</span>');
          add('<p style="color: #999; background: #fff">pale</p><i tabindex=3>first</i>'); }"""
    )
    rules = {fault.split(":")[0] for fault in page(FAULTS)}
    assert rules >= {"control-name", "image-alt", "aria-required-parent", "duplicate-id", "color-contrast", "tabindex"}


def test_the_keyboard_reaches_lanes_panels_and_the_size_of_the_dock(page: Page) -> None:
    reached = []
    for _ in range(60):
        page.page.keyboard.press("Tab")
        reached.append(page("() => { const a = document.activeElement; return `${a.tagName} ${a.className}`; }"))
    for what in ("lanes-view", "bench-tab", "bench-split", "lanes-search", "bench-panel"):
        assert any(what in one for one in reached), what
    page.page.locator(".lanes-view").first.focus()
    page.page.keyboard.press(".")
    page.page.wait_for_function(f"() => {VIEW}.selected === 0")
    assert "0F0.0" in page.status()
