"""Lanes as a PNG: the first picture on a page, browsers without a canvas, and `--export FILE.png`.

Where lanes and operations are wide enough each operation is its rectangle, as on the canvas; else every pixel column of
a band of lanes is a stack of the exact shares of time spent in each colour. No text: what a picture cannot say in
pixels stands beside it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from io import BytesIO
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from PIL import Image

from viz.figures.boxes import STRIP_TOP, parts_of
from viz.figures.palette import BAND, FAILURE, FAILURE_BAND, FAILURE_HATCH, INK, PAINTS, PAPER, RULE
from viz.lanes import Flag, LaneTable

LEAST_OPERATION, LEAST_LANE, LEAST_BAND = 3, 3, 12
MOST_PIXELS = 16_000_000
Pixels = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float64]
_COLOURS = tuple(dict.fromkeys([BAND, PAPER, INK, RULE, FAILURE, FAILURE_BAND, FAILURE_HATCH])) + tuple(
    colour for paint in PAINTS for colour in (paint.fill, paint.hatch)
)
_INDEX = {colour: place for place, colour in reversed(list(enumerate(_COLOURS)))}


@dataclass(frozen=True)
class Viewport:
    """What is drawn: times `t0` to `t1` of the rows `y0` to `y1`, row i being lane i, from y = i to i + 1."""

    t0: float
    t1: float
    y0: float
    y1: float

    @classmethod
    def whole(cls, table: LaneTable) -> Viewport:
        return cls(0.0, table.span or 1.0, 0.0, max(table.lanes, 1))


def png(table: LaneTable, width: int, height: int, window: Viewport | None = None, *, clear: bool = False) -> bytes:
    """The picture as PNG.

    Args:
        clear: what is idle is transparent, for a page that may be dark.

    Raises:
        ValueError: the size is not 1 to MOST_PIXELS pixels, or the window is empty or not finite.
    """
    return encode_png(raster(table, width, height, window or Viewport.whole(table)), clear=clear)


def raster(table: LaneTable, width: int, height: int, window: Viewport) -> Pixels:
    """The picture as indices into the palette, [row of pixels, column]. Raises ValueError as `png` does."""
    if width < 1 or height < 1 or width * height > MOST_PIXELS:
        raise ValueError(f"a picture has 1 to {MOST_PIXELS} pixels, not {width} x {height}")
    if not (np.isfinite([window.t0, window.t1, window.y0, window.y1]).all() and window.t0 < window.t1):
        raise ValueError("t0 must be less than t1, and both numbers")
    if window.y0 >= window.y1:
        raise ValueError("y0 must be less than y1")
    picture = np.full((height, width), _INDEX[BAND], dtype=np.uint8)
    per_row = height / (window.y1 - window.y0)
    first, last = max(0, int(np.floor(window.y0))), min(table.lanes, int(np.ceil(window.y1)))
    rows = _visible(table, window, first, last)
    drawn = max(1, last - first - int(table.failed[first:last].sum()))
    if per_row < LEAST_LANE or len(rows) * LEAST_OPERATION > drawn * width:
        _bands(picture, table, window, rows, per_row)
    else:
        _rectangles(picture, table, window, rows, per_row)
    _failed(picture, table, window, per_row)
    return picture


def _visible(table: LaneTable, window: Viewport, first: int, last: int) -> npt.NDArray[np.int64]:
    rows = np.arange(table.offsets[first], table.offsets[last]) if last > first else np.zeros(0, dtype=np.int64)
    start, end = table.start[rows], table.end[rows]
    return rows[(end > window.t0) & (start < window.t1) & (end > start)]


class _KindPart(NamedTuple):
    """One part of all operations of a kind: where it lies in their lanes; `high` is its share of the work's height."""

    operations: npt.NDArray[np.int64]
    paint: int
    begin: Floats
    end: Floats
    top: float
    bottom: float
    high: float


def _parts(table: LaneTable, rows: npt.NDArray[np.int64]) -> Iterator[_KindPart]:
    kinds, long = table.kind[rows], table.end[rows] - table.start[rows]
    for kind in np.unique(kinds).tolist():
        mine = rows[kinds == kind]
        start, seconds = table.start[mine], long[kinds == kind]
        parts = parts_of(kind, table.weight_share)
        height = max(part[4] for part in parts) - min(part[3] for part in parts)
        for paint, first, last, top, bottom in parts:
            begin, end = start + first * seconds, start + last * seconds
            yield _KindPart(mine, PAINTS.index(paint), begin, end, top, bottom, (bottom - top) / height)


