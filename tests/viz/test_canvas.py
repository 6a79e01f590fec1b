"""The canvas in a real browser: its pixels are the model's, and looking around asks the server for nothing.

Needs Debian's `chromium` and Playwright for Python; skipped where one of them is not installed.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from recycle import Profile, Schedule, Shape, Timeline, simulate
from recycle.ir.families import one_f_one_b
from tests.viz.serving import served
from viz.figures import palette
from viz.figures.boxes import boxes
from viz.figures.raster import BUSY, utilisation
from viz.lanes import LaneTable

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
CHROMIUM = shutil.which("chromium")
pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(not CHROMIUM, reason="chromium is not installed"),
]
NAME = "schedules-0"
VIEW = f"recycle.views.get('{NAME}')"
PIXEL = """([x, y]) => {
  const {left, top} = VIEW.place, ratio = devicePixelRatio;
  const at = VIEW.context.getImageData(Math.floor((left + x) * ratio), Math.floor((top + y) * ratio), 1, 1).data;
  return '#' + [...at.slice(0, 3)].map(c => c.toString(16).padStart(2, '0')).join('').toUpperCase();
}""".replace("VIEW", VIEW)
COLUMN = """x => {
  const {left, top, height} = VIEW.place;
  const data = VIEW.context.getImageData(Math.round(left) + x, Math.round(top), 1, Math.round(height)).data;
  return Array.from({length: data.length / 4}, (_, i) =>
    '#' + [...data.slice(4 * i, 4 * i + 3)].map(c => c.toString(16).padStart(2, '0')).join('').toUpperCase());
}""".replace("VIEW", VIEW)
SHOW = """window_ => { VIEW.show(window_); return new Promise(done => {
  const look = () => VIEW.asked ? requestAnimationFrame(look) : done(VIEW.level);
  requestAnimationFrame(() => requestAnimationFrame(look));
}); }""".replace("VIEW", VIEW)


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        yield browser
        browser.close()


class Page:
    """A page with one timeline, what it asked the server for, and what it complained of."""

    def __init__(self, page: Any, address: str) -> None:
        self.page, self.address = page, address
        self.requests: list[str] = []
        self.complaints: list[str] = []
        page.on("request", self._asked)
        page.on("console", lambda message: self.complaints.append(message.text))
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.open("")

    def open(self, query: str) -> None:
        self.page.goto(self.address + query)
        self.page.wait_for_selector(".lanes-view[data-drawn]")
        self.page.wait_for_load_state("networkidle")
        self.requests.clear()

    def _asked(self, request: Any) -> None:
        if "_favicon" not in request.url:  # chromium looks at it again whenever the address changes
            self.requests.append(request.url)

    def __call__(self, script: str, argument: Any = None) -> Any:
        return self.page.evaluate(script, argument)

    def show(self, **window: float) -> int:
        """Show a window; returns the level of detail that it is drawn at."""
        level: int = self(SHOW, window)
        return level

    def at(self, t: float, y: float) -> tuple[float, float]:
        """Place within the axes, in pixels, of a time and a row."""
        x, down = self(
            f"([t, y]) => {{ const v = {VIEW}.view, p = {VIEW}.place;"
            " return [(t - v.t0) / (v.t1 - v.t0) * p.width, (y - v.y0) / (v.y1 - v.y0) * p.height]; }",
            [t, y],
        )
        return x, down

    def colour(self, t: float, y: float) -> str:
        found: str = self(PIXEL, list(self.at(t, y)))
        return found

    def point(self, t: float, y: float) -> tuple[float, float]:
        """The same on the page, for the mouse."""
        self(f"() => {VIEW}.root.scrollIntoView()")
        left, top = self(
            f"() => {{ const box = {VIEW}.overlay.getBoundingClientRect(), {{left, top}} = {VIEW}.place;"
            " return [box.left + left, box.top + top]; }"
        )
        x, down = self.at(t, y)
        return left + x, top + down

    def status(self) -> str:
        return str(self(f"() => {VIEW}.status.textContent"))


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


@pytest.fixture(scope="module")
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


def rgb(colours: list[str]) -> Any:
    return np.array([[int(colour[i : i + 2], 16) for i in (1, 3, 5)] for colour in colours], dtype=float)


def test_levels_of_detail_follow_the_zoom(opened: Callable[..., Page]) -> None:
    schedule = one_f_one_b(Shape(pipelines=64, ranks=8, micro_batches=64))
    page = opened(schedule)
    assert [
        page.show(t0=0, t1=300, y0=0, y1=512),
        page.show(t0=0, t1=60, y0=0, y1=100),
        page.show(t0=20, t1=50, y0=0, y1=16),
    ] == [0, 1, 2]


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


FOUND = {
    "kind:W": "0W1.0 1W1.0 1W1.1",
    "kind:w mb:1.0": "0W1.0 1W1.0",
    "kind:W stage:1 mb:1.1": "1W1.1",
    "kind:I,W stage:0": "0I1.0 0W1.0",
    "kind:F mb:1 worker:0.*": "0F0.1 1F0.1",
    "kind:F worker:*.1 -is:rerouted mb:*.0": "1F0.0 1F2.0",
    "is:rerouted kind:F": "1F1.0 1F1.1",
    "kind:step": "0STEP 0STEP 0STEP 1STEP 1STEP",
    "kind:F mb:0..0 stage:0..0 pipeline:1..2": "0F1.0 0F2.0",
    "dur>1.5 stage=0 pipeline:2": "0B2.0 0B2.1",
    "kind:F start<0.5": "0F0.0 0F1.0 0F2.0",
    "1W1": "1W1.0 1W1.1",
    "-kind:backward -kind:reduce -kind:step -mb:1": "0F0.0 0F1.0 0F2.0 1F0.0 1F1.0 1F2.0",
    "end>=9 dur=1": "0W1.0 1W1.0 1W1.1",
    "pipeline:0..1 -pipeline:1": "0B0.0 0B0.1 0F0.0 0F0.1 1B0.0 1B0.1 1F0.0 1F0.1",
    "dur<=1 kind:b,i": "0I1.0 1I1.0 1I1.1",
    "kind:comm": "",
    "kind:pair": "",
    "kind:redundant": "",
    "is:critical start>3": "0B0.1 1B0.1 1F0.1 1I1.0",
}
MISTAKES = {
    "knd:W": "knd:w: knd is no field; known are kind, mb, stage",
    "kind:Q": "q is no kind; known are f, b",
    "kind:W kind:": "a value is missing after kind:",
    "dur:3": "dur is compared as dur>1",
    "mb>3": "mb takes values as mb:…",
    "dur>x": "x is not a number",
    "mb:1.2.3": "is no micro-batch; write mb:1.3",
    "worker:7": "is no worker; write worker:1.2",
    "stage:a": "a is no number; write stage:2 or stage:2..5",
    "is:red": "red is no mark; known are rerouted, critical, violation",
    "a" * 1001: "at most 40 terms and 1000 characters",
    "f " * 41: "at most 40 terms and 1000 characters",
    ">5": "write field:value",
}
NAMES = f"""query => recycle.search({VIEW}.table, query).map(i => {VIEW}.table.instruction(i)).sort().join(" ")"""


def test_a_search_finds_what_meets_all_its_terms(page: Page) -> None:
    assert {query: page(NAMES, query) for query in FOUND} == FOUND
    assert page(f"() => recycle.search({VIEW}.table, '')") is None


def test_a_mistake_in_a_search_is_one_line_that_names_the_term(page: Page) -> None:
    refused = f"q => {{ try {{ recycle.search({VIEW}.table, q); return ''; }} catch (e) {{ return e.message; }} }}"
    for query, message in MISTAKES.items():
        said = page(refused, query)
        assert message in said
        assert "\n" not in said


def test_what_a_search_finds_is_outlined_while_it_is_typed(page: Page) -> None:
    page.page.keyboard.press("/")
    page.page.keyboard.type("kind:F stage:0")
    page.page.wait_for_function(f"() => {VIEW}.matches && {VIEW}.matches.length === 6")
    page.page.wait_for_function(f"() => {VIEW}.status.textContent.startsWith('6 found: Enter selects the next')")
    assert page(f"() => {VIEW}.selected") == -1
    page.page.keyboard.type(" mb:9.9")
    page.page.wait_for_function(f"() => {VIEW}.status.textContent === 'No match for kind:F stage:0 mb:9.9'")
    for _ in range(7):
        page.page.keyboard.press("Backspace")
    page.page.keyboard.press("Enter")
    page.page.wait_for_function(f"() => {VIEW}.status.textContent.startsWith('1 of 6: 0F')")
    page.page.keyboard.press("Escape")
    page.page.wait_for_function(f"() => !{VIEW}.matches")


def test_times_of_a_search_are_those_of_the_axis_and_alike_to_a_millionth(page: Page) -> None:
    in_milliseconds = f"""query => {{
      const {{ table }} = {VIEW}, late = {{ start: table.start.map(t => t + 0.1), end: table.end.map(t => t + 0.1) }};
      const other = Object.assign(Object.create(table), late, {{ unit: [1000, "ms"] }});
      return recycle.search(other, query).map(i => table.instruction(i));
    }}"""
    assert page(in_milliseconds, "dur=2000 stage:0 mb:2.0") == ["0B2.0"]  # as people read it, not to the last bit
    assert page(in_milliseconds, "dur>1500 stage=0 pipeline:2") == ["0B2.0", "0B2.1"]


def test_the_first_finds_are_those_by_time(page: Page) -> None:
    find = f"([query, most]) => recycle.earliest({VIEW}.table, recycle.search({VIEW}.table, query), most)"
    found = page(find, ["kind:F", 5])
    assert page(f"operations => operations.map(i => {VIEW}.table.start[i])", found) == [0, 0, 0, 1, 1]


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
    assert "failed: 1.1; 6 operations re-routed" in canvas.get_attribute("aria-label")
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


def test_other_times_are_drawn_in_place(page: Page, broken: Schedule) -> None:
    slower = simulate(broken, Profile.uniform(3.0))
    page.page.keyboard.press(".")
    page.page.locator(".bench-tab", has_text="Times").click()
    page.page.locator(".retime [data-field=F] input").fill("3")
    drawn = f"span => {VIEW}.table.span === span && !{VIEW}.asked"
    page.page.wait_for_function(drawn, arg=slower.makespan)
    assert page(f"() => {VIEW}.table.instruction({VIEW}.selected)") == "0F0.0"
    assert page(f"() => {VIEW}.view.t1") == pytest.approx(slower.makespan * 1.004, rel=1e-3)
    assert page.page.inner_text("#headline").startswith(f"period {slower.period:.4g}")
    page.page.locator(".retime [data-field=F] input").fill("many")
    page.page.wait_for_selector("text=Forward (F): write a number, or 2, one per stage")
    page.page.locator(".retime button").click()
    page.page.wait_for_function(f"() => {VIEW}.table.span === 11")
    assert page.page.input_value(".retime [data-field=F] input") == "1"
    assert page.complaints == []


@pytest.mark.parametrize(("width", "height"), [(1280, 800), (2560, 1440)])
@pytest.mark.parametrize("shape", [Shape(3, 4, 6), Shape(32, 8, 8), Shape(96, 16, 2)])
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
