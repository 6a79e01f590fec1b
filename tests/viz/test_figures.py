"""Pictures hold the figures of the timeline, avoid the traps of plotly, and can be read; the SVG is the same bytes."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

from recycle import Schedule, Shape, Timeline, simulate
from recycle.ir.families import FAMILIES
from recycle.ir.instruction import OverlappedPair
from tests.viz.components import decode
from viz.figures import palette
from viz.figures.boxes import boxes
from viz.figures.charts import event_text
from viz.figures.svg import TEXT, label_width, svg
from viz.lane_cache import PAIRED, encode
from viz.lanes import LaneTable, Panel
from viz.numbers import percent, short, signed, signed_percent, ticks


def luminance(colour: str) -> float:
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(first: str, second: str) -> float:
    dark, light = sorted((luminance(first), luminance(second)))
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("paint", sum(palette.CHUNK_PAINTS, palette.SHADES), ids=lambda paint: paint.key)
def test_labels_can_be_read_on_their_colour_and_on_its_stripes(paint: palette.Paint) -> None:
    assert contrast(paint.ink, paint.fill) >= 4.5
    assert contrast(paint.ink, paint.hatch) >= contrast(paint.ink, paint.fill)


DEUTERANOPIA = np.array([[0.367, 0.861, -0.228], [0.280, 0.673, 0.047], [-0.012, 0.043, 0.969]])
PROTANOPIA = np.array([[0.152, 1.053, -0.205], [0.115, 0.786, 0.099], [-0.004, -0.048, 1.052]])
"""Views of linear RGB (Machado, Oliveira and Fernandes, 2009, severity 1)."""


@pytest.mark.parametrize("matrix", [np.eye(3), DEUTERANOPIA, PROTANOPIA], ids=["usual", "deuteranopia", "protanopia"])
def test_shades_differ_from_each_other_and_from_kinds_for_every_eye(matrix: Any) -> None:
    def view(paint: palette.Paint) -> Any:
        linear = np.array([(int(paint.fill[i : i + 2], 16) / 255) ** 2.2 for i in (1, 3, 5)])
        return 255 * np.clip(matrix @ linear, 0, 1) ** (1 / 2.2)

    for first, second in itertools.combinations([*palette.SHADES, *palette.PAINTS], 2):
        if first in palette.SHADES:
            least = 30 if second in palette.SHADES else 20
            assert np.linalg.norm(view(first) - view(second)) > least, (first, second)


def test_chunks_of_an_interleaved_schedule_are_drawn_in_two_shades() -> None:
    table = LaneTable.from_timeline(simulate(FAMILIES["zb-v"](Shape(1, 2, 2, chunks=2))))
    fills = {(int(table.chunk[box.operation]), box.paint.key): box.paint.fill for box in boxes(table)}
    assert fills[0, "forward"] == palette.FORWARD.fill
    assert fills[1, "forward-3"] == palette.CHUNK_PAINTS[3][0].fill
    assert "Lighter: later chunks" in svg([Panel("zb-v", table)])


def test_both_halves_of_an_overlapped_pair_are_labelled() -> None:
    table = LaneTable.from_timeline(simulate(FAMILIES["dualpipe-v"](Shape(1, 2, 6, chunks=2))))
    pair = next(i for i in range(len(table)) if isinstance(table.instruction(i), OverlappedPair))
    drawn = [box for box in boxes(table) if box.operation == pair]
    assert [box.label for box in drawn] == ["F3", "B1", ""]
    assert drawn[0].bottom == drawn[1].top
    assert set(PAIRED) <= set(decode(encode(table))["description"]["columns"])


@pytest.mark.parametrize(
    ("fault", "text"),
    [("hang:1.1@5", "1.1 failed"), ("slow=3:1.1@4-8", "1.1 slow"), ("drain:1.1@4", "1.1 asked to leave")],
)
def test_only_workers_that_die_of_a_fault_are_marked_as_failed(fault: str, text: str) -> None:
    assert event_text({"kind": "fault", "worker": "1.1", "fault": fault}) == text


GOLDEN = Path(__file__).parent.parent / "cases" / "timeline_1f1b_without_1.1.svg"


NAMESPACE = "{http://www.w3.org/2000/svg}"


def picture(healthy: Schedule, broken_timeline: Timeline) -> str:
    """The picture of the golden file; to accept a change, write its text there."""
    tables = LaneTable.from_timeline(simulate(healthy)), LaneTable.from_timeline(broken_timeline)
    return svg([Panel("All workers alive", tables[0], 11.0), Panel("Without 1.1: its peers take over", tables[1])])


def test_labels_keep_to_their_boxes(broken_timeline: Timeline) -> None:
    # What DejaVu Sans, the widest of the fonts, takes at 11 pixels: bold W 12.1, digits 7.7, the point 4.2.
    assert label_width("W1.0", True) >= 12.1 + 7.7 + 4.2 + 7.7
    table, is_full_size = LaneTable.from_timeline(broken_timeline), set()
    for width in range(200, 900, 25):
        for group in ElementTree.fromstring(svg([Panel("", table)], width=width)).iter(f"{NAMESPACE}g"):
            box, text = group.find(f"{NAMESPACE}rect"), group.find(f"{NAMESPACE}text")
            if box is None or text is None or not text.text:
                continue
            size = float(text.get("font-size", TEXT))
            text_width = label_width(text.text, text.get("font-weight") == "600") * size / TEXT
            assert text_width <= float(box.get("width", 0)) + 0.1, (width, text.text)
            is_full_size.add(size == TEXT)
    assert is_full_size == {True, False}


def test_the_bytes_are_those_of_the_golden_file(healthy: Schedule, broken_timeline: Timeline) -> None:
    assert picture(healthy, broken_timeline) == GOLDEN.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("span", "expected"), [(11.0, [0, 2, 4, 6, 8, 10]), (202.4, [0, 50, 100, 150, 200]), (0.0, [0])]
)
def test_ticks_are_round_numbers(span: float, expected: list[float]) -> None:
    assert ticks(span) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (short(0.272727), "0.273"),
        (short(999.6), "1000"),
        (short(12345.6), "12346"),
        (short(2e-7), "2e-07"),
        (percent(3 / 11), "27.3 %"),
        (signed(1.5), "+1.5"),
        (signed(0.0), "0"),
        (signed_percent(-0.0512), "-5.12 %"),
    ],
)
def test_numbers_have_three_digits_and_all_before_the_point(text: str, expected: str) -> None:
    assert text == expected
