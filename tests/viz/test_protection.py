"""Pages of others get nothing from the viewer, neither under another name, nor by a post, nor in a frame."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from viz.app import build_app
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


def test_every_answer_says_what_a_browser_may_load(client: Any) -> None:
    for path in ("/", "/assets/modules/view.js", "/nothing-there"):
        headers = client.get(path).headers
        policy = dict(entry.split(" ", 1) for entry in headers["Content-Security-Policy"].split("; "))
        assert policy["default-src"] == "'self'"
        assert policy["frame-ancestors"] == "'none'"
        assert "unsafe" not in policy["script-src"]
        assert headers["X-Frame-Options"] == "DENY"
        assert headers["X-Content-Type-Options"] == "nosniff"
