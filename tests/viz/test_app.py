"""The application serves everything itself, keeps other pages away, and answers for ever what never changes."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from recycle import Schedule, Timeline, simulate
from tests.viz.components import canvases, decode, of_type, plain
from viz.analysis.differences import scale_timeline
from viz.app import build_app
from viz.details import headline
from viz.lane_cache import LaneCache, TimedLanes, TimelineContext, encode
from viz.lanes import LaneTable
from viz.pages.lanes_view import lanes_view, selection_details
from viz.pages.validate_page import MAX_BYTES
from viz.sources import load_sources


@pytest.fixture
def client(schedule_file: Path) -> Any:
    return build_app(load_sources([schedule_file]), allowed_hosts=["Viewer.example"]).server.test_client()


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
def test_only_requests_to_this_machine_or_allowed_hosts_are_answered(client: Any, host: str, status: int) -> None:
    answers = [client.get(path, headers={"Host": host}) for path in ("/", "/_dash-layout", "/assets/modules/view.js")]
    assert [answer.status_code for answer in answers] == [status] * 3
    if status == 403:
        assert answers[0].text.startswith("recycle: ")
        assert answers[0].text.endswith("--allow-host NAME\n")


@pytest.mark.parametrize(
    ("origin", "status"),
    [(None, 400), ("http://localhost", 400), ("http://evil.example", 403), ("null", 403), ("http://localhost:81", 403)],
)
def test_posts_from_other_pages_are_refused(client: Any, origin: str | None, status: int) -> None:
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
def test_paths_outside_of_the_assets_are_not_found(client: Any, path: str, capfd: pytest.CaptureFixture[str]) -> None:
    answer = client.get(path)
    assert "root:" not in answer.text
    # All other paths get the page, whose script finds nothing under them.
    assert answer.status_code == 404 or answer.text.startswith("<!DOCTYPE html>")
    assert answer.status_code == 404 or not path.startswith(("/assets/", "/_dash"))
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("body", ["{", "[]", "{}", '{"output": 1}', '{"output": ["x"]}', '{"output": "x.y"}'])
def test_unknown_callbacks_are_refused(client: Any, body: str, capfd: pytest.CaptureFixture[str]) -> None:
    answer = client.post("/_dash-update-component", data=body, content_type="application/json")
    assert answer.status_code == 400
    assert capfd.readouterr() == ("", "")


@pytest.fixture
def address(client: Any) -> str:
    """Of the lanes that the page opens with."""
    page = client.get("/").get_data(as_text=True)
    return "/" + re.search(r"lanes/\w+\.bin", page)[0]  # type: ignore[index]


def test_browsers_cache_lanes_forever(client: Any, address: str, broken_timeline: Timeline) -> None:
    first = client.get(address)
    assert first.data == encode(LaneTable.from_timeline(broken_timeline))
    assert decode(first.data)["description"]["labels"][3] == "1.1"
    assert "immutable" in first.headers["Cache-Control"]
    assert "max-age=31536000" in first.headers["Cache-Control"]
    again = client.get(address, headers={"If-None-Match": first.headers["ETag"]})
    assert (again.status_code, again.data) == (304, b"")
    assert client.get(address, headers={"If-None-Match": '"other"'}).status_code == 200


@pytest.mark.parametrize("choice", [None, [], "x", {"address": 3}, {"address": "lanes/x.bin", "operation": 1}])
def test_a_wrong_selection_has_no_details(choice: Any) -> None:
    assert selection_details(LaneCache(), choice)[1] is None


def test_texts_about_lanes_have_the_unit_of_their_last_axis(healthy: Schedule) -> None:
    cache, timeline = LaneCache(), scale_timeline(simulate(healthy), 0.2)
    table, context = replace(LaneTable.from_timeline(timeline), unit="s"), TimelineContext(timeline, executed=True)
    for span, word, makespan in ((None, "ms", "1800 ms"), (2.5, "s", "1.8 s")):
        (view,) = canvases(plain(lanes_view("", TimedLanes(table, context), "a", cache, span=span)))
        entry = cache.get(view["data-address"])
        assert entry is not None
        assert (view["data-word"], headline(entry)[0].value) == (word, makespan)


def test_the_application_loads_nothing_from_elsewhere_and_limits_browsers(run_dir: Path, schedule_file: Path) -> None:
    client = build_app(load_sources([run_dir, schedule_file])).server.test_client()
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
    content = b"x" * (MAX_BYTES * 4 // 3 + 2**20 + 1)
    answer = client.post("/_dash-update-component", data=content, content_type="application/json")
    assert answer.status_code == 413
