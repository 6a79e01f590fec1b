"""`lanes.bin` read back, as the browser does."""

from __future__ import annotations

import json
from typing import Any

import numpy as np

HEADER = np.dtype([("magic", "S4"), ("lanes", "<u4"), ("operations", "<u4"), ("described", "<u4"), ("origin", "<f8")])


def decode(content: bytes) -> dict[str, Any]:
    """`origin`, `offsets`, each column and the `description`; every byte belongs to one of them."""
    (head,) = np.frombuffer(content, HEADER, 1)
    assert head["magic"] == b"RLN2"
    end = len(content) - int(head["described"])
    description = json.loads(content[end:])
    read: dict[str, Any] = {"origin": float(head["origin"]), "description": description}
    columns = {"offsets": ("<u4", int(head["lanes"]) + 1)}
    columns |= {name: (f"<{kind}", int(head["operations"])) for name, kind in description["columns"].items()}
    place = HEADER.itemsize
    for name, (kind, length) in columns.items():
        read[name] = np.frombuffer(content, kind, length, place)
        place += -(-read[name].nbytes // 4) * 4
    assert place == end
    return read
