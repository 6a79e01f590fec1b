"""The application serves everything itself, keeps other pages away, and answers for ever what never changes."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from recycle import Schedule, Timeline, simulate
from tests.viz.components import canvases, decode, of_type, plain
from viz.analysis.differences import scaled
from viz.app import build_app
from viz.details import headline
from viz.lane_cache import Explainer, LaneCache, encode
from viz.lanes import LaneTable
from viz.pages.lanes_view import answer, lanes_view
from viz.pages.validate_page import MOST_BYTES
from viz.sources import load_source


@pytest.fixture
def client(schedule_file: Path) -> Any:
    return build_app([load_source(schedule_file)], allowed_hosts=["Viewer.example"]).server.test_client()


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("127.0.0.1:8050", 200),
        ("localhost:9000", 200),
        ("[::1]:8050", 200),
        ("viewer.example", 200),
        ("VIEWER.EXAMPLE:80", 200),
        ("evil.example:8050", 403),
        ("127.0.0.1.evil.example", 403),
        ("localhost.", 403),
        ("[", 403),
    ],
)
def test_only_names_of_this_machine_and_allowed_ones_are_answered(client: Any, host: str, status: int) -> None:
    answers = [client.get(path, headers={"Host": host}) for path in ("/", "/_dash-layout", "/assets/modules/view.js")]
    assert [answer.status_code for answer in answers] == [status] * 3
    if status == 403:
        assert answers[0].text.startswith("recycle: ")
        assert answers[0].text.endswith("--allow-host NAME\n")


@pytest.mark.parametrize(
    ("origin", "status"),
    [(None, 400), ("http://localhost", 400), ("http://evil.example", 403), ("null", 403), ("http://localhost:81", 403)],
)
def test_posts_come_from_the_page_itself(client: Any, origin: str | None, status: int) -> None:
    headers = {} if origin is None else {"Origin": origin}
    answer = client.post("/_dash-update-component", data="no JSON", headers=headers)
    assert (answer.status_code == 403) == (status == 403)


@pytest.mark.parametrize(
    "path",
    [
        "/assets/../../../../etc/passwd",
        "/assets/%2e%2e%2f%2e%2e%2fetc/passwd",
        "/assets/%00",
        "/_dash-component-suites/dash/../../../etc/passwd",
        "/_dash-component-suites/plotly/..%2f..%2f..%2fetc%2fpasswd",
        "/_dash-component-suites/../x.js",
        "/_dash-component-suites/os/path.py",
        "/_dash-component-suites/dash/dcc/none.js",
        "/lanes/../none.bin",
        "/shades/..%2f..%2fnone.bin",
    ],
)
def test_a_path_that_leads_elsewhere_is_not_there_and_nothing_is_printed(
    client: Any, path: str, capfd: pytest.CaptureFixture[str]
) -> None:
    answer = client.get(path)
    assert "root:" not in answer.text
    # All other paths get the page, whose script finds nothing under them.
    assert answer.status_code == 404 or answer.text.startswith("<!DOCTYPE html>")
    assert answer.status_code == 404 or not path.startswith(("/assets/", "/_dash"))
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("body", ["{", "[]", "{}", '{"output": 1}', '{"output": ["x"]}', '{"output": "x.y"}'])
def test_a_callback_that_the_page_does_not_have_is_refused_and_nothing_is_printed(
    client: Any, body: str, capfd: pytest.CaptureFixture[str]
) -> None:
    answer = client.post("/_dash-update-component", data=body, content_type="application/json")
    assert answer.status_code == 400
    assert capfd.readouterr() == ("", "")


@pytest.fixture
def address(client: Any) -> str:
    """Of the lanes that the page opens with."""
    page = client.get("/").get_data(as_text=True)
    return "/" + re.search(r"lanes/\w+\.bin", page)[0]  # type: ignore[index]


def test_the_lanes_are_one_answer_for_ever(client: Any, address: str, broken_timeline: Timeline) -> None:
    first = client.get(address)
    assert first.data == encode(LaneTable.from_timeline(broken_timeline))
    assert decode(first.data)["description"]["labels"][3] == "1.1"
    assert "immutable" in first.headers["Cache-Control"]
    assert "max-age=31536000" in first.headers["Cache-Control"]
    again = client.get(address, headers={"If-None-Match": first.headers["ETag"]})
    assert (again.status_code, again.data) == (304, b"")
    assert client.get(address, headers={"If-None-Match": '"other"'}).status_code == 200


@pytest.mark.parametrize("choice", [None, [], "x", {"address": 3}, {"address": "lanes/x.bin", "operation": 1}])
def test_a_selection_that_says_nothing_known_is_answered_calmly(choice: Any) -> None:
    assert answer(LaneCache(), choice)[1] is None


def test_everything_told_of_lanes_has_the_unit_of_the_axis_they_were_drawn_under_last(healthy: Schedule) -> None:
    cache, table = LaneCache(), replace(LaneTable.from_timeline(simulate(healthy)), unit="s")
    short = replace(table, start=table.start * 0.2, end=table.end * 0.2)  # 1.8 s
    explainer = Explainer(scaled(simulate(healthy), 0.2), executed=True)
    alone = canvases(plain(lanes_view("", short, "a", cache, explainer=explainer)))[0]
    shown = cache.get(alone["data-address"])
    assert (alone["data-word"], headline(shown)[0].value) == ("ms", "1800 ms")
    beside = canvases(plain(lanes_view("", short, "a", cache, explainer=explainer, span=2.5)))[0]
    shown = cache.get(beside["data-address"])
    assert (beside["data-word"], headline(shown)[0].value) == ("s", "1.8 s")
    assert alone["data-address"] == beside["data-address"]


def test_the_application_serves_itself_and_says_what_a_browser_may_load(run_dir: Path, schedule_file: Path) -> None:
    client = build_app([load_source(run_dir), load_source(schedule_file)]).server.test_client()
    page = client.get("/").get_data(as_text=True)
    assert "http://" not in page
    assert "https://" not in page
    layout = client.get("/_dash-layout").get_json()
    tabs = [tab["label"] for tab in of_type(layout, "Tab")]
    assert tabs == ["run", "Time of run", "broken.json", "Compare", "Validate"]
    places = [part for part in of_type(layout, "Div") if part.get("className") == "mode"]
    assert {part["data-page"] for part in places if part["children"]} == {"run0"}  # others fill theirs when opened
    for path in ("/", "/assets/modules/view.js", "/nothing-there"):
        headers = client.get(path).headers
        policy = dict(entry.split(" ", 1) for entry in headers["Content-Security-Policy"].split("; "))
        assert (policy["default-src"], policy["frame-ancestors"]) == ("'self'", "'none'")
        assert "unsafe" not in policy["script-src"]
        assert (headers["X-Frame-Options"], headers["X-Content-Type-Options"]) == ("DENY", "nosniff")


def test_a_request_beyond_the_limit_is_refused(client: Any) -> None:
    content = b"x" * (MOST_BYTES * 4 // 3 + 2**20 + 1)
    answer = client.post("/_dash-update-component", data=content, content_type="application/json")
    assert answer.status_code == 413
