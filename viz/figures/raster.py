"""Lanes as pixels: the first picture on a page, the only one in browsers without a canvas, and exported PNGs.

Where lanes and operations are wide enough each operation is its rectangle, as on the canvas; else every pixel column of
a band of lanes is a stack of the exact shares of time spent in each colour. In an exported file the layout of
`figures.svg` puts the words around them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from io import BytesIO
from math import ceil

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageDraw, ImageFont

from recycle.ir.columns import Floats
from viz.figures.boxes import STRIP_TOP, boxes, parts_of
from viz.figures.palette import (
    BAND,
    CHUNK_PAINTS,
    FAILURE,
    FAILURE_BAND,
    FAILURE_HATCH,
    INK,
    PAINTS,
    PAPER,
    RULE,
    shade_of,
)
from viz.figures.svg import LANE, TEXT, Anchor, Point, draw, height_of
from viz.lanes import Flag, LaneTable, Panel

LEAST_OPERATION, LEAST_LANE, LEAST_BAND = 3, 3, 12
Pixels = npt.NDArray[np.uint8]
_COLOURS = tuple(dict.fromkeys([BAND, PAPER, INK, RULE, FAILURE, FAILURE_BAND, FAILURE_HATCH])) + tuple(
    colour for paints in CHUNK_PAINTS for paint in paints for colour in (paint.fill, paint.hatch)
)
_INDEX = {colour: place for place, colour in reversed(list(enumerate(_COLOURS)))}


def png(table: LaneTable, width: int, height: int, *, clear: bool = False) -> bytes:
    """The whole timeline as PNG; `clear` makes idle time transparent, for a page that may be dark."""
    return encode_png(raster(table, width, height), clear=clear)


def raster(table: LaneTable, width: int, height: int, span: float | None = None) -> Pixels:
    """The picture as indices into the palette, [row of pixels, column].

    Args:
        span: length of the time axis, at least the table's own, which it is when left out.
    """
    span = span or table.span or 1.0
    picture = np.full((height, width), _INDEX[BAND], dtype=np.uint8)
    per_row = height / max(table.lanes, 1)
    rows = np.flatnonzero(table.end > table.start)
    drawn = max(1, table.lanes - int(table.failed.sum()))
    if per_row < LEAST_LANE or len(rows) * LEAST_OPERATION > drawn * width:
        _bands(picture, table, span, per_row)
    else:
        _rectangles(picture, table, rows, span, per_row)
    _failed(picture, table, per_row)
    return picture


_KindPart = tuple[npt.NDArray[np.int64], int, Floats, Floats, float, float, float]
"""One part of all operations of a kind: operations, paint, begin, end, top, bottom, share of the work's height."""


def _parts(table: LaneTable, rows: npt.NDArray[np.int64]) -> Iterator[_KindPart]:
    kinds, long = table.kind[rows], table.end[rows] - table.start[rows]
    for kind in np.unique(kinds).tolist():
        mine = rows[kinds == kind]
        start, seconds = table.start[mine], long[kinds == kind]
        parts = parts_of(kind, table.weight_share)
        height = max(part[4] for part in parts) - min(part[3] for part in parts)
        for paint, first, last, top, bottom in parts:
            begin, end = start + first * seconds, start + last * seconds
            yield mine, PAINTS.index(paint), begin, end, top, bottom, (bottom - top) / height


def _rectangles(picture: Pixels, table: LaneTable, rows: npt.NDArray[np.int64], span: float, per_row: float) -> None:
    lane, width = table.lane, picture.shape[1]
    for operations, paint, begin, end, top, bottom, _ in _parts(table, rows):
        # Divided first: where all times are tiny, columns per time would be infinite.
        x0, x1 = np.round(begin / span * width).astype(int), np.round(end / span * width).astype(int)
        middle = (lane[operations] + 0.5) * per_row
        y0 = np.round(middle + top * per_row).astype(int)
        y1 = np.maximum(y0 + 1, np.round(middle + bottom * per_row).astype(int))
        away = (table.flags[operations] & Flag.REROUTED) != 0
        shades = [CHUNK_PAINTS[shade_of(chunk, table.chunks)][paint] for chunk in range(table.chunks)]
        fills, hatches = [_INDEX[one.fill] for one in shades], [_INDEX[one.hatch] for one in shades]
        chunk = np.minimum(table.chunk[operations], table.chunks - 1)
        places = (x0.tolist(), x1.tolist(), y0.tolist(), y1.tolist(), away.tolist(), chunk.tolist())
        for a, b, c, d, striped, of_chunk in zip(*places, strict=True):
            box = picture[c:d, a : max(b - (b - a > 3), a + 1)]
            box[:], hatch = fills[of_chunk], hatches[of_chunk]
            if striped and top < STRIP_TOP and min(box.shape, default=0) >= 4:
                across, down = np.arange(a, a + box.shape[1]), np.arange(c, c + box.shape[0])
                box[(across[None, :] + down[:, None]) % 7 < 2.4] = hatch
                box[[0, -1], :] = box[:, [0, -1]] = _INDEX[INK]


def _bands(picture: Pixels, table: LaneTable, span: float, per_row: float) -> None:
    per_band = max(1, int(np.ceil(LEAST_BAND / per_row - 1e-9)))
    fills = np.array([*(_INDEX[PAINTS[paint].fill] for paint in BUSY), _INDEX[BAND]], dtype=np.uint8)
    for band, shares in enumerate(utilisation(table, span, picture.shape[1], per_band)):
        y0, y1 = round(band * per_band * per_row), round(min((band + 1) * per_band, table.lanes) * per_row)
        up = (y1 - np.arange(y0, y1) - 0.5) / (y1 - y0)  # how far up its band the middle of each pixel lies
        layer = (up[:, None, None] > np.cumsum(shares, axis=0).T[None, :, :]).sum(axis=2)
        picture[y0:y1] = fills[layer]


