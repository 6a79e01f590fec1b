"""A plan's programs as packed columns beside its file, so that a library reads it in a millisecond or two.

Parsing the text of 25,000 instructions takes most of the ten milliseconds that a lookup may. The packed form is int32,
little-endian: the offsets of the programs, then kind, stage, pipeline and index of every instruction. It is a copy: a
library without it reads the text. Limits: compute-only programs without overlapped pairs, which is what planners write.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from recycle.ir.columns import Columns
from recycle.ir.schedule import Schedule
from recycle.plans.plan import Plan

SUFFIX = ".columns"
_FIELDS = ("kind", "stage", "pipeline", "index")
_PROGRAMS = b'  "programs": {'


def pack(schedule: Schedule) -> bytes | None:
    """The packed programs; None where an instruction says more than they hold."""
    c = schedule.columns
    if (c.peer >= 0).any() or (c.stage2 >= 0).any():
        return None
    return np.concatenate([c.offsets, *(getattr(c, name) for name in _FIELDS)]).astype("<i4").tobytes()


def unpack(text: bytes, packed: bytes, name: str) -> Plan:
    """The plan whose file holds `text` and whose programs are `packed`. Raises ScheduleError or PlanError."""
    head = Plan.from_text(text[: text.index(_PROGRAMS)] + b'"programs": {}}', name)
    numbers = np.frombuffer(packed, dtype="<i4")
    offsets, rows = np.split(numbers, [head.shape.worker_count + 1])
    columns = Columns.from_arrays(offsets, **dict(zip(_FIELDS, rows.reshape(len(_FIELDS), -1), strict=True)))
    return replace(head, schedule=replace(head.schedule, columns=columns))
