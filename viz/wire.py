"""`lanes.bin`: a LaneTable as the browser gets it, once per content.

Little endian: magic `RLN2`, u32 lanes, u32 operations, u32 bytes of the description, f64 origin; u32 offsets (lanes + 1);
the columns of `_COLUMNS` whole, in that order, widest first so that each is aligned; then the description, JSON in
UTF-8. The description says how every kind is drawn (from `figures.boxes` and `figures.palette`), so that the canvas has
no table of kinds or colours of its own.

Times are float32 from the origin: with seconds since the run's start, a day would leave steps of 8 ms.
"""

from __future__ import annotations

import json
import struct
from typing import Any

import numpy as np

from recycle.ir.instruction import KIND_CLASSES, Kind
from viz.figures.boxes import LETTERS, NAMES, PARTS
from viz.figures.palette import FAILURE, FAILURE_BAND, FAILURE_HATCH, INK, PAINTS
from viz.lanes import NO_MICRO_BATCH, Flag, LaneTable

MAGIC = b"RLN2"
_HEADER = struct.Struct("<4sIIId")
_COLUMNS = {
    "start": "<f4",
    "end": "<f4",
    "micro_batch": "<u4",
    "instruction_id": "<u4",
    "stage": "<u2",
    "pipeline": "<u2",
    "kind": "u1",
    "flags": "u1",
}


def encode(table: LaneTable) -> bytes:
    """The table as `lanes.bin`."""
    description = json.dumps(describe_table(table), separators=(",", ":")).encode()
    parts = [_HEADER.pack(MAGIC, table.lanes, len(table), len(description), table.origin)]
    parts.append(table.offsets.astype("<u4").tobytes())
    parts += [getattr(table, name).astype(dtype).tobytes() for name, dtype in _COLUMNS.items()]
    return b"".join([*parts, description])


def decode(content: bytes) -> dict[str, Any]:
    """What `encode` wrote: `origin`, `offsets`, each column and the `description`.

    Raises:
        ValueError: the content is cut short or foreign.
    """
    if len(content) < _HEADER.size or content[:4] != MAGIC:
        raise ValueError(f"not a lanes.bin: it does not begin with {MAGIC.decode()}")
    _, lanes, operations, described, origin = _HEADER.unpack_from(content)
    wire = {"offsets": "<u4", **_COLUMNS}
    lengths = {name: lanes + 1 if name == "offsets" else operations for name in wire}
    size = _HEADER.size + described + sum(np.dtype(dtype).itemsize * lengths[name] for name, dtype in wire.items())
    if len(content) != size:
        raise ValueError(f"lanes.bin holds {len(content)} bytes, its header says {size}")
    read: dict[str, Any] = {"origin": origin}
    place = _HEADER.size
    for name, dtype in wire.items():
        read[name] = np.frombuffer(content, dtype, lengths[name], place)
        place += read[name].nbytes
    read["description"] = json.loads(content[place:])
    return read


def describe_table(table: LaneTable) -> dict[str, Any]:
    """What the canvas needs beside the columns: names of lanes, and how each kind and mark is drawn."""
    places = {paint.key: place for place, paint in enumerate(PAINTS)}
    return {
        "labels": table.labels,
        "pipelines": [worker.pipeline for worker in table.workers],
        "ranks": [worker.rank for worker in table.workers],
        "failed": np.flatnonzero(table.failed).tolist(),
        "span": table.span,
        "unit": table.unit,
        "by_rank": "stage" if table.shape.chunks == 1 else "rank",
        "bits": {flag.name: int(flag) for flag in Flag},
        "no_micro_batch": int(NO_MICRO_BATCH),
        "kinds": [
            {
                "token": cls.token,
                "name": NAMES[Kind(kind)],
                "letter": LETTERS.get(Kind(kind), "F" if kind == Kind.OVERLAPPED_PAIR else cls.token),
                "numbered": kind not in LETTERS,
                "parts": [[places[part[0].key], *part[1:]] for part in PARTS[Kind(kind)](table.weight_share)],
            }
            for kind, cls in enumerate(KIND_CLASSES)
        ],
        "paints": [{name: getattr(paint, name) for name in paint.__slots__} for paint in PAINTS],
        "busy": [places[key] for key in ("forward", "input", "weight", "optimizer")],
        "failure": {"fill": FAILURE_BAND, "hatch": FAILURE_HATCH, "line": FAILURE, "ink": INK},
    }
