"""The validate page: a verdict, findings with their rule and place, lanes with badges; harm is shown as text."""

from __future__ import annotations

import base64
import json
from typing import Any

from recycle import Schedule, Shape
from recycle.ir.check import explain
from recycle.ir.families import one_f_one_b
from tests.viz.components import canvases, of_type, plain, words
from viz.app import build_app
from viz.dropped import MOST_BYTES, inspect
from viz.pages.validate_page import FINDINGS_SHOWN, ValidatePage


def answered(schedule: Schedule) -> Any:
    """What the page answers to a file, as the browser gets it."""
    contents = "data:;base64," + base64.b64encode(schedule.dumps().encode()).decode()
    return plain([*ValidatePage().answer(contents, "mine.json")])


def test_a_valid_file_is_called_valid_and_drawn(broken: Schedule) -> None:
    component = answered(broken)
    assert {"mine.json: Valid", "makespan 11"} <= set(words(component))
    assert len(canvases(component)) == 1
    assert of_type(component, "Button") == []


def test_findings_carry_rule_place_message_and_hint(broken: Schedule) -> None:
    programs = {**broken.text(), "0.0": "0F0.0 0F0.1 0F0.1 0B0.0 0B0.1"}
    component = answered(Schedule.from_text(broken.shape, programs, failed=["1.1"]))
    assert {"mine.json: Not valid (1 error, 0 warnings)", "duplicate", "0.0 #2", "0F0.1"} <= set(words(component))
    (abbreviation,) = of_type(component, "Abbr")
    rule = explain("duplicate")
    assert rule is not None
    assert abbreviation["title"] == rule.documentation
    (button,) = of_type(component, "Button")
    assert json.loads(button["data-places"]) == [[0, 2.0, 3.0], [0, 1.0, 2.0]]  # its place, and what it repeats


def test_a_flood_of_findings_is_counted_in_the_verdict_and_below_the_table() -> None:
    texts = words(answered(Schedule.from_text(Shape(1, 1, 1), {"0.0": "0F0 " * 3000 + "0B0"})))
    assert "mine.json: Not valid (2,999 errors, 0 warnings)" in texts
    assert f"The first {FINDINGS_SHOWN}; {2999 - FINDINGS_SHOWN:,} more from `recycle check`." in texts


def test_what_cannot_be_read_says_why_and_draws_nothing() -> None:
    contents = "data:;base64," + base64.b64encode(b"0F0,<script>alert(1)</script>\n").decode()
    *shown, said, kind = ValidatePage().answer(contents, "a.csv")
    assert any("'<script>alert(1)</script>' is not an action" in text for text in words(plain(shown)))
    assert (said, kind, canvases(plain(shown))) == ("a.csv: refused", "status", [])


def test_lanes_carry_their_number_of_findings() -> None:
    shape = Shape(60, 4, 5)
    text = one_f_one_b(shape).text()
    text["47.3"] = text["47.3"] + " 3B47.1"
    file = inspect(Schedule.from_text(shape, text).dumps().encode(), "mine.json")
    page = ValidatePage()
    component = plain(page.lanes(file))
    (canvas,) = canvases(component)
    shown = page.cache.get(canvas["data-address"].removeprefix("lanes/").removesuffix(".bin"))
    assert shown.table.labels[47 * 4 + 3] == "47.3 ▲1"
    assert page.places(file, file.findings[0])[0].lane == 47 * 4 + 3


def test_a_request_beyond_the_limit_is_refused_by_the_server() -> None:
    client = build_app([]).server.test_client()
    answer: Any = client.post("/_dash-update-component", data=b"x" * (MOST_BYTES * 4 // 3 + 2**20 + 1),
                              content_type="application/json")  # fmt: skip
    assert answer.status_code == 413