BUSY = tuple(place for place, paint in enumerate(PAINTS) if paint.key != "communication")
"""Paints of work that keeps a worker busy, in the order of the stack, from below."""


def utilisation(table: LaneTable, span: float, columns: int, per_band: int) -> Floats:
    """Share of time spent in each paint of BUSY, exact: [band of `per_band` lanes, paint, column of times 0 to `span`].

    A part from a to b (in columns) covers b - a of its column when it ends there; else floor(a) + 1 - a of the first,
    1 of those between and b - floor(b) of the last. Ends and the rest are two sums over bins, the rest as differences.
    """
    bands = -(-table.lanes // per_band)
    band = table.lane // per_band
    stride = columns + 2
    shape = (bands, len(BUSY), stride)
    ends, rest = np.zeros(np.prod(shape)), np.zeros(np.prod(shape))
    for operations, paint, begin, end, top, _, high in _parts(table, np.flatnonzero(table.end > table.start)):
        if top >= STRIP_TOP:
            continue
        a, b = np.minimum(begin / span * columns, columns), np.minimum(end / span * columns, columns)
        base = (band[operations] * len(BUSY) + BUSY.index(paint)) * stride
        ia, ib = np.floor(a).astype(np.int64), np.floor(b).astype(np.int64)
        size = len(ends)
        ends += np.bincount(base + ia, weights=(ia + 1 - a) * high, minlength=size)
        ends -= np.bincount(base + ib, weights=(ib + 1 - b) * high, minlength=size)
        rest += np.bincount(base + ia + 1, minlength=size) * high
        rest -= np.bincount(base + ib + 1, minlength=size) * high
    lanes = np.minimum(per_band, table.lanes - per_band * np.arange(bands))
    busy = ends.reshape(shape) + np.cumsum(rest.reshape(shape), axis=2)
    shares: Floats = busy[:, :, :columns] / lanes[:, None, None]
    return shares


def _failed(picture: Pixels, table: LaneTable, per_row: float) -> None:
    across = np.arange(picture.shape[1])
    for lane in np.flatnonzero(table.failed).tolist():
        y0 = round(lane * per_row)
        band = picture[y0 : max(y0 + 2, round((lane + 1) * per_row))]
        if not len(band):
            continue
        if table.offsets[lane + 1] == table.offsets[lane] or len(band) < 8:
            band[:] = _INDEX[FAILURE_BAND]
        band[(across[None, :] + np.arange(y0, y0 + len(band))[:, None]) % 9 < 3] = _INDEX[FAILURE_HATCH]
        band[[0, -1]] = _INDEX[FAILURE]


def encode_png(picture: Pixels, *, clear: bool = False) -> bytes:
    """A PNG of palette indices; `clear` makes idle time transparent."""
    image = Image.fromarray(picture)
    image.putpalette(b"".join(bytes.fromhex(colour[1:]) for colour in _COLOURS))
    content = BytesIO()
    image.save(content, "png", **({"transparency": _INDEX[BAND]} if clear else {}))
    return content.getvalue()


SHEET_WIDTH, SHEET_LANES = 1600, 1200
"""Pixels of a file's width, and of the height of its lanes from which they become thinner."""
LABELLED = 20_000
"""Operations up to which boxes carry their labels."""


def sheet(panels: Sequence[Panel]) -> bytes:
    """Timelines under each other as one PNG, any number of operations."""
    heights = [min(LANE * panel.table.lanes, max(SHEET_LANES, panel.table.lanes // 4)) for panel in panels]
    pen = _PixelPen(SHEET_WIDTH, ceil(height_of(heights)))
    draw(pen, panels, SHEET_WIDTH, heights)
    content = BytesIO()
    pen.image.save(content, "png")
    return content.getvalue()


_ANCHORS = {"start": "ls", "middle": "ms", "end": "rs"}


class _PixelPen:
    def __init__(self, width: int, height: int) -> None:
        self.image = Image.new("RGB", (width, height), PAPER)
        self.drawn = ImageDraw.Draw(self.image)

    def text(
        self,
        x: float,
        y: float,
        text: str,
        anchor: Anchor = "start",
        *,
        fill: str = "",
        size: float = TEXT,
        is_bold: bool = False,
    ) -> None:
        font = ImageFont.load_default(size + is_bold)  # which has no bold letters
        self.drawn.text((x, y), text, fill or INK, font, _ANCHORS[anchor])

    def line(self, points: Sequence[Point], stroke: str, kind: str = "") -> None:
        self.drawn.line(points, stroke)

    def box(
        self, x: float, y: float, width: float, height: float, fill: str, stroke: str = "", hatch: str = ""
    ) -> None:
        self.drawn.rectangle([(x, y), (x + width, y + height)], fill, stroke or fill)

    def lanes(self, panel: Panel, left: float, top: float, width: float, row: float) -> None:
        table, span = panel.table, panel.span or panel.table.span or 1.0
        corner, size = (round(left), round(top)), (round(width), round(row * table.lanes))
        pixels = raster(table, *size, span)
        lanes = Image.open(BytesIO(encode_png(pixels, clear=True))).convert("RGBA")
        self.image.paste(lanes, corner, lanes)
        if len(table) > LABELLED or row < TEXT:
            return
        font = ImageFont.load_default(TEXT)
        for box in boxes(table):
            x0, x1 = (left + time / span * width for time in (box.start, box.end))
            if box.label and x1 - x0 >= font.getlength(box.label) + 2:
                y = top + (box.lane + 0.5 + (box.top + box.bottom) / 2) * row
                self.drawn.text(((x0 + x1) / 2, y), box.label, box.paint.ink, font, "mm")
