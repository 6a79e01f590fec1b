"""A timeline as text: one lane per worker, a cell per instruction, for terminals and error messages."""

from __future__ import annotations

from typing import TYPE_CHECKING

from recycle.ir.instruction import COMPUTE_KINDS, KIND_CLASSES, Kind, is_kind

if TYPE_CHECKING:
    from recycle.ir.simulate import Timeline


DRAWN = 32
"""Workers up to which commands draw a grid."""


def text_grid(timeline: Timeline, width: int = 120) -> str:
    """The timeline drawn with at most `width` characters per lane.

    Each instruction begins with its letter (F, B, I, W, R, X for an overlapped pair) and its micro-batch index, as far
    as its length allows; a letter is small in any stage but the first that the worker hosts. `·` is idle time, `x` a
    failed worker. A re-routed instruction carries a `'`.
    """
    schedule = timeline.schedule
    c = schedule.columns
    compute = is_kind(c.kind, COMPUTE_KINDS)
    shortest = float((timeline.end - timeline.start)[compute].min()) if compute.any() else 1.0
    columns = min(width - 6, max(1, round(timeline.makespan / max(shortest, 1e-12)) * 3))
    scale = columns / timeline.makespan if timeline.makespan else 1.0
    lines = [f"{'':6}0{'':{max(columns - 12, 1)}}{timeline.makespan:>10g}"]
    for w, worker in enumerate(schedule.shape.workers()):
        cells = ["x" if worker in schedule.failed else "·"] * columns
        first = min(schedule.stages_of(worker), default=-1)
        for row in range(int(c.offsets[w]), int(c.offsets[w + 1])):
            if not compute[row]:
                continue
            begin, end = round(timeline.start[row] * scale), round(timeline.end[row] * scale)
            letter = "X" if c.kind[row] == Kind.OVERLAPPED_PAIR else KIND_CLASSES[c.kind[row]].token
            letter = letter if c.stage[row] == first else letter.lower()
            mark = "'" if c.pipeline[row] != worker.pipeline else ""
            label = f"{letter}{c.index[row]}{mark}".ljust(end - begin, "-")[: end - begin]
            cells[begin:end] = label
        lines.append(f"{worker!s:>5} " + "".join(cells[:columns]))
    return "\n".join(lines)
