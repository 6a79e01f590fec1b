"""The PNG is drawn from the same table: rectangles where there is room, exact shares of time where there is none."""

from __future__ import annotations

from io import BytesIO

import numpy as np
import pytest
from PIL import Image

from recycle import Profile, Schedule, Shape, Timeline, simulate
from recycle.ir.families import one_f_one_b
from viz.figures import palette
from viz.figures.boxes import boxes
from viz.figures.raster import BUSY, encode_png, png, raster, utilisation
from viz.lanes import LaneTable


def colours(content: bytes) -> np.ndarray:
    """The colours of a PNG, hexadecimal."""
    pixels = np.array(Image.open(BytesIO(content)).convert("RGB")).astype(np.int64)
    return np.char.mod("#%06X", pixels @ [1 << 16, 1 << 8, 1])


def test_every_box_has_its_colour(broken_timeline: Timeline) -> None:
    table = LaneTable.from_timeline(broken_timeline)
    seen = colours(png(table, 1100, 240))
    for box in (box for box in boxes(table) if box.end > box.start):
        x, y = int((box.start + box.end) / 2 * 100), int((box.lane + 0.5 + (box.top + box.bottom) / 2) * 40)
        assert seen[y, x] in ((box.paint.fill, box.paint.hatch) if box.rerouted else (box.paint.fill,))
    assert seen[20, 450] == palette.BAND
    assert set(seen[141:159].ravel()) == {palette.FAILURE_BAND, palette.FAILURE_HATCH}
    assert set(seen[120]) == {palette.FAILURE}
    assert seen[44, 250] == palette.INK  # the border of re-routed 1F1.0


def test_a_longer_time_axis_leaves_room_behind_the_last_end(broken_timeline: Timeline) -> None:
    table = LaneTable.from_timeline(broken_timeline)
    whole, shorter = colours(png(table, 1100, 240)), colours(encode_png(raster(table, 2200, 240, 2 * table.span)))
    assert (shorter[:120, :1100] == whole[:120]).all()
    assert set(shorter[:120, 1100:].ravel()) == {palette.BAND}


def test_busy_time_is_conserved_exactly() -> None:
    table = LaneTable.from_timeline(simulate(one_f_one_b(Shape(pipelines=6, ranks=8, micro_batches=13))))
    for columns, per_band in ((7, 5), (100, 8), (1000, 48)):
        shares = utilisation(table, table.span, columns, per_band)
        lanes = np.minimum(per_band, table.lanes - per_band * np.arange(len(shares)))
        seconds = (shares.sum(axis=2) * lanes[:, None]).sum(axis=0) * table.span / columns
        assert seconds == pytest.approx([6 * 8 * 13.0, 6 * 8 * 13.0, 6 * 8 * 13.0, 0.0, 0.0])
        assert shares.min() >= -1e-12
        assert shares.sum(axis=1).max() <= 1 + 1e-12


def test_shares_are_those_of_the_single_operations(broken_timeline: Timeline) -> None:
    table = LaneTable.from_timeline(broken_timeline)
    shares = utilisation(table, 12.0, 8, 2)
    expected = np.zeros_like(shares)
    for box in boxes(table):
        paint = BUSY.index(palette.PAINTS.index(box.paint))
        for column in range(8):
            low, high = 1.5 * column, 1.5 * column + 1.5
            expected[box.lane // 2, paint, column] += max(0.0, min(box.end, high) - max(box.start, low)) / 1.5 / 2
    assert shares == pytest.approx(expected)


def test_many_lanes_are_bands_of_utilisation() -> None:
    table = LaneTable.from_timeline(simulate(one_f_one_b(Shape(pipelines=64, ranks=8, micro_batches=32))))
    seen = colours(png(table, 300, 240))
    shares = utilisation(table, table.span, 300, table.lanes)[0]
    for paint, share in zip(BUSY, shares, strict=True):
        fraction = (seen == palette.PAINTS[paint].fill).mean(axis=0)
        assert fraction == pytest.approx(share, abs=0.06)


def test_a_folded_or_empty_table_is_drawn(healthy: Schedule) -> None:
    empty = LaneTable.from_timeline(simulate(Schedule.build(healthy.shape, {})))
    assert set(colours(png(empty, 50, 30)).ravel()) == {palette.BAND}


def test_the_same_picture_is_the_same_bytes(broken_timeline: Timeline) -> None:
    table = LaneTable.from_timeline(broken_timeline)
    assert png(table, 300, 100) == png(table, 300, 100)
    assert colours(encode_png(np.zeros((2, 3), dtype=np.uint8))).tolist() == [[palette.BAND] * 3] * 2


@pytest.mark.parametrize("height", [100, 4])
def test_the_tiniest_times_are_drawn_as_any_others(height: int) -> None:
    schedule = one_f_one_b(Shape(2, 2, 4))
    whole, tiny = (
        raster(LaneTable.from_timeline(simulate(schedule, Profile.uniform(unit, unit, unit))), 300, height)
        for unit in (1.0, 2.0**-1060)
    )
    assert np.array_equal(whole, tiny)
