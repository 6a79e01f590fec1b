"""The SVG is the same bytes for the same schedule, and shows what the figure shows."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from recycle import Schedule, Timeline, simulate
from viz.figures.svg import TEXT, animation, label_width, svg
from viz.lanes import LaneTable, Panel, on_one_axis
from viz.numbers import ticks

GOLDEN = Path(__file__).parent.parent / "cases" / "timeline_1f1b_without_1.1.svg"
NAMESPACE = "{http://www.w3.org/2000/svg}"


def picture(healthy: Schedule, broken_timeline: Timeline) -> str:
    """The picture of the golden file; to accept a change, write its text there."""
    tables = LaneTable.from_timeline(simulate(healthy)), LaneTable.from_timeline(broken_timeline)
    return svg([Panel("All workers alive", tables[0], 11.0), Panel("Without 1.1: its peers take over", tables[1])])


def test_labels_keep_to_their_boxes(broken_timeline: Timeline) -> None:
    assert label_width("W1.0", True) > label_width("F1.0", True) > label_width("F1", False)
    # What DejaVu Sans, the widest of the fonts, takes at 11 pixels: bold W 12.1, digits 7.7, the point 4.2.
    assert label_width("W1.0", True) >= 12.1 + 7.7 + 4.2 + 7.7
    assert label_width("W10", False) >= 10.9 + 7.0 + 7.0
    table, sizes = LaneTable.from_timeline(broken_timeline), set()
    for width in range(200, 900, 25):
        for group in ElementTree.fromstring(svg([Panel("", table)], width=width)).iter(f"{NAMESPACE}g"):
            box, text = group.find(f"{NAMESPACE}rect"), group.find(f"{NAMESPACE}text")
            if box is None or text is None or not text.text:
                continue
            size = float(text.get("font-size", TEXT))
            taken = label_width(text.text, text.get("font-weight") == "600") * size / TEXT
            assert taken <= float(box.get("width", 0)) + 0.1, (width, text.text)
            sizes.add(size == TEXT)
    assert sizes == {True, False}


def test_the_bytes_are_those_of_the_golden_file(healthy: Schedule, broken_timeline: Timeline) -> None:
    assert picture(healthy, broken_timeline) == GOLDEN.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("span", "expected"),
    [
        (11.0, [0, 2, 4, 6, 8, 10]),
        (10.0, list(range(11))),
        (0.5, [0, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.35, 0.4, 0.45, 0.5]),
        (202.4, [0, 50, 100, 150, 200]),
        (0.0, [0]),
    ],
)
def test_ticks_are_round_numbers(span: float, expected: list[float]) -> None:
    assert ticks(span) == expected


def test_the_period_is_bracketed_from_the_start_on_the_time_axis(broken_timeline: Timeline) -> None:
    table = LaneTable.from_timeline(broken_timeline)
    drawn = svg([Panel("x", table, span=2 * table.span, period=table.span)], width=1000)
    (bracket,) = re.findall(r'<path class="period" d="M([0-9.]+) [0-9.]+L[0-9.]+ [0-9.]+L([0-9.]+) ', drawn)
    left, right = map(float, bracket)
    axis = [float(x) for x in re.findall(r'<path d="M([0-9.]+) ', drawn)]
    assert left == axis[0]
    assert right - left == pytest.approx((1000 - 16 - left) / 2, abs=0.02)
    assert f">period {table.span:g}<" in drawn
    assert "period" not in svg([Panel("x", table)])


def test_an_animation_shows_one_picture_at_a_time_and_the_last_where_none_is_played(
    healthy: Schedule, broken: Schedule
) -> None:
    tables = [LaneTable.from_timeline(simulate(schedule)) for schedule in (healthy, broken)]
    panels = on_one_axis([Panel("before", tables[0]), Panel("after", tables[1])])
    picture = ElementTree.fromstring(animation(panels, seconds=2))
    frames = [group for group in picture.iter(f"{NAMESPACE}g") if group.get("opacity") is not None]
    assert [frame.get("opacity") for frame in frames] == ["0", "1"]
    played = [frame.find(f"{NAMESPACE}animate") for frame in frames]
    assert [one.get("values") for one in played if one is not None] == ["1;0", "0;1"]
