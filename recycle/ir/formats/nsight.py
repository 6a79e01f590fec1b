"""Traces of NVIDIA Nsight Systems, exported by `nsys export --type sqlite`: their NVTX ranges, as torch's labels.

Ranges named "PP:<action>" count. torch's pipeline runtime makes them under `torch.autograd.profiler.emit_nvtx()`, a
script by `torch.cuda.nvtx.range("PP:1F0")`. Each process of the file is a rank. Times are those of the CPU.
"""

from __future__ import annotations

import contextlib
import sqlite3

import msgspec

from recycle.errors import ScheduleError, first_line

_PROCESS = 1 << 24
"""`globalTid` ends with the process and the thread, 24 bits each."""
_RANGES = f"""
SELECT coalesce(text, value) AS name, start / 1e3, (end - start) / 1e3, globalTid / {_PROCESS} % {_PROCESS}
FROM NVTX_EVENTS LEFT JOIN StringIds ON textId = id WHERE typeof(name) = 'text' AND name LIKE 'PP:%' ORDER BY start
"""


def recognises(content: bytes) -> bool:
    return content.startswith(b"SQLite format 3\0")


def chrome_events(content: bytes, name: str) -> bytes:
    """Return the labels of an exported file as a trace of torch's profiler; `name` begins every error message.

    Raises:
        ScheduleError: the file is damaged or has no NVTX ranges.
    """
    with contextlib.closing(sqlite3.connect(":memory:")) as database:
        try:
            database.deserialize(content)
            rows = database.execute(_RANGES).fetchall()
        except sqlite3.Error as error:
            why = f"no NVTX ranges can be read from it ({first_line(error)})"
            raise ScheduleError(f"{name}: {why}; trace with --trace nvtx, and export with --type sqlite") from None
    keys = "name", "ts", "dur", "pid"
    # emit_nvtx adds the number of the operation: "PP:1F0, op_id = 7".
    events = [{"ph": "X", **dict(zip(keys, (label.split(",")[0], *others), strict=True))} for label, *others in rows]
    return msgspec.json.encode({"traceEvents": events})
