"""A timeline as text: one lane per worker, a cell per instruction, for terminals and error messages."""

from __future__ import annotations

from recycle.ir.columns import Floats
from recycle.ir.instruction import KIND_CLASSES, Compute, OverlappedPair, is_kind
from recycle.ir.schedule import Schedule

DRAWN = 32
"""Workers up to which commands draw a grid."""


def text_grid(schedule: Schedule, start: Floats, end: Floats, width: int = 120) -> str:
    """A schedule drawn with at most `width` characters per lane; `start` and `end` are the seconds of its rows.

    Each instruction begins with its letter (F, B, I, W, R, X for an overlapped pair) and its micro-batch index, as far
    as its length allows; a letter is small in any stage but the first that the worker hosts. `·` is idle time, `x` a
    failed worker. A re-routed instruction carries a `'`.
    """
    makespan = float(end.max() - start.min()) if len(end) else 0.0
    c = schedule.columns
    compute = is_kind(c.kind, (Compute, OverlappedPair))
    shortest = float((end - start)[compute].min()) if compute.any() else 1.0
    columns = min(width - 6, max(1, round(makespan / max(shortest, 1e-12)) * 3))
    scale = columns / makespan if makespan else 1.0
    lines = [f"{'':6}0{'':{max(columns - 12, 1)}}{makespan:>10g}"]
    for w, worker in enumerate(schedule.shape.workers()):
        cells = ["x" if worker in schedule.failed else "·"] * columns
        first = min(schedule.stages_of(worker), default=-1)
        for row in range(int(c.offsets[w]), int(c.offsets[w + 1])):
            if not compute[row]:
                continue
            begin, stop = round(start[row] * scale), round(end[row] * scale)
            cls = KIND_CLASSES[c.kind[row]]
            letter = "X" if cls is OverlappedPair else cls.row.letter or cls.token
            letter = letter if c.stage[row] == first else letter.lower()
            mark = "'" if c.pipeline[row] != worker.pipeline else ""
            label = f"{letter}{c.index[row]}{mark}".ljust(stop - begin, "-")[: stop - begin]
            cells[begin:stop] = label
        lines.append(f"{worker!s:>5} " + "".join(cells[:columns]))
    return "\n".join(lines)
