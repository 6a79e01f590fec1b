"""The memory of a worker over time: what it holds, its peak and the instruction that sets it.

What an instruction adds at its start and frees at its end is `activation_changes`, in activations (chunks).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from recycle.ir.columns import Floats
from recycle.ir.memory import activation_changes
from recycle.ir.simulate import TOLERANCE, Timeline


@dataclass(frozen=True, eq=False)
class MemoryCurve:
    """A step function.

    Attributes:
        time: ascending; the first is 0.
        held: held from that time to the next.
        peak: most held.
        peak_time: when that is first reached.
        peak_row: the instruction that sets it; -1 where nothing is held.
    """

    time: Floats
    held: Floats
    peak: float
    peak_time: float
    peak_row: int


def memory_curve(timeline: Timeline, worker: int) -> MemoryCurve:
    """What the worker with that index holds, in activations.

    Frees at a moment count before what starts there: an activation may take the place of another.
    """
    schedule, profile, c = timeline.schedule, timeline.profile, timeline.schedule.columns
    added, freed = activation_changes(schedule, profile, in_bytes=False)
    rows = np.arange(c.offsets[worker], c.offsets[worker + 1])
    grow, shrink = rows[added[rows] > 0], rows[freed[rows] > 0]
    moment = np.concatenate([timeline.start[grow], timeline.end[shrink]])
    change = np.concatenate([added[grow], -freed[shrink]])
    row = np.concatenate([grow, shrink])
    order = np.lexsort((row, change > 0, moment))
    held = np.cumsum(change[order])
    time = np.concatenate([[0.0], moment[order]])
    held = np.concatenate([[0.0], held])
    at = int((held >= held.max() * (1 - TOLERANCE)).argmax())
    return MemoryCurve(time, held, float(held[at]), float(time[at]), int(row[order][at - 1]) if at else -1)


def sampled(curve: MemoryCurve, begin: float, end: float, pixels: int) -> tuple[Floats, Floats]:
    """(time, held) of a window with at most 4 points per pixel: first, least, most and last of what lies in each.

    Drawn as steps it looks like the whole curve; the peak is never lost.
    """
    first = max(0, int(np.searchsorted(curve.time, begin, side="right")) - 1)
    last = int(np.searchsorted(curve.time, end, side="right"))
    time, held = np.maximum(curve.time[first:last], begin), curve.held[first:last]
    if len(time) > 4 * pixels and end > begin:
        pixel = np.minimum(((time - begin) / (end - begin) * pixels).astype(np.int64), pixels - 1)
        begins = np.flatnonzero(np.diff(pixel, prepend=-1))
        low = np.lexsort((held, pixel))
        kept = np.unique(np.concatenate([begins, low[begins], low[np.append(begins[1:], len(low)) - 1],
                                         np.append(begins[1:], len(low)) - 1]))  # fmt: skip
        time, held = time[kept], held[kept]
    return np.append(time, end), np.append(held, held[-1] if len(held) else 0.0)
