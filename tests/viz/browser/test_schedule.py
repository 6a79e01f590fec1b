"""A schedule in a real browser: its pixels are the model's, and looking around asks the server for nothing."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import pytest

from recycle import Profile, Schedule, Shape, Timeline, simulate
from recycle.ir.families import one_f_one_b
from tests.viz.browser.page import VIEW, Page
from viz.figures import palette
from viz.figures.boxes import boxes
from viz.lanes import LaneTable
from viz.pages.editing import move

pytestmark = pytest.mark.browser


def light(colour: str) -> float:
    return sum(int(colour[i : i + 2], 16) for i in (1, 3, 5)) / 3


def test_every_box_has_its_colour_at_each_level_of_detail(
    page: Page, opened: Callable[[Schedule], Page], broken_timeline: Timeline
) -> None:
    for box in (box for box in boxes(LaneTable.from_timeline(broken_timeline)) if box.end > box.start):
        # near the upper left corner: no text there, and of stripes either colour may be
        t, y = box.start + 0.12 * (box.end - box.start), box.lane + 0.5 + box.top + 0.16 * (box.bottom - box.top)
        assert page.colour(t, y) in ({box.paint.fill, box.paint.hatch} if box.rerouted else {box.paint.fill})
    assert page.colour(4.5, 0.5) == palette.BAND
    assert {page.colour(1.0 + step / 40, 3.5) for step in range(40)} == {palette.FAILURE_BAND, palette.FAILURE_HATCH}
    page.press("u", select="1F1.0")  # its micro-batch alone, all others pale
    assert page.colour(2.12, 1.2) == palette.FORWARD.fill
    assert light(page.colour(1.12, 0.2)) > light(palette.FORWARD.fill) + 60
    page.press("Escape", "Shift+M")  # what all workers hold: one of 2.1, then two
    page.page.wait_for_function(f"() => {VIEW}.held?.values && !{VIEW}.asked")
    assert page.colour(4.0, 0.4) == page.colour(4.0, 0.6) != palette.BAND == page.colour(0.4, 0.4)
    large = opened(one_f_one_b(Shape(pipelines=64, ranks=8, micro_batches=16)))
    windows = ((0, 100, 0, 512), (0, 60, 0, 100), (20, 50, 0, 16))
    assert [large.show(**dict(zip(("t0", "t1", "y0", "y1"), window, strict=True))) for window in windows] == [0, 1, 2]
    assert page.complaints == []


def test_zoom_hover_and_keys_send_no_requests(page: Page) -> None:
    page.page.wait_for_load_state("networkidle")
    page.requests.clear()
    page.page.mouse.move(*page.point(2.5, 1.5))
    assert page.page.inner_text(".lanes-tip").splitlines()[:2] == ["1F1.0", "forward"]
    page.press("g")  # by stage: the second row is worker 1.0 now
    page.page.wait_for_function("() => document.querySelector('.lanes-tip').textContent.includes('worker 1.0')")
    page.press("h")
    page.page.wait_for_function(f"() => {VIEW}.rows.count === 2")
    page.press("h", "g")  # by stage is left for alike: 0.0 and 2.0 share a row
    page.page.wait_for_function(f"() => {VIEW}.rows.count === 5")
    page.press("g", "w", "d", "p", "0")
    page.drag((2.0, 1.3), (6.0, 3.6))  # whole rows
    page.page.wait_for_function(f"() => {VIEW}.view.t0 > 1 && {VIEW}.view.y0 === 1 && {VIEW}.view.y1 === 4")
    page.press("z")
    page.page.wait_for_function(f"() => {VIEW}.view.t0 < 0 && {VIEW}.view.y1 === 6")
    page.press("t")
    page.page.wait_for_selector(".lanes-listing tbody tr")
    page.show(t0=2.1, t1=2.9, y0=0, y1=2)
    page.page.wait_for_function("() => document.querySelectorAll('.lanes-listing tbody tr').length === 1")
    cells = page.page.locator(".lanes-listing tbody tr").inner_text().split("\t")
    assert cells == ["0.1", "1F1.0", "forward", "1", "2", "3", "1", "re-routed, critical path"]
    page.press("t", "?")
    assert page.page.locator("dialog.lanes-help").is_visible()
    assert (page.requests, page.complaints) == ([], [])


def test_a_selection_by_pointer_or_keys_is_explained(page: Page) -> None:
    page.page.mouse.click(*page.point(2.5, 1.5))
    page.page.wait_for_function(f"() => {VIEW}.links")
    assert page.page.inner_text(".selection h4") == "1F1.0"
    rows = [row.split("\t")[:2] for row in page.page.inner_text(".selection tbody").splitlines()]
    assert rows == [["1F0.0", "0.1"], ["0F1.0", "1.0"]]
    named = f"() => ['inputs', 'outputs'].map(key => {VIEW}.links[key].map(i => {VIEW}.table.instruction(i)))"
    assert page(named) == [["0F1.0"], ["1I1.0"]]
    page.page.mouse.click(*page.point(4.0, 0.5))
    page.page.wait_for_selector(".selection :text('0B0.0 waits for 1B0.0 on 0.1, which ends at 5.')")
    left, middle = page.point(page(f"() => {VIEW}.view.t0"), 0.5)
    page.page.mouse.click(left - 12, middle)  # the name of the lane
    page.page.wait_for_function(f"() => {VIEW}.status.textContent === 'worker 0.0'")
    page.press("m")
    page.page.wait_for_selector(".lanes-memory canvas[aria-label='Activations held by 0.0: most 2 at 1 by 0F0.1']")
    statuses = [page.press(*keys).split(";")[0] for keys in (["Escape", "."], [".", "."], [","], ["ArrowDown"])]
    assert statuses == ["0F0.0", "0B0.0", "0F0.1", "1F0.0"]
    page.page.wait_for_function(f"() => {VIEW}.links?.inputs.length")
    assert page.press("[").startswith("0F0.0")
    assert page.press("b") == "worker 0.0 idle from 2 to 5"
    (x0, y), (x1, _) = page.point(2.0, 0), page.point(5.0, 0)
    page.drag_pixels((x0, y - 6), (x1, y - 6))  # along the axis
    page.page.wait_for_selector("[data-panel=view] .caption:has-text('From 2')")
    assert page.complaints == []


def test_a_search_outlines_while_typing_and_lists_matches(page: Page) -> None:
    page.press("/")
    page.page.keyboard.type("kind:W stage:1")
    page.page.wait_for_function(f"() => {VIEW}.matches?.length === 2 && {VIEW}.selected < 0")
    page.page.keyboard.press("Enter")
    page.page.wait_for_selector(".bench-panel:visible :text('Waited for 1B0.1 on 0.1 (before it in the program)')")
    assert page.status().startswith("1 of 2: 1W1.0")
    page.page.locator(".bench-panel:visible [data-places]").last.click()
    page.page.wait_for_function(f"() => {VIEW}.table.instruction({VIEW}.selected) === '1W1.1'")
    page.page.fill(".lanes-search", "nonsense:1")
    page.page.press(".lanes-search", "Enter")
    page.page.wait_for_selector(".bench-panel:visible :text('nonsense is not a field; known are kind, mb, stage')")
    assert page.complaints == []


def test_a_link_restores_the_view_and_back_undoes_selections(page: Page, broken: Schedule) -> None:
    page.press(".")
    page.page.wait_for_function("() => location.search.includes('sel=0')")
    page.press("f", "g", "k", "n")
    page.page.keyboard.type("starts first")
    page.press("Enter")
    page.page.wait_for_function("() => document.activeElement.className === 'lanes-view'")
    page.press("b", "p")
    for word in ("group=stage", "gap=0_", "shows=path", "pins=0", "notes="):
        page.page.wait_for_function("word => location.search.includes(word)", arg=word)
    link, window = page("() => location.search"), page(f"() => {VIEW}.view")
    page.page.go_back()
    page.page.wait_for_function(f"() => {VIEW}.selected === 0 && !{VIEW}.gap")
    page.open(link)
    page.page.wait_for_function(f"() => {VIEW}.path && {VIEW}.gap?.to === 5")
    assert page(f"() => {VIEW}.view.t0") == pytest.approx(window["t0"], rel=1e-6)
    restored = page(f"() => [{VIEW}.rows.grouping, {VIEW}.rows.pinned, {VIEW}.notes[0].text]")
    assert restored == ["stage", [0], "starts first"]
    page.open(link.replace("plan=", "plan=0"))
    page.page.wait_for_function(f"() => {VIEW}.status.textContent.startsWith('The link was made for different lanes')")
    for query in ("?view=schedules-0&t0=x&t1=1e999&lanes=9-3&sel=1e9&fold=a.b&notes=[[", "?view=%3Cscript%3E"):
        page.open(query)
        assert page(f"() => [{VIEW}.view.y0, {VIEW}.view.y1, {VIEW}.selected]") == [0, 6, -1]
    assert page.complaints == []


def test_the_scenario_is_set_by_fields_sliders_or_a_file_and_reset(page: Page, broken: Schedule) -> None:
    from playwright.sync_api import TimeoutError as Late

    def drawn(profile: Profile) -> None:
        timeline = simulate(broken, profile)
        page.page.wait_for_function(f"span => {VIEW}.table.span === span && !{VIEW}.asked", arg=timeline.makespan)
        script = "text => document.querySelector('#headline').innerText.startsWith(text)"
        page.page.wait_for_function(script, arg=f"period {timeline.period:.6g}")

    def choose(name: str, text: str) -> None:
        with page.page.expect_file_chooser() as chooser:
            page.page.click("text=Profile or job")
        chooser.value.set_files({"name": name, "mimeType": "text/plain", "buffer": text.encode()})

    page.press(".")
    page.page.locator(".bench-tab", has_text="Scenario").click()
    forward = ".retime [data-field=F] input"
    page.page.fill(f"{forward}[type=text]", "3")
    drawn(Profile.uniform(3.0))
    assert page(f"() => {VIEW}.table.instruction({VIEW}.selected)") == "0F0.0"
    page.page.wait_for_selector("#curves .js-plotly-plot")
    page.page.fill(f"{forward}[type=text]", "many")
    page.page.wait_for_selector("text=Forward (F): write a number, or 2, one per stage")
    page.page.focus(f"{forward}[type=range]")
    page.page.keyboard.press("Home")
    drawn(Profile.uniform(0.0))
    choose("bad.json", "{")
    page.page.wait_for_selector(".retime-message:has-text('bad.json: ')")
    choose("measured.json", '{"forward": [2, 3], "latency": 0.5}')
    drawn(Profile([2.0, 3.0], latency=0.5))
    page.page.wait_for_selector(".banner:has-text('times of measured.json')")
    page.page.fill(".retime [data-field=link] input[type=text]", "0")
    drawn(Profile([2.0, 3.0]))
    for _ in range(3):  # an answer that arrives between the two sets the field to what it was
        page.page.locator("#fail").fill("0.0=2")
        page.page.locator("#fail").press("Enter")
        with contextlib.suppress(Late):
            page.page.wait_for_function("() => location.search.includes('fail=0.0')", timeout=8000)
            break
    drawn(Profile([2.0, 3.0], speed={"0.0": 2.0}))
    assert page(f"() => {VIEW}.table.labels[0]") == "0.0 \N{MULTIPLICATION SIGN}2"
    page.page.click(".banner button")
    drawn(Profile.uniform())
    assert page.complaints == []


def test_an_instruction_is_moved_by_keys_or_a_drag_and_the_move_is_undone(opened: Callable[[Schedule], Page]) -> None:
    schedule = one_f_one_b(Shape(1, 2, 3))
    page, lowered = opened(schedule), simulate(schedule).schedule
    first, second = move(lowered, 1, 1, 2), move(move(lowered, 1, 1, 2), 0, 3, 1)

    def shown(edited: Schedule, edits: int) -> None:
        wanted = [simulate(edited).makespan, edits]
        page.page.wait_for_function(
            f"wanted => String([{VIEW}.table.span, {VIEW}.edits.length]) === String(wanted)", arg=wanted
        )

    page.press(">", select="1B0.0")
    shown(first, 1)
    page.page.wait_for_function(f"() => {VIEW}.status.textContent === 'valid'")
    assert page(f"() => {VIEW}.table.instruction({VIEW}.selected)") == "1B0.0"
    row = page(f"() => {{ const v = {VIEW}, i = recycle.search(v.table, '0F0.2')[0]; return v.table.start[i]; }}")
    page.page.keyboard.down("Alt")
    page.drag((row + 0.5, 0.5), (1.1, 0.5))
    page.page.keyboard.up("Alt")
    shown(second, 2)
    page.press("Shift+Z")
    shown(first, 1)
    page.page.click("[data-action=undo]")
    shown(schedule, 0)
    assert page.complaints == []


def test_memory_is_told_under_the_pointer_and_re_routed_work_stands_out(page: Page) -> None:
    page.press("Shift+M")
    page.page.wait_for_function(f"() => {VIEW}.held?.values && !{VIEW}.asked")
    for t, text in ((4.0, "holds 2 activations"), (0.4, "holds 1 activations")):
        page.page.mouse.move(*page.point(t, 4.5))
        page.page.wait_for_function("text => document.querySelector('.lanes-tip').innerText.includes(text)", arg=text)
    page.press("Shift+M")
    page.page.locator(".bench-tab", has_text="Figures").click()
    page.page.hover("tr:has-text('1.1\N{NO-BREAK SPACE}→\N{NO-BREAK SPACE}0.1')")
    page.page.wait_for_function(f"() => {VIEW}.ribbons && !{VIEW}.asked")
    assert [page.colour(t, 2.5) == palette.BAND for t in (2.5, 3.5, 6.5)] == [False, True, False]  # over 1.0 to 1.1
    page.page.click("text=Only re-routed")
    assert page(f"() => {VIEW}.ribbons") is None
    page.page.wait_for_function(f"() => {VIEW}.flow?.length === 6 && !{VIEW}.asked")
    assert light(page.colour(0.12, 0.25)) > light(palette.FORWARD.fill) + 60
    page.press("Escape")
    for is_dark in (True, False):
        page.page.click("[aria-label='Switch between light and dark']")
        page.page.wait_for_function(f"() => !{VIEW}.asked")
        assert (light(page.colour(4.5, 0.5)) < 80) == is_dark
        assert page.colour(0.12, 0.25) == palette.FORWARD.fill
    assert page.complaints == []
