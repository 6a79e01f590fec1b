"""PNG export: the layout of `figures.svg` drawn in pixels, for any number of operations.

Lanes and operations thinner than a few pixels are drawn larger and reduced, so that a pixel is the mean of its content.
"""

from __future__ import annotations

from collections.abc import Sequence
from io import BytesIO
from math import ceil

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from viz.figures.boxes import boxes
from viz.figures.palette import FAILURE, FAILURE_BAND, FAILURE_HATCH, INK, PAPER
from viz.figures.svg import LANE, TEXT, Lanes, Line, Rectangle, Text, height_of, layout
from viz.lanes import LaneTable, Panel

SHEET_WIDTH, SHEET_LANES = 1600, 1200
"""Width of a file in pixels, and height of its lanes beyond which they become thinner."""
LABELLED = 20_000
"""Maximum operations for boxes with labels."""
LEAST, FINEST = 6, 4
"""Pixels of a lane and of a mean operation below which the drawing is enlarged first, and the largest factor."""
_ANCHORS = {"start": "ls", "middle": "ms", "end": "rs"}


def sheet(panels: Sequence[Panel]) -> bytes:
    """Draw timelines below each other as one PNG, with any number of operations."""
    heights = [min(LANE * panel.table.lanes, max(SHEET_LANES, panel.table.lanes // 4)) for panel in panels]
    image = Image.new("RGB", (SHEET_WIDTH, ceil(height_of(heights))), PAPER)
    canvas = ImageDraw.Draw(image)
    for shape in layout(panels, SHEET_WIDTH, heights):
        match shape:
            case Text(x, y, text, anchor, fill, size, is_bold):
                font = ImageFont.load_default(size + is_bold)  # PIL's default font has no bold
                canvas.text((x, y), text, fill or INK, font, _ANCHORS[anchor])
            case Line(points, stroke):
                canvas.line(points, stroke)
            case Rectangle(x, y, width, height, fill, stroke):
                canvas.rectangle([(x, y), (x + width, y + height)], fill, stroke or fill)
            case Lanes():
                _paste(image, shape)
    content = BytesIO()
    image.save(content, "png")
    return content.getvalue()


def _paste(image: Image.Image, shape: Lanes) -> None:
    table, row = shape.panel.table, shape.row
    corner, size = (round(shape.left), round(shape.top)), (round(shape.width), round(row * table.lanes))
    ground = image.crop((*corner, corner[0] + size[0], corner[1] + size[1]))
    wide, high = size[0] * _times(size[0] * table.lanes / max(1, len(table))), size[1] * _times(row)
    lanes = ground.resize((wide, high), Image.Resampling.NEAREST)
    is_labelled = lanes.size == size and len(table) <= LABELLED and row >= TEXT
    _draw_lanes(lanes, table, shape.panel.span or table.span or 1.0, is_labelled=is_labelled)
    image.paste(lanes.resize(size, Image.Resampling.BOX), corner)


def _times(pixels: float) -> int:
    return min(FINEST, max(1, ceil(LEAST / pixels)))


def _draw_lanes(image: Image.Image, table: LaneTable, span: float, *, is_labelled: bool) -> None:
    canvas, font, row = ImageDraw.Draw(image), ImageFont.load_default(TEXT), image.height / max(1, table.lanes)
    across, down = np.ogrid[: image.width, : image.height]
    stripes = Image.fromarray(((across + down).T % 8 < 3).astype(np.uint8) * 255)

    def hatched(place: tuple[int, int, int, int], hatch: str, border: str) -> None:
        image.paste(hatch, place, stripes.crop(place))
        canvas.rectangle((place[0], place[1], place[2] - 1, place[3] - 1), outline=border)

    for lane in np.flatnonzero(table.failed).tolist():
        place = (0, round(lane * row), image.width, max(round(lane * row) + 2, round((lane + 1) * row)))
        canvas.rectangle(place, FAILURE_BAND)
        hatched(place, FAILURE_HATCH, FAILURE)
    for box in boxes(table, is_labelled=is_labelled):
        if box.end <= box.start:
            continue
        # Divide first: pixels per time would overflow for tiny times.
        x0, x1 = (round(time / span * image.width) for time in (box.start, box.end))
        y0, y1 = (round((box.lane + 0.5 + edge) * row) for edge in (box.top, box.bottom))
        place = (x0, y0, max(x1 - is_labelled, x0 + 1), max(y1, y0 + 1))
        canvas.rectangle((x0, y0, place[2] - 1, place[3] - 1), box.paint.fill)
        if box.rerouted and min(place[2] - x0, place[3] - y0) > LEAST:
            hatched(place, box.paint.hatch, INK)
        if box.label and x1 - x0 >= font.getlength(box.label) + 2:
            canvas.text(((x0 + x1) / 2, (y0 + y1) / 2), box.label, box.paint.ink, font, "mm")
