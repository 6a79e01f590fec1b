"""Pictures of every page of the viewer in headless Chromium, to be looked at, and those that docs/guides/viewer.md
shows.

    python docs/screenshots.py [--out FOLDER] [--only NAME,…]

Each page, also empty and with errors, is opened as a user would, in light and dark at 1280 × 800 and 1920 × 1080
pixels. What docs/guides/viewer.md shows goes to `docs/pictures`, in light at 1280 × 800; all others to FOLDER. Trains
an emulated job of six workers with a kill and a re-join for the page of a run. Needs Debian's `chromium` and Playwright
for Python: pip install 'recycle-pipeline[test]'.
"""

from __future__ import annotations

import argparse
import itertools
import shutil
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))
from recycle import Job, Schedule, Shape, Worker
from recycle.cli.planner import plan_for_training
from recycle.cli.view import _examples
from recycle.exec.faults.faults import parse_fault
from recycle.exec.launch.launcher import train
from recycle.exec.processes.forkserver import ForkServer
from recycle.ir.families import one_f_one_b
from recycle.solve.planner import plan
from viz.app import build_app, serve
from viz.sources import family_sources, load_sources, schedule_source
from viz.what_if import WhatIf

ROOT = Path(__file__).parent.parent
SHOWN = ("timeline", "large", "scoreboard", "what-if", "stuck", "time", "executed")
"""Pictures that docs/guides/viewer.md shows."""
SIZES, SCHEMES = ((1280, 800), (1920, 1080)), ("light", "dark")
JOB = """
[shape]
pipelines = 3
ranks = 4
micro_batches = 6
[memory]
limit = 6
"""
RUN_JOB = """
[shape]
pipelines = 3
ranks = 2
micro_batches = 4
[planner]
seconds = 1
[model]
kind = "emulated"
seconds_per_unit = 0.01
[train]
steps = 24
"""
DRAWN = """() => {
  const views = [...document.querySelectorAll('.lanes-view')].filter(view => view.offsetParent);
  return views.length && views.every(view => view.dataset.drawn);
}"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "pictures")
    parser.add_argument("--only", type=lambda text: text.split(","), help="names of pictures")
    arguments = parser.parse_args()
    (ROOT / "docs" / "pictures").mkdir(exist_ok=True)
    arguments.out.mkdir(parents=True, exist_ok=True)
    chosen = {name: take for name, take in PICTURES.items() if not arguments.only or name in arguments.only}
    with tempfile.TemporaryDirectory() as folder, chromium() as browser:
        for name, take in chosen.items():
            for (width, height), scheme in itertools.product(SIZES, SCHEMES):
                page = browser.new_page(viewport={"width": width, "height": height}, color_scheme=scheme)
                page.set_default_timeout(60_000)
                complaints: list[str] = []
                page.on("console", lambda message, said=complaints: said.append(message.text))
                page.on("pageerror", lambda error, said=complaints: said.append(str(error)))
                take(page, Path(folder))
                page.wait_for_load_state("networkidle")
                page.wait_for_timeout(400)
                path = arguments.out / f"{name}-{width}-{scheme}.png"
                page.screenshot(path=path)
                if name in SHOWN and (width, scheme) == (SIZES[0][0], SCHEMES[0]):
                    page.screenshot(path=ROOT / "docs" / "pictures" / f"{name}.png")
                page.close()
                print(path, *complaints, flush=True)
    return 0


@contextmanager
def chromium() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    path = shutil.which("chromium")
    if path is None:
        sys.exit("chromium is not installed: apt-get install chromium")
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=path, args=["--no-sandbox", "--disable-gpu"])
        yield browser
        browser.close()


def served(make: Callable[[], Any]) -> str:
    """The address of an application, served until this process ends."""
    ready, addresses = threading.Event(), []

    def on_ready(address: str) -> None:
        addresses.append(address)
        ready.set()

    threading.Thread(target=serve, args=(make(), 0, on_ready), daemon=True).start()
    if not ready.wait(60):
        raise TimeoutError("the application did not start")
    return addresses[0]


@cache
def job() -> Job:
    return Job.from_toml(JOB, "example")


@cache
def fault_free() -> Schedule:
    return one_f_one_b(job().shape)


@cache
def adaptive() -> Schedule:
    return plan(job(), frozenset([Worker(1, 2)]), quick=True).schedule


@cache
def examples() -> str:
    sources, what_if = _examples()
    return served(lambda: build_app(sources, what_if, is_example=True))


@cache
def families() -> str:
    return served(lambda: build_app(family_sources(Shape(1, 4, 8))))


@cache
def two_plans() -> str:
    sources = [
        schedule_source(Path("fault-free.json"), fault_free()),
        schedule_source(Path("adaptive.json"), adaptive()),
    ]
    return served(lambda: build_app(sources, WhatIf(job(), None, partial(plan, job(), quick=True))))


@cache
def one(name: str) -> str:
    schedule = {"fault-free": fault_free, "adaptive": adaptive, "large": large}[name]()
    return served(lambda: build_app([schedule_source(Path(f"{name}.json"), schedule)]))


@cache
def large() -> Schedule:
    """512 workers, 13 of them dead."""
    wide = Job.from_toml("[shape]\npipelines = 32\nranks = 16\nmicro_batches = 48\n[memory]\nlimit = 16\n", "large")
    dead = {Worker((7 * place + 3) % 32, (5 * place + 2) % 16) for place in range(13)}
    return plan(wide, frozenset(dead), quick=True).schedule


@cache
def run(folder: Path) -> Path:
    """A run of 24 iterations in which 1.1 is killed and comes back, and 0.0 leaves."""
    server = ForkServer("emulated")
    try:
        small = Job.from_toml(RUN_JOB, "run")
        faults = [parse_fault(text) for text in ("kill:1.1@8", "rejoin:1.1@16", "drain:0.0@18")]
        train(small, folder / "run", faults=faults, planner=plan_for_training, server=server)
        return folder / "run"
    finally:
        server.close()


def opened(page: Any, address: str, query: str = "", tab: str = "") -> None:
    page.goto(address + query)
    page.wait_for_selector(".tab")
    if tab:
        page.locator(".tab", has_text=tab).click()


def drawn(page: Any) -> None:
    page.wait_for_function(DRAWN)
    page.wait_for_load_state("networkidle")


def start(page: Any, folder: Path) -> None:
    opened(page, examples())


def fault_free_timeline(page: Any, folder: Path) -> None:
    opened(page, one("fault-free"))
    drawn(page)


def timeline(page: Any, folder: Path) -> None:
    opened(page, one("adaptive"))
    drawn(page)
    page.keyboard.press("/")
    page.keyboard.type("kind:F mb:1.1 stage:2")
    page.keyboard.press("Enter")
    page.keyboard.press("Tab")
    page.locator(".lanes-view").first.focus()
    page.keyboard.press("m")
    page.locator(".bench-tab:visible", has_text="Selection").click()
    page.wait_for_selector(".selection")


def table(page: Any, folder: Path) -> None:
    opened(page, one("adaptive"))
    drawn(page)
    page.keyboard.press("t")
    page.wait_for_selector(".lanes-listing tbody tr")


def large_timeline(page: Any, folder: Path) -> None:
    opened(page, one("large"))
    drawn(page)
    page.keyboard.press("g")
    page.wait_for_timeout(500)


def compare(page: Any, folder: Path) -> None:
    opened(page, two_plans(), tab="Compare")
    drawn(page)


def interleaved(page: Any, folder: Path) -> None:
    compare(page, folder)
    page.get_by_text("interleaved").click()
    page.wait_for_selector(".lanes-view[data-with]")
    drawn(page)


def scoreboard(page: Any, _: Path) -> None:
    page.goto(families() + "?times=link%3D0.25 limit%3D5")
    page.wait_for_selector(".lanes-spark canvas")
    page.focus(".retime [data-field=link] input[type=range]")
    page.keyboard.press("ArrowRight")
    page.wait_for_selector("#curves .js-plotly-plot")
    page.wait_for_timeout(500)


def explain(page: Any, folder: Path) -> None:
    opened(page, two_plans(), "?panel=explain")
    drawn(page)
    page.wait_for_selector("text=Longest bubbles")


def workers(page: Any, folder: Path) -> None:
    opened(page, one("large"), "?panel=workers")
    drawn(page)
    page.wait_for_selector("#workers-figure .js-plotly-plot")
    page.locator("#workers-figure").scroll_into_view_if_needed()
    page.locator("#workers-figure .updatemenu-button").nth(2).click()


def what_if(page: Any, folder: Path) -> None:
    opened(page, two_plans(), "?fail=1.2")
    drawn(page)
    page.locator(".workers button", has_text="0.1").click()
    page.wait_for_selector("text=Without 0.1, 1.2")
    drawn(page)


def library(page: Any, folder: Path) -> None:
    opened(page, two_plans(), tab="Plans and what-if")
    drawn(page)
    page.locator(".bench-tab:visible", has_text="Library").click()
    page.wait_for_selector("text=No plan library was given.")


def validate(page: Any, folder: Path) -> None:
    wrong = {**fault_free().text()}
    wrong["0.3"] = wrong["0.3"].replace("3F0.1 3B0.1", "3B0.1 3F0.1")
    wrong["2.0"] += " 0B2.5"
    path = folder / "mine.json"
    Schedule.from_text(fault_free().shape, wrong).save(path)
    dropped(page, path)
    drawn(page)
    page.locator(".bench-panel:visible [data-places]").first.click()
    page.wait_for_timeout(500)


def stuck(page: Any, folder: Path) -> None:
    path = folder / "stuck.json"
    programs = {"0.0": "0F0.0 0B0.0 0F0.1 0B0.1 0F0.2 0B0.2", "0.1": "1F0.0 1F0.1 1B0.0 1B0.1 1F0.2 1B0.2"}
    Schedule.from_text(Shape(1, 2, 3), programs).save(path)
    dropped(page, path)
    drawn(page)
    page.locator(".bench-panel:visible [data-places]").first.click()
    page.wait_for_timeout(500)


def unreadable(page: Any, folder: Path) -> None:
    path = folder / "notes.json"
    path.write_text('{"format": "recycle-schedule", "programs": {"0.0": "0F0.0 0Q')
    dropped(page, path)
    page.wait_for_selector(".problems")


def dropped(page: Any, path: Path) -> None:
    opened(page, two_plans(), tab="Validate")
    page.wait_for_selector("input[type=file]", state="attached")
    page.set_input_files("input[type=file]", path)


def run_page(page: Any, folder: Path) -> None:
    opened(page, served(lambda: build_app(load_sources([run(folder)]))))
    drawn(page)


def executed(page: Any, folder: Path) -> None:
    opened(page, served(lambda: build_app(load_sources([run(folder)]))), tab="Compare")
    drawn(page)
    page.wait_for_selector("text=Makespan and period")


def time_page(page: Any, folder: Path) -> None:
    opened(page, served(lambda: build_app(load_sources([run(folder)]))), tab="Time of")
    page.wait_for_selector("text=Where the time went")


def empty_run(page: Any, folder: Path) -> None:
    path = folder / "just-begun"
    path.mkdir(exist_ok=True)
    (path / "job.toml").write_text(RUN_JOB)
    opened(page, served(lambda: build_app(load_sources([path]))))
    page.wait_for_selector("text=No iteration ran yet.")


PICTURES: dict[str, Callable[[Any, Path], None]] = {
    "start": start,
    "fault-free": fault_free_timeline,
    "timeline": timeline,
    "table": table,
    "large": large_timeline,
    "compare": compare,
    "interleaved": interleaved,
    "scoreboard": scoreboard,
    "explain": explain,
    "workers": workers,
    "what-if": what_if,
    "no-library": library,
    "validate": validate,
    "stuck": stuck,
    "unreadable": unreadable,
    "run": run_page,
    "time": time_page,
    "executed": executed,
    "empty-run": empty_run,
}

if __name__ == "__main__":
    sys.exit(main())
