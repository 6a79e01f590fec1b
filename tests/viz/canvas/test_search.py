"""The search of the viewer: terms that must all hold, mistakes in one line, what is outlined while one types."""

from __future__ import annotations

import pytest

from tests.viz.canvas.page import VIEW, Page

pytestmark = pytest.mark.browser


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
