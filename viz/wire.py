"""`lanes.bin`: a LaneTable as the browser gets it, once per content.

Little endian: magic `RLN2`, u32 lanes, u32 operations, u32 bytes of the description, f64 origin; u32 offsets
(lanes + 1); the columns that the description lists, each in the narrowest type that holds it and beginning at a
multiple of 4 bytes; then the description, JSON in UTF-8. That holds also the table of instruction kinds with how each
is drawn (`figures.boxes`), the colours (`figures.palette`) and all texts (`labels`): the canvas has none of its own.

Times are float32 from the origin: with seconds since the run's start, a day would leave steps of 8 ms. An instruction's
own id stays here: the browser names an operation by its place.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from viz.figures.boxes import parts_of
from viz.figures.palette import (
    CHUNK_PAINTS,
    COMMUNICATION,
    FAILURE,
    FAILURE_BAND,
    FAILURE_HATCH,
    INK,
    PAINTS,
    Paint,
    shade_of,
)
from viz.kinds import LABEL, LABEL_AWAY, LINES, MARKS, kinds
from viz.lanes import Flag, LaneTable
from viz.numbers import time_unit

MAGIC = b"RLN2"
COLUMNS = ("start", "end", "micro_batch", "stage", "pipeline", "kind", "flags")
PAIRED = ("pipeline2", "micro_batch2")
"""Of the backwards of overlapped pairs, in tables that have any."""
_HEADER = struct.Struct("<4sIIId")
_UNSIGNED = ("u1", "<u2", "<u4")


def encode(table: LaneTable) -> bytes:
    """The table as `lanes.bin`."""
    columns = {name: _narrow(getattr(table, name)) for name in COLUMNS}
    if table.paired is not None:
        home, index = table.paired
        columns |= {PAIRED[0]: _narrow(home), PAIRED[1]: _narrow(index)}
    types = {name: column.dtype.kind + str(column.itemsize) for name, column in columns.items()}
    described = json.dumps({"columns": types, **describe_table(table)}, separators=(",", ":")).encode()
    parts = [_HEADER.pack(MAGIC, table.lanes, len(table), len(described), table.origin)]
    parts.append(table.offsets.astype("<u4").tobytes())
    for column in columns.values():
        parts += [column.tobytes(), bytes(_padding(column.nbytes))]
    return b"".join([*parts, described])


def _narrow(column: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Times as float32; whole numbers unsigned, as narrow as they fit, "none" (all ones) staying all ones."""
    if column.dtype.kind == "f":
        return column.astype("<f4")
    none = np.iinfo(column.dtype).max
    known = column[column != none]
    most = int(known.max(initial=0))
    narrow = next(kind for kind in _UNSIGNED if most < np.iinfo(kind).max)
    return np.where(column == none, np.iinfo(narrow).max, column).astype(narrow)


def _padding(size: int) -> int:
    return -size % 4


def describe_table(table: LaneTable) -> dict[str, Any]:
    """What the canvas needs beside the columns: names of lanes, and how each kind and mark is drawn."""
    places = {paint.key: place for place, paint in enumerate(PAINTS)}
    return {
        "labels": table.labels,
        "pipelines": [worker.pipeline for worker in table.workers],
        "ranks": [worker.rank for worker in table.workers],
        "failed": np.flatnonzero(table.failed).tolist(),
        "span": table.span,
        "unit": time_unit(table),
        "by_rank": "stage" if table.shape.chunks == 1 else "rank",
        "bits": {flag.name: int(flag) for flag in Flag},
        "kinds": [
            {**kind, "parts": [[places[part[0].key], *part[1:]] for part in parts_of(number, table.weight_share)]}
            for number, kind in enumerate(kinds())
        ],
        "texts": {"label": LABEL, "label_away": LABEL_AWAY, "lines": LINES},
        "marks": {flag.name: text for flag, text in MARKS.items()},
        "paints": _paints(PAINTS),
        "chunk_paints": [_paints(CHUNK_PAINTS[shade_of(chunk, table.chunks)]) for chunk in range(table.chunks)],
        "stages_per_chunk": table.shape.ranks,
        "busy": [places[paint.key] for paint in PAINTS if paint is not COMMUNICATION],
        "failure": {"fill": FAILURE_BAND, "hatch": FAILURE_HATCH, "line": FAILURE, "ink": INK},
    }


def _paints(paints: Sequence[Paint]) -> list[dict[str, str]]:
    return [{name: getattr(paint, name) for name in paint.__slots__} for paint in paints]
