"""Pages in a real browser: a journey through each, by pointer and by keyboard."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlencode

import pytest

from recycle import Profile, Schedule, Shape, simulate
from recycle.ir.families import FAMILIES, zb_v
from recycle.ir.formats import chrome_trace
from recycle.job import Job
from recycle.solve.planner import plan
from tests.test_site import site
from tests.viz.browser.page import Held, served
from tests.viz.scenarios import expected_timeline, random_scenario
from viz.app import build_app
from viz.export import export
from viz.lane_cache import TimedLanes, TimelineContext
from viz.lanes import LaneTable
from viz.numbers import short
from viz.pages import bench, editing, panels
from viz.pages.run_page import RunPage
from viz.pages.validate_page import MAX_BYTES
from viz.scenario import PageModel, Scenario
from viz.sources import ScheduleFile, family_sources, load_sources, schedule_source
from viz.what_if import WhatIf

__all__ = ["site"]
pytestmark = pytest.mark.browser
JOB = "[shape]\npipelines = 3\nranks = 2\nmicro_batches = 2\n"
FAULTS = (Path(__file__).parent / "accessibility.js").read_text(encoding="utf-8")
"""Gives the rules of accessibility that a page breaks, and where."""
IN_SIGHT = "() => [...document.querySelectorAll('.lanes-view')].filter(v => v.offsetParent).map(v => v.dataset.name)"


@pytest.fixture(scope="module")
def address(healthy: Schedule, broken: Schedule) -> str:
    job = Job.from_toml(JOB)
    named = (("whole.json", healthy), ("<b>broken</b>.json", broken))
    sources = [schedule_source(Path(name), schedule) for name, schedule in named]
    return served(app=build_app(sources, WhatIf(job, None, partial(plan, job, quick=True)), is_example=True))


def drawn(page: Any, *names: str) -> None:
    page.wait_for_function("names => names.every(name => window.recycle?.views.get(name)?.drawn)", arg=list(names))


WATCH = """() => {
  told = [];
  const note = () => told.push(document.querySelector('#headline strong').textContent);
  new MutationObserver(note).observe(document.getElementById('headline'), { childList: true });
}"""
PERIOD = "period => document.querySelector('#headline strong')?.textContent === period"
CALLBACK = "**/_dash-update-component*"
HEADING = "step => document.querySelector('.lanes-head h3')?.textContent.startsWith(`Planned, step ${step}`)"
PRESS = """step => {
  const plot = document.querySelector('#time0-curves .js-plotly-plot');
  if (!plot?._ev?.listenerCount('plotly_click')) return false;
  plot.emit('plotly_click', {points: [{curveNumber: 0, pointNumber: step, x: 0, y: 0, customdata: step}]});
  return true;
}"""
"""Presses a step on the curves once they listen."""


def await_tick(page: Any, name: str) -> None:
    """Wait until a page has read its live run again."""
    with page.expect_response(lambda answer: f"{name}-tick.n_intervals" in (answer.request.post_data or "")):
        pass


def test_a_chosen_step_of_a_live_run_is_not_left_for_the_newest(
    journey: Any, tmp_path: Path, make_run: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("viz.pages.page.REFRESH_SECONDS", 0.3)
    monkeypatch.setattr("viz.run_files.LiveRun.refresh", lambda _: time.sleep(0.5))
    page = journey(served(make_run(tmp_path / "run", live=True)))
    unanswered, most = set[Any](), []

    def note(request: Any) -> None:
        if "run0-tick.n_intervals" in (request.post_data or ""):
            unanswered.add(request)
            most.append(len(unanswered))

    page.on("request", note)
    for event in ("requestfinished", "requestfailed"):
        page.on(event, lambda request: unanswered.discard(request))
    page.wait_for_function(HEADING, arg=8)
    page.click(".tab:has-text('Time of')")
    page.wait_for_function(PRESS, arg=2)
    for again in (page.reload, page.title):
        page.wait_for_function(HEADING, arg=2)
        await_tick(page, "run0")
        page.wait_for_timeout(300)
        assert page.evaluate(HEADING, 2)
        again()
    assert max(most) == 1  # a slow server is asked after its answers


def test_a_live_run_is_shown_although_drawing_a_step_takes_longer_than_the_next_step(
    journey: Any, tmp_path: Path, make_run: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("viz.pages.page.REFRESH_SECONDS", 0.2)
    monkeypatch.setattr("viz.run_files.LiveRun.refresh", lambda _: None)
    newest, timelines = itertools.cycle((6, 7, 8)), RunPage.timelines
    monkeypatch.setattr(RunPage, "newest_step", lambda _: next(newest))
    monkeypatch.setattr(RunPage, "timelines", lambda *step: (time.sleep(1), timelines(*step))[1])
    page = journey(served(make_run(tmp_path / "run", live=True)))
    for step in (6, 7, 8):
        page.wait_for_function(HEADING, arg=step)


def test_a_run_is_stepped_and_played_and_back_returns(journey: Any, run_dir: Path) -> None:
    page = journey(served(run_dir) + "/?run0-step=4")
    page.wait_for_function(HEADING, arg=4)
    drawn(page, "run0-executed")
    assert page.evaluate("() => [...recycle.views.get('run0-executed').table.failed]") == [3]
    page.evaluate("() => { const view = recycle.views.get('run0-executed'); recycle.use(view); view.select(3); }")
    page.wait_for_selector(".selection h4")
    for press, step in (("step after", 5), ("change after", 6), ("change before", 3)):
        page.click(f'.player [data-go="{press}"]')
        page.wait_for_function(HEADING, arg=step)
        page.wait_for_function("step => location.search.includes(`run0-step=${step}`)", arg=step)
    page.wait_for_selector(".selection h4", state="detached")  # it was of another step
    page.go_back()
    page.wait_for_function(HEADING, arg=6)
    page.evaluate("() => { history.back(); setTimeout(() => history.back(), 5); }")
    page.wait_for_function(HEADING, arg=4)
    page.wait_for_timeout(300)
    page.evaluate("() => history.go(2)")  # two quick steps back leave what follows them
    page.wait_for_function(HEADING, arg=6)
    steps = Held(page, CALLBACK, "run0-lanes")
    page.locator(".lanes-view").first.focus()  # Space on a button presses that
    page.keyboard.press("Space")
    assert steps[0]
    page.wait_for_timeout(1200)
    assert len(steps.routes) == 1  # the next step waits for the lanes
    steps.end(0)
    page.wait_for_function(HEADING, arg=8)
    page.wait_for_function("() => document.querySelector('[data-go=play]').textContent === 'Play'")  # the last step
    page.go_back()  # what was played is one step
    page.wait_for_function(HEADING, arg=5)
    page.click(".moments button")
    page.wait_for_function(HEADING, arg=2)


def test_an_attempt_is_in_the_address_while_its_step_is_shown(journey: Any, run_dir: Path) -> None:
    def shown(title: str, attempt: str) -> None:
        page.wait_for_selector(f".lanes-head h3:text-is('{title}')")
        page.wait_for_function("word => location.search.includes('attempt') === Boolean(word)", arg=attempt)
        page.wait_for_function("word => document.querySelector('#run0-attempt :checked')?.value === word", arg=attempt)

    page = journey(served(run_dir) + "/?run0-step=3&run0-attempt=3.0")
    shown("Planned, step 3", "3.0")
    page.click('.player [data-go="step after"]')
    shown("Planned, step 4: 1.1 failed", "")
    page.go_back()
    shown("Planned, step 3", "3.0")
    page.click("#run0-attempt label:has-text('generation 1')")
    shown("Planned, step 3: 1.1 failed", "")
    page.click("#run0-attempt label:has-text('aborted')")
    shown("Planned, step 3", "3.0")


def test_two_schedules_are_compared_stacked_and_interleaved(journey: Any, address: str) -> None:
    page = journey(address)
    page.locator(".start button", has_text="Compare").click()
    drawn(page, "compare-0", "compare-1")
    windows = "() => ['compare-0', 'compare-1'].map(name => recycle.views.get(name).view.t1)"
    before = page.evaluate(windows)
    page.locator("[data-places]:visible").first.click()
    page.wait_for_function(
        f"before => {{ const [a, b] = ({windows})(); return a === b && a !== before; }}", arg=before[0]
    )
    assert page.locator("b").count() == 0  # a name is text
    strip = page.get_attribute(".lanes-view[data-name=compare-1] .lanes-deltas canvas", "aria-label")
    assert strip == "Later starts in b>.json: -2 to 6"
    page.hover(".lanes-view[data-name=compare-0] .lanes-axes")
    lines = "() => [...document.querySelectorAll('.lanes-cursor')].map(l => l.style.transform)"
    page.wait_for_function(f"() => ({lines})().length === 2 && new Set(({lines})()).size === 1")
    page.click("text=interleaved")
    drawn(page, "compare-all")
    page.evaluate("() => { const v = recycle.views.get('compare-all'); v.select(v.table.offsets[3] + 1); }")
    page.wait_for_selector(".selection h4:has-text('1F1.0')", state="attached")
    page.wait_for_function("() => recycle.views.get('compare-all').links !== null")
    page.reload()
    drawn(page, "compare-all")
    page.go_back()
    drawn(page, "compare-1")


ROWS = """wanted => {
  const lines = [...document.querySelectorAll('.scoreboard tbody tr')];
  const rows = lines.map(row => [...row.cells].map(cell => cell.innerText));
  return rows.length === 3 && rows.every(row => row[2] === wanted[row[0]]);
}"""
FIGURES = """wanted => [...document.querySelectorAll('#compare-answer tr')].some(
  row => [...row.cells].map(cell => cell.innerText).join() === wanted.join())"""


@pytest.mark.parametrize("seeds", [range(1), pytest.param(range(1, 22), marks=pytest.mark.soak)])
def test_every_page_shows_one_scenario_through_links_reloads_and_tabs(journey: Any, seeds: range) -> None:
    shape = Shape(1, 4, 4)
    files = [file for file in family_sources(shape) if isinstance(file, ScheduleFile)]
    files = [file for file in files if file.name in ("1f1b", "zb-h1", "zb-v")]
    address = served(app=build_app(files))

    def check(page: Any, scenario: Scenario) -> None:
        expected = {file.name: expected_timeline(file.schedule, file.chunk_time or 1, scenario) for file in files}
        periods = {name: short(timeline.period, 6) for name, timeline in expected.items()}
        page.click(".tab:has-text('Scoreboard')")
        page.wait_for_function(ROWS, arg=periods)
        page.click(".tab:has-text('Schedules')")
        for place, (name, timeline) in enumerate(expected.items()):
            view = f"recycle.views.get('schedules-{place}')"
            page.wait_for_function(f"() => {view}?.root.offsetParent")  # a hidden timeline cannot be the current one
            page.wait_for_function(f"span => Math.abs({view}.table.span / span - 1) < 1e-6", arg=timeline.makespan)
            page.evaluate(f"() => recycle.use({view})")
            page.wait_for_selector(f"#headline:has-text('period {periods[name]}')")
        page.click(".tab:has-text('Compare')")
        page.wait_for_function(FIGURES, arg=["period", *list(periods.values())[:2]])

    rng = random.Random(seeds.start)
    for _ in seeds:
        scenario = random_scenario(rng, [shape])
        page = journey(f"{address}/?{urlencode({'times': scenario.times, 'fail': scenario.workers})}")
        check(page, scenario)
        page.reload()
        check(page, scenario)
        page.locator(".bench-tab", has_text="Scenario").click()
        page.fill(".retime [data-field=I] input[type=text]", "1.75")
        words = [word for word in scenario.times.split() if not word.startswith("I=")]
        check(page, Scenario(" ".join([*words, "I=1.75"]), scenario.workers))


def test_a_pressed_worker_fails_and_back_restores_it(journey: Any, address: str) -> None:
    page = journey(address + "/?fail=1.1")
    drawn(page, "plans-all")
    page.evaluate("() => recycle.views.get('plans-all').select(0)")
    page.wait_for_selector(".selection h4", state="attached")
    page.click(".bench-tab:has-text('Scenario')")
    page.click(".workers button:text-is('0.0')")
    page.wait_for_selector("text=Without 0.0, 1.1")
    page.wait_for_selector(".selection h4", state="detached")
    page.wait_for_function("() => location.search.includes('fail=0.0,1.1')")
    page.click(".workers button:text-is('0.1')")
    page.wait_for_function("() => String(recycle.views.get('plans-all')?.ghost?.failed) === '0,3'")
    page.click(".workers button:text-is('2.1')")
    page.wait_for_selector("text=no live worker is left for stage 1")
    page.go_back()
    page.wait_for_function("() => /fail=0.0,1.1(&|$)/.test(location.search)")
    page.wait_for_function("() => String(recycle.views.get('plans-all')?.table.failed) === '0,3'")
    page.evaluate("() => recycle.views.get('plans-all').sendLane(3)")  # a press on the name of 1.1
    page.wait_for_function("() => /fail=0.0(&|$)/.test(location.search)")
    page.wait_for_function("() => String(recycle.views.get('plans-all')?.ghost?.failed) === '0,3'")
    span = page.evaluate("() => recycle.views.get('plans-all').ghost.span")
    page.fill(".retime [data-field=F] input[type=text]", "4")
    page.wait_for_function("span => recycle.views.get('plans-all').ghost.span > span + 3", arg=span)


def test_times_typed_just_before_back_belong_to_the_step_that_is_left(journey: Any, address: str) -> None:
    page = journey(address + "/?pages=plans")
    drawn(page, "plans-all")
    page.click(".bench-tab:has-text('Scenario')")
    page.click(".workers button:text-is('0.0')")
    page.wait_for_function("() => location.search.includes('fail=0.0')")
    page.evaluate("""() => {
      const field = document.querySelector('.retime [data-field=F] input[type=text]');
      field.value = '4';
      field.dispatchEvent(new Event('input', { bubbles: true }));
      history.back();
    }""")
    page.wait_for_function("() => !location.search.includes('fail')")
    page.wait_for_timeout(600)
    assert "times" not in page.evaluate("() => location.search")
    assert page.locator(".banner").is_hidden()
    page.go_forward()
    page.wait_for_selector(".banner:has-text('F = 4, 0.0')")


def test_a_hostile_file_is_shown_as_text_and_a_large_one_is_not_sent(
    journey: Any, address: str, tmp_path: Path, broken: Schedule
) -> None:
    page = journey(address + "/?pages=validate")
    page.wait_for_selector("input[type=file]", state="attached")
    with (tmp_path / "large.json").open("wb") as file:
        file.truncate(MAX_BYTES + 2**20)
    page.set_input_files("input[type=file]", tmp_path / "large.json")
    page.wait_for_selector("text=large.json: 33 MB is too large for the page (at most 32 MB)")
    path = tmp_path / "<img src=x onerror=alert(1)>.json"
    wrong = {**broken.text(), "0.0": "0F0.0 0B0.0 0F0.1 0F0.1 0B0.1"}
    Schedule.from_text(broken.shape, wrong, failed=["1.1"]).save(path)
    page.set_input_files("input[type=file]", path)
    page.wait_for_selector("h2:has-text('<img src=x onerror=alert(1)>.json: ')")
    drawn(page, "validate-0")
    page.click(".bench-panel:visible [data-places]")
    framed = page.wait_for_function("() => recycle.views.get('validate-0').places").json_value()
    assert [place["lane"] for place in framed] == [0, 0]  # what is there twice, and where it was first
    assert page.locator("img").count() == 0


def test_modes_share_selection_and_panels(journey: Any, address: str) -> None:
    page = journey(address + "/?pages=schedules&panel=explain")
    drawn(page, "schedules-0", "schedules-1")
    page.wait_for_selector("text=over the makespan of 9;")
    page.evaluate(
        "() => { const view = recycle.views.get('schedules-1'); recycle.use(view); view.show({ t0: 0.5, t1: 4 });"
        "view.select(view.table.offsets[1]); }"
    )
    page.wait_for_selector("#headline:has-text('period 11')")
    page.wait_for_function("() => location.search.includes('view=schedules-1') && location.search.includes('sel=')")
    link = page.evaluate("() => location.search")
    page.keyboard.press("o")
    page.wait_for_function("() => document.documentElement.dataset.dock === 'below'")
    page.click(".tab:has-text('Compare')")
    drawn(page, "compare-0", "compare-1")
    script = "() => { const { view, selected } = recycle.views.get('compare-1'); return [view.t0, view.t1, selected]; }"
    *window, selected = page.evaluate(script)
    assert (window, selected > 0) == ([0.5, 4], True)
    page.wait_for_selector("text=against whole.json")  # the panel of the mode is open
    page.click(".tab:has-text('Validate')")  # which has no lanes until a file is dropped, so these stay
    page.wait_for_selector("text=Drop a schedule file here")
    assert page.evaluate(IN_SIGHT) == ["compare-0", "compare-1"]
    page.go_back()
    page.go_back()
    page.wait_for_function(f"() => String(({IN_SIGHT})()) === 'schedules-0,schedules-1'")
    page.wait_for_function("() => recycle.active.name === 'schedules-1'")
    page.focus(".tab[role=tab] >> nth=0")
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("Enter")
    page.wait_for_selector(".tab[aria-selected=true]:has-text('Validate')")
    page.goto(f"{address}/{link}")  # the headline is that of the selection
    page.wait_for_selector("#headline:has-text('period 11')")
    drawn(page, "schedules-0", "schedules-1")
    assert page.evaluate("() => [recycle.active.name, recycle.active.selected >= 0]") == ["schedules-1", True]
    windows = "() => ['schedules-0', 'schedules-1'].map((name) => recycle.views.get(name).view.t1)"
    assert page.evaluate(windows) == [4, 4]
    # A folded group stays folded, and the panel open, although the selection is in the group.
    changed = {**dict(parse_qsl(link[1:])), "fold": "0.1.2", "lanes": "0-3", "panel": "explain"}
    page.goto(f"{address}/?{urlencode(changed)}")
    drawn(page, "schedules-0", "schedules-1")
    page.wait_for_selector("text=over the makespan of 11;")
    shown = "() => { const { rows, selected } = recycle.active; return [rows.count, selected >= 0]; }"
    assert page.evaluate(shown) == [3, True]
    page.evaluate("() => { const view = recycle.views.get('schedules-0'); recycle.use(view); view.select(0); }")
    page.wait_for_function("() => location.search.includes('view=schedules-0')")
    page.go_back()  # to the timeline before
    page.wait_for_selector("#headline:has-text('period 11')")


def test_late_answers_do_not_replace_later_ones(journey: Any, address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def explained_late(entry: TimedLanes, context: TimelineContext, request: Any) -> Any:
        time.sleep(0.6 if context.timeline.makespan == 9 else 0)
        return panels.explained(entry, context, request)

    monkeypatch.setitem(bench.PANELS, "explain", explained_late)
    page = journey(address + "/?pages=schedules&panel=explain")
    with page.expect_response(lambda answer: "bench-explain" in (answer.request.post_data or "")):
        drawn(page, "schedules-0", "schedules-1")
        page.wait_for_timeout(300)
        page.evaluate("() => recycle.use(recycle.views.get('schedules-1'))")
        page.wait_for_selector("text=over the makespan of 11;")
    page.wait_for_load_state("networkidle")
    assert page.locator("text=over the makespan of 9;").count() == 0


def test_late_answers_to_presses_do_not_replace_later_ones(journey: Any, address: str) -> None:
    failed = "lanes => String(recycle.views.get('plans-all')?.table.failed) === lanes"
    page = journey(address + "/?fail=1.1")
    page.wait_for_function(failed, arg="3")
    page.click(".bench-tab:has-text('Scenario')")
    lanes = Held(page, CALLBACK, '"changedPropIds":["plans-trail.data"]')
    for place, press in enumerate(("0.0", "0.1")):
        page.click(f".workers button:text-is('{press}')")
        assert lanes[place]
    lanes.end(1, 0)
    page.wait_for_function(failed, arg="0,1,3")
    presses = Held(page, CALLBACK, '"output":"plans-message.children"', most=1)
    page.click(".workers button:text-is('1.0')")
    assert presses[0]
    page.fill("#fail", "2.0")
    page.press("#fail", "Enter")
    page.wait_for_function(failed, arg="4")
    presses.end(0)
    page.wait_for_timeout(500)
    assert page.evaluate(failed, "4")


def test_lanes_that_come_late_leave_the_timeline_in_use(journey: Any, address: str) -> None:
    page = journey(address + "/?pages=schedules")
    drawn(page, "schedules-0", "schedules-1")
    use = """([name, t0, selected]) => {
      const view = recycle.views.get(name);
      recycle.use(view);
      view.show({ t0 });
      view.select(selected);
    }"""
    page.evaluate(use, ["schedules-1", 1, 2])
    shades = Held(page, "**/shades/*.bin")
    page.click(".tab:has-text('Compare')")
    drawn(page, "compare-0")
    page.evaluate(use, ["compare-0", 3, 5])
    assert shades[0]
    shades.end(0)
    drawn(page, "compare-1")
    windows = "() => ['compare-0', 'compare-1'].map(name => recycle.views.get(name).view.t0)"
    assert page.evaluate(windows) == [3, 3]
    assert page.evaluate("() => [recycle.active.name, recycle.active.selected]") == ["compare-0", 5]


def test_details_are_of_what_is_selected_when_lanes_are_replaced(journey: Any, address: str) -> None:
    page = journey(address + "/?pages=schedules&panel=scenario")
    drawn(page, "schedules-0")
    page.evaluate(
        "() => { const view = recycle.views.get('schedules-0'), { replace } = view; recycle.use(view);"
        "view.replace = (...lanes) => { view.selectGap(0, 2, 5, true); return replace.apply(view, lanes); }; }"
    )
    page.fill(".retime [data-field=F] input[type=text]", "3")
    page.wait_for_function("() => recycle.views.get('schedules-0').table.span === 15")
    page.wait_for_timeout(600)
    assert page.locator(".selection h4").count() == 0


def test_of_several_files_and_fields_the_last_counts(journey: Any, address: str) -> None:
    def choose(forward: int) -> None:
        with page.expect_file_chooser() as chooser:
            page.click("text=Profile or job")
        content = f'{{"forward": {forward}}}'.encode()
        chooser.value.set_files({"name": f"{forward}.json", "mimeType": "text/plain", "buffer": content})

    def shown(span: float, name: str) -> None:
        page.wait_for_timeout(300)
        page.wait_for_function("span => recycle.views.get('schedules-0').table.span === span", arg=span)
        page.wait_for_selector(f".banner:has-text({name!r})")

    page = journey(address + "/?pages=schedules&panel=scenario")
    drawn(page, "schedules-0")
    files = Held(page, "**/scenario", '{"file"')
    for place, forward in enumerate((2, 3)):
        choose(forward)
        assert files[place]
    files.end(1, 0)
    shown(15, "times of 3.json")
    files = Held(page, "**/scenario", '{"file"')
    choose(4)
    assert files[0]
    page.fill(".retime [data-field=F] input[type=text]", "5")
    shown(21, "times of 3.json, F = 5")
    files.end(0)
    shown(21, "times of 3.json, F = 5")


def test_figures_are_those_of_the_timeline_in_use(journey: Any, address: str, healthy: Schedule) -> None:
    def use(name: str, period: str) -> None:
        page.evaluate("name => recycle.use(recycle.views.get(name))", name)
        page.wait_for_function(PERIOD, arg=period)

    page = journey("about:blank")
    lanes = Held(page, "**/lanes/*.bin")
    page.goto(address + "/?pages=schedules&view=schedules-1")
    lanes[0].continue_()
    drawn(page, "schedules-0")
    page.evaluate("() => recycle.use(recycle.views.get('schedules-0'))")
    lanes[1].continue_()  # lanes of the address come after another timeline was used
    drawn(page, "schedules-1")
    page.wait_for_timeout(300)
    page.wait_for_function(PERIOD, arg="9")
    lanes.end()
    page.click(".bench-tab:has-text('Scenario')")
    page.fill(".retime [data-field=F] input[type=text]", "3")
    page.wait_for_selector("#headline:has-text('period 15')")
    scenarios = Held(page, "**/scenario")
    page.fill(".retime [data-field=F] input[type=text]", "3.0")
    assert scenarios[0]
    use("schedules-1", "19")
    page.evaluate(WATCH)
    scenarios.end(0)
    page.wait_for_timeout(300)
    assert set(page.evaluate("() => told")) <= {"19"}
    use("schedules-0", "15")
    page.evaluate("() => { document.activeElement.blur(); recycle.views.get('schedules-0').select(0); }")
    page.keyboard.press(">")
    expected = simulate(editing.move(healthy, 0, 0, 1), Profile.uniform(forward=3))
    page.wait_for_function(PERIOD, arg=short(expected.period, 6))


def test_quick_edits_follow_each_other(journey: Any, address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("viz.pages.editing.move", lambda *edit, move=editing.move: (time.sleep(0.3), move(*edit))[1])
    page = journey(address + "/?pages=schedules")
    drawn(page, "schedules-0", "schedules-1")
    first = "(() => { const { table } = recycle.views.get('schedules-0'); return table.instruction(0); })()"
    page.evaluate("() => { const view = recycle.views.get('schedules-0'); recycle.use(view); view.select(0); }")
    assert page.evaluate(first) == "0F0.0"
    for key in (">", ">"):
        page.keyboard.press(key)
    page.evaluate("() => { const view = recycle.views.get('schedules-0'); view.select(view.table.offsets[1]); }")
    page.wait_for_function("() => recycle.views.get('schedules-0').edits.length === 2")
    assert page.evaluate(first.replace("(0)", "(2)")) == "0F0.0"
    page.keyboard.press("Z")
    page.wait_for_function("() => recycle.views.get('schedules-0').status.textContent === 'undone'")
    assert page.evaluate("() => recycle.views.get('schedules-0').edits.length") == 1
    assert page.evaluate(first) == "0F0.1"


def test_lanes_have_the_times_of_the_newest_scenario(
    journey: Any, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def under_late(model: PageModel, lanes: str, scenario: Scenario, under: Any = PageModel.under) -> Any:
        time.sleep(0.6 if scenario.times == "F=2" else 0)
        return under(model, lanes, scenario)

    monkeypatch.setattr("viz.scenario.PageModel.under", under_late)
    page = journey(address + "/?pages=schedules&panel=scenario&times=F%3D2")
    page.wait_for_selector(".retime [data-field=F] input[type=text]")
    page.fill(".retime [data-field=F] input[type=text]", "3")  # before the lanes have come
    drawn(page, "schedules-0", "schedules-1")
    page.wait_for_function("() => recycle.views.get('schedules-0').table.span === 15")
    page.wait_for_selector("#headline:has-text('period 15')")
    monkeypatch.setattr("viz.scenario.PageModel.under", lambda *_: None)  # a server that was started again
    page.fill(".retime [data-field=F] input[type=text]", "4")
    page.wait_for_selector(".banner:has-text('Reload the page')")


def test_a_lost_server_is_reported_and_lanes_stay(chromium: Any, address: str) -> None:
    page = chromium.new_page()
    page.goto(address + "/?pages=schedules")
    drawn(page, "schedules-0")
    notice = "text=The viewer's server does not respond"
    page.context.set_offline(True)
    page.click(".tab:has-text('Compare')")
    page.wait_for_selector(notice)
    assert page.evaluate(IN_SIGHT) == ["schedules-0", "schedules-1"]
    page.click(".tab:has-text('Schedules')")
    with page.expect_request(lambda request: "bench-explain" in (request.post_data or "")):
        page.click(".bench-tab:has-text('Explain')")
    page.wait_for_timeout(300)
    page.context.set_offline(False)
    page.evaluate("() => recycle.active.zoom(0.5)")  # which asks for the panel again
    page.wait_for_selector("text=over the makespan of 9;")
    page.wait_for_selector(notice, state="hidden")
    page.close()


def test_an_exported_page_opens_from_disk_and_loads_nothing(journey: Any, run_dir: Path, tmp_path: Path) -> None:
    export(tmp_path / "run.html", load_sources([run_dir]))
    page = journey((tmp_path / "run.html").as_uri())
    drawn(page, "run0-3")
    page.wait_for_function("() => document.querySelectorAll('.annotation-text').length >= 2")
    page.evaluate("() => recycle.use(recycle.views.get('run0-3'))")
    for key in ("w", ".", "t"):
        page.keyboard.press(key)
    page.wait_for_function("() => recycle.views.get('run0-3').selected >= 0")
    page.wait_for_selector(".lanes-listing tbody tr")
    page.wait_for_function("() => location.search.includes('view=run0-3')")
    loaded = page.evaluate("() => performance.getEntriesByType('resource').map(one => one.name)")
    assert [name for name in loaded if not name.startswith("data:")] == []


PANEL_FILLED = "() => [...document.querySelectorAll('.bench-panel')].some(panel => panel.innerText.trim())"


@pytest.mark.parametrize("theme", ["light", pytest.param("dark", marks=pytest.mark.soak)])
def test_pages_are_accessible_and_load_nothing_from_elsewhere(
    tab: Any, journey: Any, run_dir: Path, schedule_file: Path, healthy: Schedule, theme: str
) -> None:
    healthy.save(schedule_file.parent / "whole.json")
    address = served(run_dir, schedule_file, schedule_file.parent / "whole.json")
    tab.emulate_media(color_scheme=theme)
    page = journey(address)
    faults: set[str] = set()
    for title in page.locator(".tab").all_text_contents():
        page.locator(".tab", has_text=title).first.click()
        page.wait_for_load_state("networkidle")
        page.wait_for_timeout(300)
        tabs = page.locator(".bench-tab:visible")
        for place in range(tabs.count()):
            tabs.nth(place).dispatch_event("click")
            page.wait_for_function(PANEL_FILLED)
            faults |= set(page.evaluate(FAULTS))
        faults |= set(page.evaluate(FAULTS))
    loaded = page.evaluate("() => performance.getEntriesByType('resource').map(one => one.name)")
    assert faults == set()
    assert [name for name in loaded if not name.startswith(address)] == []


def test_pages_of_the_gallery_have_no_script_errors(journey: Any, site: Any, tmp_path: Path) -> None:
    (tmp_path / "gallery").mkdir()
    site.gallery(tmp_path / "gallery")
    pages = sorted((tmp_path / "gallery").glob("*.html"))
    assert len(pages) == len(FAMILIES)
    for file in pages:
        drawn(journey(file.as_uri()), "schedules-0")


def test_a_chosen_range_of_a_live_run_stays(
    journey: Any, make_run: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("viz.pages.page.REFRESH_SECONDS", 0.3)
    monkeypatch.setattr("viz.run_files.LiveRun.refresh", lambda _: time.sleep(0.5))  # a range is chosen during a tick
    page = journey(served(make_run(tmp_path / "run", live=True)) + "/?pages=time0")
    title, plot = "document.querySelector('#time0-parts h2').textContent", "#time0-curves .js-plotly-plot"
    page.wait_for_function(f"() => document.querySelector('{plot}')?.layout?.xaxis")

    def choose(range_: dict[str, Any], text: str) -> None:
        # Repeated: a plot sends no events right after it is drawn, and Dash drops outdated answers.
        page.evaluate("() => { window.moved = -Infinity; }")
        move = f"window.moved = performance.now(), Plotly.relayout(document.querySelector('{plot}'), range)"
        script = f"([range, text]) => {title} === text || (performance.now() > window.moved + 1500 && ({move}, false))"
        page.wait_for_function(script, arg=[range_, text])

    chosen = "Where the time went, from 0.25 to 0.75 s"
    choose({"xaxis.range[0]": 0.25, "xaxis.range[1]": 0.75}, chosen)
    page.evaluate(
        f"() => {{ window.shown = []; document.querySelector('{plot}').on('plotly_afterplot', () =>"
        f" shown.push([{title}, document.querySelector('{plot}').layout.xaxis.range.join()])); }}"
    )
    for _ in range(2):
        await_tick(page, "time0")
    page.wait_for_function("() => window.shown.length")
    assert {tuple(each) for each in page.evaluate("() => window.shown")} == {(chosen, "0.25,0.75")}
    choose({"xaxis.autorange": True}, "Where the time went")


def test_runs_are_picked_and_a_point_or_range_of_their_time_is_opened(
    journey: Any, make_run: Callable[..., Path], tmp_path: Path
) -> None:
    for name in ("one", "two, again"):
        make_run(tmp_path / "runs" / name)
    sources = load_sources([tmp_path / "runs" / name for name in ("one", "two, again")])
    page = journey(served(app=build_app(sources, run_folders=[tmp_path / "runs"])) + "/?pages=runs")
    for name in ("one", "two, again"):
        page.click(f".scoreboard [data-pick='{name}']")
    names = "() => document.querySelector('#runs-curves .js-plotly-plot')?.data?.map(line => line.name).join('/')"
    both = "/".join(["one/two, again"] * 4)
    page.wait_for_function(f"() => ({names})() === '{both}'")
    page.wait_for_function("() => location.search.includes('runs-chosen=one/two,+again')")
    page.reload()
    marked = "() => document.querySelectorAll('.scoreboard tr[aria-selected=true]').length"
    for count, go in ((2, partial(page.click, ".scoreboard [data-pick=one]")), (1, page.go_back), (2, page.title)):
        page.wait_for_function(f"count => ({marked})() === count", arg=count)
        go()
    page.wait_for_function(f"() => ({names})() === '{both}'")
    # A plot that becomes visible is resized once, which ends a drag.
    with page.expect_request(lambda request: "autosize" in (request.post_data or "")):
        page.click(".tab:has-text('Time of one')")
    plot = page.locator("#time0-curves .nsewdrag").first
    plot.scroll_into_view_if_needed()
    box = plot.bounding_box()
    page.mouse.move(box["x"] + box["width"] / 4, box["y"] + 20)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + 20, steps=5)
    page.mouse.up()
    page.wait_for_selector("#time0-parts h2:has-text('Where the time went, from ')")
    page.wait_for_function(PRESS, arg=4)
    page.wait_for_function(HEADING, arg=4)


def test_the_playground_draws_dropped_files_or_explains(
    journey: Any, site: Any, broken: Schedule, tmp_path: Path, run_dir: Path
) -> None:
    (tmp_path / "playground.html").write_text(site.playground())
    page = journey((tmp_path / "playground.html").as_uri())
    drawn(page, "schedules-0")
    latest = "[...recycle.views.values()].find((view) => view.root.closest('.dropped'))"

    def drop(name: str, content: str, text: str) -> None:
        (tmp_path / name).write_text(content)
        page.set_input_files(".playground input", tmp_path / name)
        page.wait_for_selector(f".playground [role=status]:has-text({text!r})")

    profile = Profile.uniform(link=0.25)
    for name, schedule in (("broken", broken), ("chunks", zb_v(Shape(2, 3, 4, chunks=2)))):
        table = LaneTable.from_timeline(simulate(schedule, profile))
        drop(f"{name}.json", "".join(chrome_trace.dumps(schedule, profile)), f"{len(table)} operations on")
        page.wait_for_function(f"length => {latest}?.drawn && {latest}.table.length === length", arg=len(table))
        columns = page.evaluate(f"""() => {{ const {{ table }} = {latest};
          return [[...table.offsets], [...table.end], table.labels, table.failed]; }}""")
        assert columns[0] == table.offsets.tolist()
        assert columns[1] == pytest.approx(table.end.tolist())
        assert columns[2:] == [[str(w) for w in schedule.shape.workers()], table.failed.nonzero()[0].tolist()]
    export(tmp_path / "plan.html", [schedule_source(Path("plan"), broken)])
    drop("plan.html", (tmp_path / "plan.html").read_text(), "plan.html: 37 operations")
    drop("trace.json", (run_dir / "trace.json").read_text(), "trace.json: ")
    assert page.locator(".dropped").count() == 1
    drop("n.json", "null", "n.json cannot be drawn: it is damaged")
    many = '{"traceEvents": [], "otherData": {"shape": {"pipelines": 100000, "ranks": 100000}}}'
    drop("m.json", many, "m.json cannot be drawn: a page shows at most 65536 workers")
    drop("x.json", "{", "x.json cannot be drawn: neither JSON nor a page")
    drop("y.json", '{"traceEvents": []}', "y.json cannot be drawn: no timeline of recycle")
    drop("z.json", '{"programs": {}}', "a schedule has no times yet: recycle convert FILE timeline.json")