def _rectangles(
    picture: Pixels, table: LaneTable, window: Viewport, rows: npt.NDArray[np.int64], per_row: float
) -> None:
    width = picture.shape[1]
    per_time = width / (window.t1 - window.t0)
    lane = np.searchsorted(table.offsets, rows, side="right") - 1
    lane_of = dict(zip(rows.tolist(), lane.tolist(), strict=True))
    for operations, paint, begin, end, top, bottom, _ in _parts(table, rows):
        x0 = np.clip(np.round((begin - window.t0) * per_time), 0, width).astype(int)
        x1 = np.clip(np.round((end - window.t0) * per_time), 0, width).astype(int)
        middle = (np.array([lane_of[i] for i in operations.tolist()]) + 0.5 - window.y0) * per_row
        y0 = np.round(middle + top * per_row).astype(int)
        y1 = np.maximum(y0 + 1, np.round(middle + bottom * per_row).astype(int))
        away = (table.flags[operations] & Flag.REROUTED) != 0
        fill, hatch = _INDEX[PAINTS[paint].fill], _INDEX[PAINTS[paint].hatch]
        for a, b, c, d, striped in zip(x0.tolist(), x1.tolist(), y0.tolist(), y1.tolist(), away.tolist(), strict=True):
            box = picture[max(0, c) : max(0, d), a : max(b - (b - a > 3), a + 1)]
            box[:] = fill
            if striped and top < STRIP_TOP and min(box.shape, default=0) >= 4:
                across, down = np.arange(a, a + box.shape[1]), np.arange(max(0, c), max(0, c) + box.shape[0])
                box[(across[None, :] + down[:, None]) % 7 < 2.4] = hatch
                box[[0, -1], :] = box[:, [0, -1]] = _INDEX[INK]


def _bands(picture: Pixels, table: LaneTable, window: Viewport, rows: npt.NDArray[np.int64], per_row: float) -> None:
    height, width = picture.shape
    per_band = max(1, int(np.ceil(LEAST_BAND / per_row - 1e-9)))
    shares = utilisation(table, window, width, per_band, rows)
    for band in range(shares.shape[0]):
        y0 = round((band * per_band - window.y0) * per_row)
        y1 = round((min((band + 1) * per_band, table.lanes) - window.y0) * per_row)
        top, bottom = max(0, y0), min(height, y1)
        if bottom <= top:
            continue
        up = (y1 - np.arange(top, bottom) - 0.5) / (y1 - y0)  # how far up its band the middle of each pixel lies
        edges = np.cumsum(shares[band], axis=0)
        layer = (up[:, None, None] > edges.T[None, :, :]).sum(axis=2)
        fills = np.array([*(_INDEX[PAINTS[paint].fill] for paint in BUSY), _INDEX[BAND]], dtype=np.uint8)
        picture[top:bottom] = fills[layer]


BUSY = tuple(place for place, paint in enumerate(PAINTS) if paint.key != "communication")
"""Paints of work that keeps a worker busy, in the order of the stack, from below."""


def utilisation(
    table: LaneTable, window: Viewport, columns: int, per_band: int, rows: npt.NDArray[np.int64] | None = None
) -> Floats:
    """Share of time spent in each paint of BUSY, exact: [band of `per_band` lanes, paint, column of the window].

    A part from a to b (in columns) covers b - a of its column when it ends there; else floor(a) + 1 - a of the first,
    1 of those between and b - floor(b) of the last. Ends and the rest are two sums over bins, the rest as differences.
    """
    rows = _visible(table, window, 0, table.lanes) if rows is None else rows
    bands = -(-table.lanes // per_band)
    band = (np.searchsorted(table.offsets, np.arange(len(table)), side="right") - 1) // per_band
    stride = columns + 2
    shape = (bands, len(BUSY), stride)
    ends, rest = np.zeros(np.prod(shape)), np.zeros(np.prod(shape))
    per_time = columns / (window.t1 - window.t0)
    for operations, paint, begin, end, top, _, high in _parts(table, rows):
        if top >= STRIP_TOP:
            continue
        a = np.clip((begin - window.t0) * per_time, 0, columns)
        b = np.clip((end - window.t0) * per_time, 0, columns)
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


def _failed(picture: Pixels, table: LaneTable, window: Viewport, per_row: float) -> None:
    height, width = picture.shape
    for lane in np.flatnonzero(table.failed).tolist():
        y0 = round((lane - window.y0) * per_row)
        y1 = max(y0 + 2, round((lane + 1 - window.y0) * per_row))
        band = picture[max(0, y0) : max(0, min(height, y1))]
        if not len(band):
            continue
        if table.offsets[lane + 1] == table.offsets[lane] or len(band) < 8:
            band[:] = _INDEX[FAILURE_BAND]
        down = np.arange(max(0, y0), max(0, y0) + len(band))
        band[(np.arange(width)[None, :] + down[:, None]) % 9 < 3] = _INDEX[FAILURE_HATCH]
        band[[0, -1]] = _INDEX[FAILURE]


def stacked(pictures: Sequence[Pixels], gap: int = 16) -> Pixels:
    """Pictures of one width under each other on paper, `gap` pixels around each."""
    width = max(picture.shape[1] for picture in pictures) + 2 * gap
    height = sum(picture.shape[0] + gap for picture in pictures) + gap
    whole = np.full((height, width), _INDEX[PAPER], dtype=np.uint8)
    top = gap
    for picture in pictures:
        whole[top : top + picture.shape[0], gap : gap + picture.shape[1]] = picture
        top += picture.shape[0] + gap
    return whole


def encode_png(picture: Pixels, *, clear: bool = False) -> bytes:
    """A PNG of palette indices; `clear` makes idle time transparent."""
    image = Image.fromarray(picture)
    image.putpalette(b"".join(bytes.fromhex(colour[1:]) for colour in _COLOURS))
    content = BytesIO()
    image.save(content, "png", **({"transparency": _INDEX[BAND]} if clear else {}))
    return content.getvalue()
