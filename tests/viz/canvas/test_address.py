"""The address of a page with lanes: what a link holds, what Back leads to, and lanes in other times."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from recycle import Profile, Schedule, simulate
from tests.viz.canvas.page import PIXEL, VIEW, Page
from tests.viz.serving import served

pytestmark = pytest.mark.browser


def test_an_address_restores_the_view(page: Page) -> None:
    page.page.keyboard.press(".")
    page.page.keyboard.press("f")
    page.page.keyboard.press("g")
    page.page.wait_for_function("() => location.search.includes('sel=') && location.search.includes('group=stage')")
    before, query = page(f"() => {VIEW}.view"), page("() => location.search")
    assert re.search(r"t0=.*t1=.*lanes=.*sel=0", query)
    page.open(query)
    page.page.wait_for_function(f"() => {VIEW}.selected === 0 && !{VIEW}.asked")
    after = page(f"() => {VIEW}.view")
    assert [after[key] for key in ("t0", "t1", "y0", "y1")] == pytest.approx(
        [before[key] for key in ("t0", "t1", "y0", "y1")], rel=1e-6
    )
    assert page(f"() => {VIEW}.rows.grouping") == "stage"


def test_back_walks_through_what_was_selected_and_a_link_holds_a_gap_and_modes(page: Page) -> None:
    page.page.keyboard.press(".")
    page.page.wait_for_function("() => location.search.includes('sel=0')")
    page.page.keyboard.press("b")
    page.page.wait_for_function("() => location.search.includes('gap=0_2_5')")
    page.page.keyboard.press("p")
    page.page.wait_for_function("() => location.search.includes('shows=path')")
    link = page("() => location.search")
    page.page.go_back()
    page.page.wait_for_function(f"() => {VIEW}.selected === 0 && !{VIEW}.gap")
    page.page.go_forward()
    page.page.wait_for_function(f"() => {VIEW}.selected < 0 && {VIEW}.gap?.to === 5")
    page.open(link)
    page.page.wait_for_function(f"() => {VIEW}.gap?.from === 2 && {VIEW}.path")
    page.open(link.replace("plan=", "plan=0"))
    page.page.wait_for_function(f"() => {VIEW}.status.textContent.startsWith('The link was made for other lanes')")
    assert page(f"() => {VIEW}.gap") is None
    assert page.complaints == []


def test_a_link_holds_other_times(page: Page, broken: Schedule) -> None:
    span = simulate(broken, Profile.uniform(3.0)).makespan
    page(f"() => {{ recycle.use({VIEW}); return recycle.retime({VIEW}, {{ F: '3' }}); }}")
    page.page.wait_for_function("() => location.search.includes('times=')")
    page.open(page("() => location.search"))
    page.page.wait_for_function(f"span => {VIEW}.table.span === span", arg=span)


@pytest.mark.parametrize("query", ["?view=schedules-0&t0=x&t1=1e999&lanes=9-3&sel=1e9&fold=a.b", "?view=%3Cscript%3E"])
def test_an_address_that_says_nonsense_shows_everything(page: Page, query: str) -> None:
    page.open(query)
    view = page(f"() => {VIEW}.view")
    assert (view["y0"], view["y1"]) == (0, 6)
    assert view["t1"] == pytest.approx(11 * 1.004, rel=1e-3)
    assert page.complaints == []


def test_other_times_are_drawn_in_place(page: Page, broken: Schedule) -> None:
    slower = simulate(broken, Profile.uniform(3.0))
    page.page.keyboard.press(".")
    page.page.locator(".bench-tab", has_text="Scenario").click()
    page.page.locator(".retime [data-field=F] input").fill("3")
    drawn = f"span => {VIEW}.table.span === span && !{VIEW}.asked"
    page.page.wait_for_function(drawn, arg=slower.makespan)
    assert page(f"() => {VIEW}.table.instruction({VIEW}.selected)") == "0F0.0"
    assert page(f"() => {VIEW}.view.t1") == pytest.approx(slower.makespan * 1.004, rel=1e-3)
    assert page.page.inner_text("#headline").startswith(f"period {slower.period:.4g}")
    page.page.locator(".retime [data-field=F] input").fill("many")
    page.page.wait_for_selector("text=Forward (F): write a number, or 2, one per stage")
    page.page.click("[data-retime-reset]")
    page.page.wait_for_function(f"() => {VIEW}.table.span === 11")
    assert page.page.input_value(".retime [data-field=F] input") == "1"
    assert page.complaints == []


def test_an_address_opens_the_step_of_a_run_and_its_tab(chromium: Any, run_dir: Path, schedule_file: Path) -> None:
    page = chromium.new_page(viewport={"width": 1280, "height": 900})
    page.goto(served(run_dir, schedule_file) + "?pages=run0&run0-step=7&view=run0-planned&t0=1&t1=3")
    page.wait_for_selector("text=Executed, step 7")
    page.wait_for_function("() => Math.abs((recycle.views.get('run0-planned')?.view.t0 ?? 0) - 1) < 1e-6")
    page.locator(".tab", has_text=schedule_file.name).click()
    page.wait_for_function("() => location.search.includes('pages=schedules')")
    page.reload()
    page.wait_for_selector("text=broken.json: D=3 P=2 m=2, 1.1 failed")
    page.close()


def test_a_profile_that_is_chosen_gives_the_times_and_fields_go_on_from_them(page: Page, broken: Schedule) -> None:
    page.open("/?panel=scenario")
    page.page.wait_for_selector(".retime [data-field=F] input")

    def choose(name: str, text: str) -> None:
        with page.page.expect_file_chooser() as chooser:
            page.page.click("[data-retime-file]")
        chooser.value.set_files({"name": name, "mimeType": "text/plain", "buffer": text.encode()})

    choose("bad.json", "{")
    page.page.wait_for_selector(".retime-message:has-text('bad.json: ')")
    choose("measured.json", '{"forward": [2, 3], "latency": 0.5}')
    slower = simulate(broken, Profile([2.0, 3.0], latency=0.5))
    page.page.wait_for_function(f"span => {VIEW}.table.span === span", arg=slower.makespan)
    page.page.wait_for_function("() => document.querySelector('.retime [data-field=F] input')?.value === '2 3'")
    page.page.locator(".retime [data-field=link] input").fill("0")
    faster = simulate(broken, Profile([2.0, 3.0]))
    page.page.wait_for_function(f"span => {VIEW}.table.span === span", arg=faster.makespan)
    page.page.click("[data-retime-reset]")
    page.page.wait_for_function(f"() => {VIEW}.table.span === 11")
    page.page.wait_for_function("() => document.querySelector('.retime [data-field=F] input')?.value === '1'")
    assert page.complaints == []


def test_a_run_is_stepped_and_played_and_back_leads_to_the_step_before(chromium: Any, run_dir: Path) -> None:
    page = chromium.new_page()
    complaints: list[str] = []
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.goto(served(run_dir) + "/?run0-step=4")
    heading = "step => document.querySelector('.lanes-head h3')?.textContent.startsWith(`Planned, step ${step}`)"
    page.wait_for_function(heading, arg=4)
    for press, step in (("step after", 5), ("change after", 6), ("change before", 3)):
        page.click(f'.player [data-go="{press}"]')
        page.wait_for_function(heading, arg=step)
        page.wait_for_function("step => location.search.includes(`run0-step=${step}`)", arg=step)
    for step in (6, 5, 4):
        page.go_back()
        page.wait_for_function(heading, arg=step)
    page.keyboard.press("Shift+PageDown")
    page.wait_for_function(heading, arg=6)
    page.locator(".lanes-view").first.focus()  # Space on a button presses that
    page.keyboard.press("Space")
    page.wait_for_function(heading, arg=8)
    page.wait_for_function("() => document.querySelector('[data-go=play]').textContent === 'Play'")  # the last step
    page.go_back()  # what was played is one step
    page.wait_for_function(heading, arg=4)
    assert complaints == []
    page.close()


def test_a_link_holds_how_timelines_are_compared(chromium: Any, schedule_file: Path, healthy: Schedule) -> None:
    healthy.save(schedule_file.parent / "whole.json")
    page = chromium.new_page()
    address = served(schedule_file, schedule_file.parent / "whole.json")
    page.goto(
        f"{address}/?pages=compare&compare-arrangement=interleaved&compare-colour=kind&compare-chosen=file/1,file/0"
    )
    page.wait_for_selector(".lanes-view[data-name=compare-all][data-drawn] h3[title='A: whole.json; B: broken.json']")
    page.click("text=one timeline under the other")
    page.wait_for_selector(".lanes-view[data-name=compare-1][data-drawn]")
    assert "compare-arrangement=stacked" in page.evaluate("location.search")
    page.go_back()
    page.wait_for_selector(".lanes-view[data-name=compare-all][data-drawn]")
    page.close()


def test_a_note_stands_in_the_link_and_is_drawn_where_it_belongs(page: Page) -> None:
    page.page.keyboard.press(".")
    page.page.keyboard.press("n")
    page.page.keyboard.type("starts first")
    page.page.keyboard.press("Enter")
    page.page.wait_for_function("() => location.search.includes('notes=')")
    query = page("() => location.search")
    page.open(query)
    assert page(f"() => {VIEW}.notes") == [{"lane": 0, "t": 0, "text": "starts first"}]
    ink = page("() => getComputedStyle(document.body).getPropertyValue('--ink').trim()")
    x, y = page.at(0, 0)
    assert page(PIXEL, [x + 1, y + 3]) == ink.upper()
    page.open(query.replace("plan=", "plan=0"))
    assert page(f"() => {VIEW}.notes") == []
    page.open("/?view=schedules-0&notes=" + "[[0,1],[99,1,%22x%22],7")
    assert page(f"() => {VIEW}.notes") == []
    assert page.complaints == []
