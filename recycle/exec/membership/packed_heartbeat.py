"""A heartbeat as it is written to the store: a row of fixed width, so that those of all processes are read at once.

Base64 of the row; its bytes are a multiple of three, so that the texts of many, one behind the other, are the base64 of
all their rows.
"""

from __future__ import annotations

import base64
import binascii
import math
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from recycle.exec.protocol import Heartbeat

ROW = np.dtype([("beats", "<i8"), ("progress", "<i8"), ("waiting", "?"), ("longest", "<f8"), ("doing", "S20")])
"""A `Heartbeat`'s attributes; `longest` is not a number where it is None, and `beats` is -1 where there is none yet."""
Beats = npt.NDArray[np.void]
"""Rows of heartbeats."""


def pack_heartbeat(beat: Heartbeat | None) -> str:
    """The heartbeat, to be written; None stands for a process that has not beaten."""
    beat = Heartbeat(-1, -1, True, "start", None) if beat is None else beat
    longest = math.nan if beat.longest is None else beat.longest
    row = np.array((beat.beats, beat.progress, beat.waiting, longest, beat.doing.encode()), ROW)
    return base64.b64encode(row.tobytes()).decode()


def unpack_heartbeat(text: str) -> Heartbeat:
    """What `pack_heartbeat` was given. Raises ValueError when it is not that."""
    (row,) = unpack_heartbeats([text])
    longest = float(row["longest"])
    doing = row["doing"].decode()
    return Heartbeat(
        int(row["beats"]), int(row["progress"]), bool(row["waiting"]), doing, None if math.isnan(longest) else longest
    )


def unpack_heartbeats(texts: Iterable[str]) -> Beats:
    """A row for each text. Raises ValueError when one is not a heartbeat."""
    try:
        return np.frombuffer(base64.b64decode("".join(texts), validate=True), ROW)
    except binascii.Error as error:
        raise ValueError(f"not a heartbeat: {error}") from None


NOT_YET = pack_heartbeat(None)
"""Of a process that has not beaten."""
