"""The routes of a timeline: one immutable answer per content, a picture of all lanes, details that explain."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from recycle import Schedule, Timeline, simulate
from tests.viz.components import canvases, plain, words
from tests.viz.lanes_bin import decode
from viz.analysis.differences import scaled
from viz.app import build_app
from viz.details import headline
from viz.lane_cache import Explainer, LaneCache
from viz.lanes import LaneTable
from viz.pages.lanes_view import answer, lanes_view
from viz.sources import load_source
from viz.wire import encode


@pytest.fixture
def client(schedule_file: Path) -> Any:
    return build_app([load_source(schedule_file)]).server.test_client()


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


def test_a_selection_is_answered_with_text_and_links(broken_timeline: Timeline) -> None:
    cache = LaneCache()
    digest = cache.put(LaneTable.from_timeline(broken_timeline), Explainer(broken_timeline))
    card, links = answer(cache, {"address": f"lanes/{digest}.bin", "operation": 2})
    texts = words(plain(card))
    assert texts[0] == "0B0.0"
    assert "none: waited for this" in texts
    assert links["operation"] == 2
    assert links["waited"] in links["inputs"]


@pytest.mark.parametrize("choice", [None, [], "x", {"address": 3}, {"address": "lanes/x.bin", "operation": 1}])
def test_a_selection_that_says_nothing_known_is_answered_calmly(choice: Any) -> None:
    card, links = answer(LaneCache(), choice)
    assert links is None
    assert words(plain(card)) in ([], ["These lanes are no longer kept. Load the page again."])


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
