"""Timelines under each other as one PNG that stands by itself: titles, lane names, time axes, periods and a legend.

What the lanes look like is the raster's; this puts the words around them. Where lanes are too thin for a name, every
so many have one.
"""

from __future__ import annotations

from collections.abc import Sequence
from io import BytesIO
from math import ceil

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from viz.figures.boxes import boxes, parts_of
from viz.figures.palette import FAILURE, FAILURE_BAND, INK, MUTED, PAINTS, PAPER, Paint
from viz.figures.raster import encode_png, raster
from viz.figures.time_axis import ticks, time_unit
from viz.lanes import Flag, LaneTable, Panel
from viz.numbers import short

WIDTH, LANE, MOST_HEIGHT = 1600, 24, 1200
"""Pixels of a timeline's width and of a lane, and the height from which lanes become thinner."""
TITLE, AXIS, LEGEND, MARGIN, TEXT = 34, 34, 30, 16, 12
LABELLED = 20_000
"""Operations up to which boxes carry their labels."""


def sheet(panels: Sequence[Panel]) -> bytes:
    """The picture of all panels as PNG."""
    font = ImageFont.load_default(TEXT)
    names = [label for panel in panels for label in panel.table.labels]
    gutter = MARGIN + ceil(max((font.getlength(name) for name in names), default=0)) + 8
    heights = [_height(panel.table) for panel in panels]
    total = sum(heights) + len(panels) * (TITLE + AXIS) + LEGEND + MARGIN
    image = Image.new("RGB", (gutter + WIDTH + MARGIN, total), PAPER)
    draw = ImageDraw.Draw(image)
    top = 0
    for panel, height in zip(panels, heights, strict=True):
        _panel(image, draw, font, panel, (gutter, top + TITLE), height)
        top += TITLE + height + AXIS
    _legend(draw, font, panels, gutter, top)
    content = BytesIO()
    image.save(content, "png")
    return content.getvalue()


def _height(table: LaneTable) -> int:
    return min(LANE * table.lanes, max(MOST_HEIGHT, table.lanes // 4))


def _panel(
    image: Image.Image,
    draw: ImageDraw.ImageDraw,
    font: ImageFont.FreeTypeFont | ImageFont.ImageFont,
    panel: Panel,
    corner: tuple[int, int],
    height: int,
) -> None:
    table, (left, top) = panel.table, corner
    span = panel.span or table.span or 1.0
    scale, unit = time_unit(table, span)
    lanes = Image.open(BytesIO(encode_png(raster(table, WIDTH, height, span))))
    image.paste(lanes.convert("RGB"), corner)
    draw.text((left, top - TITLE + 6), panel.title, INK, ImageFont.load_default(TEXT + 2))
    bottom = top + height
    for tick in ticks(span * scale):
        x = left + tick / scale / span * WIDTH
        draw.line([(x, bottom), (x, bottom + 4)], MUTED)
        draw.text((x, bottom + 6), f"{tick:g}" + (f" {unit}" if unit and tick else ""), MUTED, font, "ma")
    per_row = height / max(table.lanes, 1)
    every = max(1, ceil((TEXT + 2) / per_row))
    for lane in range(0, table.lanes, every):
        draw.text((left - 8, top + (lane + 0.5) * per_row), table.labels[lane], INK, font, "rm")
    if panel.period:
        right = left + panel.period / span * WIDTH
        draw.line([(left, top - 2), (left, top - 8), (right, top - 8), (right, top - 2)], INK)
        text = f"period {short(panel.period * scale)}" + (f" {unit}" if unit else "")
        middle, wide = left + 0.75 * (right - left), font.getlength(text) / 2 + 4
        draw.rectangle([(middle - wide, top - 15), (middle + wide, top - 2)], PAPER)
        draw.text((middle, top - 8), text, INK, font, "mm")
    if len(table) <= LABELLED and every == 1:
        for box in boxes(table):
            x0, x1 = (left + time / span * WIDTH for time in (box.start, box.end))
            if box.label and x1 - x0 >= font.getlength(box.label) + 2:
                y = top + (box.lane + 0.5 + (box.top + box.bottom) / 2) * per_row
                draw.text(((x0 + x1) / 2, y), box.label, box.paint.ink, font, "mm")


def _legend(
    draw: ImageDraw.ImageDraw,
    font: ImageFont.FreeTypeFont | ImageFont.ImageFont,
    panels: Sequence[Panel],
    left: int,
    top: int,
) -> None:
    entries: list[tuple[str, str, str]] = [(paint.name, paint.fill, paint.fill) for paint in _used(panels)]
    if any(panel.table.has(Flag.REROUTED).any() for panel in panels):
        entries.append(("Re-routed (striped)", PAINTS[0].hatch, INK))
    if any(panel.table.failed.any() for panel in panels):
        entries.append(("Failed worker", FAILURE_BAND, FAILURE))
    x = float(left)
    for name, fill, outline in entries:
        draw.rectangle([(x, top + 4), (x + 16, top + 16)], fill, outline)
        draw.text((x + 22, top + 10), name, INK, font, "lm")
        x += 22 + font.getlength(name) + 18


def _used(panels: Sequence[Panel]) -> list[Paint]:
    found = set()
    for table in (panel.table for panel in panels):
        for kind in np.unique(table.kind[table.end > table.start]).tolist():
            found |= {part[0] for part in parts_of(kind, table.weight_share)}
    return [paint for paint in PAINTS if paint in found]
