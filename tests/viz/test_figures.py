"""Pictures hold the figures of the timeline, avoid the traps of plotly, and can be read; the SVG is the same bytes."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

from recycle import Profile, Schedule, Shape, Timeline, simulate
from recycle.ir.families import FAMILIES, one_f_one_b, zb_h1
from recycle.ir.instruction import OverlappedPair, ReduceBucket, WeightPart
from tests.viz.components import decode
from viz.figures import palette
from viz.figures.boxes import STRIP_BOTTOM, STRIP_TOP, WORK_BOTTOM, WORK_TOP, boxes
from viz.figures.charts import curves_figure, event_text
from viz.figures.svg import TEXT, animation, label_width, svg
from viz.lane_cache import PAIRED, encode
from viz.lanes import LaneTable, Panel, on_one_axis
from viz.numbers import percent, short, signed, signed_percent, ticks


def test_curves_mark_failures_and_returns_at_their_step() -> None:
    metrics = [{"step": step, "loss": 5.0 - step, "live_workers": 5 if step == 1 else 6} for step in range(3)]
    events = [
        {"kind": "fault", "worker": "1.1", "step": 1, "time": 1.0},
        {"kind": "checkpoint", "step": 1},
        {"kind": "rejoined", "worker": "1.1", "step": 2},
        {"kind": "fault", "worker": "0.1"},
    ]
    figure = curves_figure(metrics, events, 6)
    assert list(figure.data[0].y) == [5.0, 4.0, 3.0]
    assert list(figure.data[1].y) == [6, 5, 6]
    assert [(note.text, note.x) for note in figure.layout.annotations] == [("1.1 failed", 1), ("1.1 back", 2)]
    assert [shape.x0 for shape in figure.layout.shapes] == [1, 2]
    assert [note.yshift for note in figure.layout.annotations] == [0, 16]  # texts of near steps stand above each other


def luminance(colour: str) -> float:
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    dark, light = sorted((luminance(one), luminance(other)))
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("paint", sum(palette.CHUNK_PAINTS, palette.SHADES), ids=lambda paint: paint.key)
def test_labels_can_be_read_on_their_colour_and_on_its_stripes(paint: palette.Paint) -> None:
    assert contrast(paint.ink, paint.fill) >= 4.5
    assert contrast(paint.ink, paint.hatch) >= contrast(paint.ink, paint.fill)


DEUTERANOPIA = np.array([[0.367, 0.861, -0.228], [0.280, 0.673, 0.047], [-0.012, 0.043, 0.969]])


PROTANOPIA = np.array([[0.152, 1.053, -0.205], [0.115, 0.786, 0.099], [-0.004, -0.048, 1.052]])
"""How these eyes see linear RGB (Machado, Oliveira and Fernandes, 2009, severity 1)."""


@pytest.mark.parametrize("seen", [np.eye(3), DEUTERANOPIA, PROTANOPIA], ids=["usual", "deuteranopia", "protanopia"])
def test_colours_of_a_comparison_are_none_of_kinds_and_apart_for_every_eye(seen: Any) -> None:
    def as_seen(colour: str) -> Any:
        linear = np.array([(int(colour[i : i + 2], 16) / 255) ** 2.2 for i in (1, 3, 5)])
        return 255 * np.clip(seen @ linear, 0, 1) ** (1 / 2.2)

    kinds, shades = ([paint.fill for paint in paints] for paints in (palette.PAINTS, palette.SHADES))
    assert set(kinds).isdisjoint(shades)
    for one, other in itertools.combinations(shades, 2):
        assert np.linalg.norm(as_seen(one) - as_seen(other)) > 30, (one, other)
    for shade in shades:
        assert min(np.linalg.norm(as_seen(shade) - as_seen(kind)) for kind in kinds) > 20, shade


def test_chunks_of_an_interleaved_schedule_are_drawn_in_two_shades() -> None:
    table = LaneTable.from_timeline(simulate(FAMILIES["zb-v"](Shape(1, 2, 2, chunks=2))))
    fills = {(int(table.chunk[box.operation]), box.paint.key): box.paint.fill for box in boxes(table)}
    assert fills[0, "forward"] == palette.FORWARD.fill
    assert fills[1, "forward-3"] == palette.CHUNK_PAINTS[3][0].fill
    assert {chunk for chunk, _ in fills} == {0, 1}
    drawn = svg([Panel("zb-v", table)])
    assert palette.CHUNK_PAINTS[3][0].fill in drawn
    assert "Lighter: later chunks" in drawn
    assert "Lighter: later chunks" not in svg(
        [Panel("1f1b", LaneTable.from_timeline(simulate(one_f_one_b(Shape(1, 2, 2)))))]
    )


def test_both_halves_of_an_overlapped_pair_are_labelled() -> None:
    table = LaneTable.from_timeline(simulate(FAMILIES["dualpipe-v"](Shape(1, 2, 6, chunks=2))))
    (pair, *_) = (i for i in range(len(table)) if isinstance(table.instruction(i), OverlappedPair))
    drawn = [box for box in boxes(table) if box.operation == pair]
    assert [box.label for box in drawn] == ["F3", "B1", ""]
    assert str(table.instruction(pair)).count("0.3") == str(table.instruction(pair)).count("0.1") == 1
    assert drawn[0].bottom == drawn[1].top
    columns = decode(encode(table))["description"]["columns"]
    assert set(PAIRED) <= set(columns)
    assert LaneTable.from_timeline(simulate(one_f_one_b(Shape(1, 2, 2)))).paired is None


@pytest.mark.parametrize(
    ("event", "text"),
    [
        ({"kind": "fault", "worker": "1.1", "fault": "hang:1.1@5"}, "1.1 failed"),
        ({"kind": "fault", "worker": "1.1", "fault": "slow=3:1.1@4-8"}, "1.1 slow"),
        ({"kind": "fault", "worker": "1.1", "fault": "nan:1.1@4"}, "1.1 nan"),
        ({"kind": "fault", "worker": "1.1", "fault": "drain:1.1@4"}, "1.1 told to leave"),
        ({"kind": "rejoined", "worker": "1.1"}, "1.1 back"),
    ],
)
def test_a_worker_that_lives_through_a_fault_is_not_said_to_have_failed(event: dict[str, str], text: str) -> None:
    assert event_text(event) == text


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


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.272727, "0.273"),
        (33.25, "33.2"),
        (33.0, "33"),
        (999.6, "1000"),
        (12345.6, "12346"),
        (0.0, "0"),
        (2e-7, "2e-07"),
    ],
)
def test_an_amount_has_three_significant_digits_and_all_before_the_point(value: float, text: str) -> None:
    assert short(value) == text


@pytest.mark.parametrize(("share", "text"), [(3 / 11, "27.3 %"), (1.0, "100 %"), (0.0, "0 %"), (0.00123, "0.123 %")])
def test_a_share_is_written_one_way(share: float, text: str) -> None:
    assert percent(share) == text


def test_a_difference_has_its_sign() -> None:
    assert [signed(value) for value in (1.5, -0.25, 0.0, 1234.5)] == ["+1.5", "-0.25", "0", "+1234"]
    assert signed_percent(-0.0512) == "-5.12 %"


SCHEDULE = replace(zb_h1(Shape(2, 3, 4)), buckets=3)


TIMELINE = simulate(SCHEDULE, Profile(reduce=2.0, step=0.5))


def test_sums_of_buckets_are_strips_below_the_parts_that_hide_them() -> None:
    table = LaneTable.from_timeline(TIMELINE)
    drawn = {table.instruction(box.operation): box for box in boxes(table) if box.lane == 0}
    sums = [box for instruction, box in drawn.items() if isinstance(instruction, ReduceBucket)]
    parts = [box for instruction, box in drawn.items() if isinstance(instruction, WeightPart)]
    assert len(sums) == 2
    assert len(parts) == 3
    assert {(box.top, box.bottom) for box in sums} == {(STRIP_TOP, STRIP_BOTTOM)}
    assert {(box.top, box.bottom) for box in parts} == {(WORK_TOP, WORK_BOTTOM)}
    assert any(one.start < part.end and part.start < one.end for one in sums for part in parts)
