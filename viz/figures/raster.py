"""PNG export: the layout of `figures.svg` drawn in pixels, for any number of operations.

Lanes without labels are drawn larger and reduced, so that a pixel is the mean of its content.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from io import BytesIO
from math import ceil

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from viz.figures.palette import FAILURE_HATCH, INK, PAPER
from viz.figures.svg import LANE, TEXT, Line, Operation, Rectangle, Text, height_of, is_labelled, layout
from viz.lanes import Panel

SHEET_WIDTH, SHEET_LANES = 1600, 1200
"""Width of a file in pixels, and height of its lanes beyond which they become thinner."""
FINEST, LEAST = 4, 6
"""Factor of the larger drawing, and pixels of a box that are enough for stripes."""
_ANCHORS = {"start": "ls", "middle": "ms", "end": "rs"}


def sheet(panels: Sequence[Panel]) -> bytes:
    """Draw timelines below each other as one PNG, with any number of operations."""
    heights = [min(LANE * panel.table.lanes, max(SHEET_LANES, panel.table.lanes // 4)) for panel in panels]
    rows = [height / max(1, panel.table.lanes) for panel, height in zip(panels, heights, strict=True)]
    times = 1 if all(map(is_labelled, panels, rows)) else FINEST
    size = SHEET_WIDTH, ceil(height_of(heights))
    image = Image.new("RGB", (times * size[0], times * size[1]), PAPER)
    canvas, font_of = ImageDraw.Draw(image), cache(ImageFont.load_default)

    @cache
    def stripes(width: int, height: int, phase: int) -> Image.Image:
        diagonals = np.add.outer(np.arange(phase, phase + height), np.arange(width))
        return Image.fromarray(diagonals % (8 * times) < 3 * times)

    def rectangle(x: float, y: float, width: float, height: float, fill: str, hatch: str, border: str) -> None:
        x0, y0, x1, y1 = map(round, (times * x, times * y, times * (x + width), times * (y + height)))
        place = x0, y0, max(x1, x0 + 1), max(y1, y0 + 1)
        canvas.rectangle((x0, y0, place[2] - 1, place[3] - 1), fill)
        if hatch and min(width, height) > LEAST:
            image.paste(hatch, place, stripes(place[2] - x0, place[3] - y0, (x0 + y0) % (8 * times)))
        if border and min(width, height) > LEAST:
            canvas.rectangle((x0, y0, place[2] - 1, place[3] - 1), outline=border, width=times)

    for shape in layout(panels, SHEET_WIDTH, heights):
        match shape:
            case Text(x, y, text, anchor, fill, letters, is_bold):
                font = font_of(times * (letters + is_bold))  # PIL's default font has no bold
                canvas.text((times * x, times * y), text, fill or INK, font, _ANCHORS[anchor])
            case Line(points, stroke):
                canvas.line([(times * x, times * y) for x, y in points], stroke, times)
            case Rectangle(x, y, width, height, fill, stroke, hatch):
                rectangle(x, y, width, height, fill, FAILURE_HATCH * (hatch == "failed"), stroke)
            case Operation(_, box, x, y, width, height):
                is_away = box.rerouted
                rectangle(x, y, width - (times == 1), height, box.paint.fill, is_away * box.paint.hatch, is_away * INK)
                if box.label and width >= font_of(TEXT).getlength(box.label) + 2:
                    canvas.text((x + width / 2, y + height / 2), box.label, box.paint.ink, font_of(TEXT), "mm")
    content = BytesIO()
    image.resize(size, Image.Resampling.BOX).save(content, "png")
    return content.getvalue()
