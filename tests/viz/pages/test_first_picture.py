"""The server's picture: what is on the page before the browser has operations or axes."""

from __future__ import annotations

from io import BytesIO

import numpy as np
import pytest
from PIL import Image

from recycle import Shape, Timeline, simulate
from recycle.ir.families import one_f_one_b
from tests.viz.components import of_type, plain
from viz.figures import palette
from viz.figures.raster import png
from viz.lane_cache import WHOLE, LaneCache
from viz.lanes import LaneTable
from viz.numbers import OVERHANG, ticks
from viz.pages.lanes_view import first_picture, lanes_view, picture_address


@pytest.mark.parametrize(
    ("length", "expected"),
    [
        (27.0, [0, 5, 10, 15, 20, 25]),
        (1.0, [0, 0.2, 0.4, 0.6, 0.8, 1.0]),
        (0.03, [0, 0.005, 0.01, 0.015, 0.02, 0.025, 0.03]),
        (1023.0, [0, 200, 400, 600, 800, 1000]),
    ],
)
def test_ticks_are_round_and_within_the_axis(length: float, expected: list[float]) -> None:
    assert ticks(length, OVERHANG) == pytest.approx(expected)


@pytest.mark.parametrize("lanes", [1, 24, 25, 1536])
def test_names_are_few_and_at_the_middle_of_their_lanes(lanes: int) -> None:
    table = LaneTable.from_timeline(simulate(one_f_one_b(Shape(lanes, 1, 1))))
    shown = of_type(plain(first_picture(table, "x.png", table.span, (50, 8, 14, 40))), "Span")
    names = {part["children"]: part["style"]["top"] for part in shown if part["className"] == "name"}
    assert 1 <= len(names) <= 24
    assert names["0.0"] == f"{50 / lanes:.4f}%"
    for label, top in names.items():
        assert float(top[:-1]) == pytest.approx(100 * (table.labels.index(label) + 0.5) / lanes, abs=1e-4)


def test_the_picture_covers_its_part_of_a_longer_axis(broken_timeline: Timeline) -> None:
    table = LaneTable.from_timeline(broken_timeline)
    (image,) = of_type(plain(first_picture(table, "x.png", 2 * table.span, (50, 8, 14, 40))), "Img")
    assert image["style"] == {"left": f"{0.4 / 1.008:.4f}%", "width": f"{50 / 1.008:.4f}%"}
    assert image["src"] == "x.png"


def test_a_timeline_begins_with_its_picture_unless_it_is_made_of_several(broken_timeline: Timeline) -> None:
    table, cache = LaneTable.from_timeline(broken_timeline), LaneCache()
    (image,) = of_type(plain(lanes_view("", table, "one", cache)), "Img")
    assert image["src"] == picture_address(f"lanes/{cache.put(table)}.bin")
    derived = lanes_view("", table, "two", cache, more={"data-with": "[]"})
    assert of_type(plain(derived), "Img") == []


def test_idle_time_is_transparent_on_a_page_and_opaque_in_a_file(broken_timeline: Timeline) -> None:
    table = LaneTable.from_timeline(broken_timeline)
    opaque, clear = (Image.open(BytesIO(png(table, 60, 40, clear=clear))) for clear in (False, True))
    assert "transparency" not in opaque.info
    alpha = np.array(clear.convert("RGBA"))[:, :, 3]
    assert set(alpha.ravel()) == {0, 255}
    idle = np.array(opaque.convert("RGB")) == [int(palette.BAND[i : i + 2], 16) for i in (1, 3, 5)]
    assert np.array_equal(alpha == 0, idle.all(axis=2))
    assert clear.convert("RGB").tobytes() == opaque.convert("RGB").tobytes()


def test_the_cache_makes_the_picture_of_all_lanes_once(broken_timeline: Timeline) -> None:
    table, cache = LaneTable.from_timeline(broken_timeline), LaneCache()
    shown = cache.get(cache.put(table))
    assert shown is not None
    assert shown.picture == png(table, *WHOLE, clear=True)
    assert shown.picture is shown.picture
