"""The pages in a real browser: they load everything from their own server, complain of nothing and draw the lanes.

Needs Debian's `chromium` and `chromium-driver`; skipped where they are not installed.
"""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from recycle import Shape
from recycle.ir.families import gpipe
from tests.viz.serving import served
from viz.export import export
from viz.sources import load_source

webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(not (CHROMIUM and DRIVER), reason="chromium or chromium-driver is not installed"),
]
ARGUMENTS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
    "--window-size=1280,1700",
)
SECONDS = 60
FOREIGN = "return performance.getEntriesByType('resource').map(r => r.name).filter(n => !n.startsWith(arguments[0]))"
DRAWN = """
const view = window.recycle.views.get(arguments[0]);
if (!view || !view.drawn) return null;
const operations = Array.from({length: view.table.length}, (_, i) => i);
return {
  failed: view.table.failed.map(lane => view.table.labels[lane]),
  rerouted: operations.filter(i => view.table.has(i, "REROUTED")).map(i => view.table.label(i)),
};
"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    from selenium.webdriver.chrome.options import Options
    from selenium.webdriver.chrome.service import Service

    options = Options()
    options.binary_location = CHROMIUM
    for argument in ARGUMENTS:
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(DRIVER))
    yield driver
    driver.quit()


def wait(browser: Any, condition: Any) -> Any:
    from selenium.common.exceptions import StaleElementReferenceException
    from selenium.webdriver.support.ui import WebDriverWait

    replaced = [StaleElementReferenceException]  # while it was looked at
    return WebDriverWait(browser, SECONDS, ignored_exceptions=replaced).until(lambda _: condition())


def headings(browser: Any) -> list[str]:
    """Of the timelines in sight."""
    found = browser.find_elements("css selector", ".lanes h3")
    return [element.text for element in found if element.is_displayed()]


def drawn(browser: Any, name: str) -> dict[str, Any]:
    """Labels and failed lanes of the timeline `name`, once it is drawn."""
    found: dict[str, Any] = wait(browser, lambda: browser.execute_script(DRAWN, name))
    return found


def test_a_run_shows_its_failure_and_follows_the_buttons(browser: Any, run_dir: Path) -> None:
    address = served(run_dir)
    browser.get(address)
    executed = drawn(browser, "run0-executed")
    assert set(executed["rerouted"]) >= {"F1.0", "F1.1", "I1.0", "W1.1"}
    assert executed["failed"] == ["1.1"]

    buttons = browser.find_elements("css selector", ".moments button")
    assert buttons[0].text == "before the failure: step 2"
    buttons[0].click()
    wait(browser, lambda: headings(browser) == ["Planned, step 2", "Executed, step 2"])
    wait(browser, lambda: drawn(browser, "run0-planned")["failed"] == [])
    assert drawn(browser, "run0-planned")["rerouted"] == []
    assert browser.execute_script(FOREIGN, address) == []
    assert browser.get_log("browser") == []


def test_a_run_that_just_began_says_so(browser: Any, run_dir: Path) -> None:
    for name in ("metrics.jsonl", "events.jsonl", "trace.json"):
        (run_dir / name).unlink()
    for log in (run_dir / "logs").iterdir():
        log.unlink()
    browser.get(served(run_dir))
    wait(browser, lambda: "No iteration ran yet." in browser.find_element("tag name", "body").text)
    assert "No step is committed yet." in browser.find_element("tag name", "body").text
    assert browser.get_log("browser") == []


def test_tabs_open_a_run_and_a_schedule(browser: Any, run_dir: Path, schedule_file: Path) -> None:
    browser.get(served(run_dir, schedule_file))
    wait(browser, lambda: len(browser.find_elements("css selector", ".tab, [role=tab]")) >= 2)
    tabs = browser.find_elements("css selector", "[role=tab]") or browser.find_elements("css selector", ".tab")
    next(tab for tab in tabs if tab.text == "broken.json").click()
    wait(browser, lambda: headings(browser) == ["broken.json: D=3 P=2 m=2, 1.1 failed"])
    assert "F1.0" in drawn(browser, "schedules-0")["rerouted"]
    assert browser.get_log("browser") == []


def test_an_exported_page_opens_from_disk_and_loads_nothing(browser: Any, run_dir: Path, tmp_path: Path) -> None:
    export(tmp_path / "run.html", [load_source(run_dir)])
    browser.get((tmp_path / "run.html").as_uri())
    # Two changes on each of two figures: drawing one of them while keys are pressed would keep the page from answering.
    wait(browser, lambda: len(browser.find_elements("css selector", ".annotation-text")) >= 4)
    assert drawn(browser, "run0-3")["failed"] == ["1.1"]
    assert "F1.0" in drawn(browser, "run0-3")["rerouted"]
    first = browser.execute_script(
        "const view = recycle.active = recycle.views.get('run0-3'); view.used = true;"
        "const { t0, t1 } = view.view, left = (t0 + t1) / 2 - 0.35 * (t1 - t0);"
        "return view.table.instruction(view.table.firstAfter(view.rows.lane(0), left))"
    )
    browser.find_element("tag name", "body").send_keys("w", ".", "t", "m")
    status = "return recycle.views.get('run0-3').status.textContent"
    # The first operation that ends after the left edge of the zoomed window, drawn already or not.
    wait(browser, lambda: browser.execute_script(status).startswith(f"{first}; "))
    wait(browser, lambda: browser.find_elements("css selector", ".lanes-listing tbody tr"))
    wait(browser, lambda: "?" in browser.current_url)
    assert browser.execute_script(FOREIGN, "data:") == []
    assert browser.get_log("browser") == []


def test_an_exported_page_holds_as_many_operations_as_there_are(browser: Any, tmp_path: Path) -> None:
    gpipe(Shape(pipelines=64, ranks=8, micro_batches=64)).save(tmp_path / "large.json")
    export(tmp_path / "large.html", [load_source(tmp_path / "large.json")])
    assert (tmp_path / "large.html").stat().st_size < 8_000_000
    browser.get((tmp_path / "large.html").as_uri())
    wait(browser, lambda: browser.execute_script("return window.recycle?.views.get('schedules-0-0')?.drawn"))
    assert (
        browser.execute_script("return recycle.views.get('schedules-0-0').table.length") == 2 * 64 * 8 * 64 + 2 * 64 * 8
    )
    assert browser.get_log("browser") == []


def test_another_page_can_neither_frame_nor_read_it(browser: Any, schedule_file: Path) -> None:
    address = served(schedule_file)
    page = f"<iframe src='{address}'></iframe>".encode()

    class Elsewhere(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(page)

        def log_message(self, *_: Any) -> None:
            return

    with ThreadingHTTPServer(("127.0.0.1", 0), Elsewhere) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        browser.get(f"http://localhost:{server.server_address[1]}")
        read = f"""
            const done = arguments[0];
            fetch('{address}/_dash-layout').then(() => done('read'), () => done('refused'));
        """
        assert browser.execute_async_script(read) == "refused"
        said = " ".join(entry["message"] for entry in browser.get_log("browser"))
        assert "frame" in said.lower()
        browser.switch_to.frame(browser.find_element("tag name", "iframe"))
        assert "D=3" not in browser.page_source
        browser.switch_to.default_content()
        server.shutdown()
    browser.get("about:blank")
    browser.get_log("browser")
