"""Memory of workers over time: content, peak and the instruction that sets the peak.

`activation_changes` gives what each instruction allocates at its start and frees at its end, in chunks or bytes.
"""

from __future__ import annotations

import struct
from collections import Counter
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from recycle.ir.columns import Floats, Rows
from recycle.ir.memory import activation_changes, static_bytes
from recycle.ir.simulate import TOLERANCE, Timeline
from recycle.job.profile import Profile
from viz.lane_cache import TimedLanes, TimelineContext

Singles = npt.NDArray[np.float32]
_HEADER = struct.Struct("<II")


@dataclass(frozen=True, eq=False)
class MemoryCurve:
    """A step function of memory.

    Attributes:
        time: ascending; the first is 0.
        held: amount held from that time to the next.
        row: the instruction that changes the amount; -1 for the first time.
    """

    time: Floats
    held: Floats
    row: Rows

    @property
    def peak(self) -> tuple[float, float, int]:
        """(maximum, time of the maximum, instruction that sets it); -1 if nothing is held."""
        at = int((self.held >= self.held.max() * (1 - TOLERANCE)).argmax())
        return float(self.held[at]), float(self.time[at]), int(self.row[at])


def memory_curve(timeline: Timeline, worker: int, changes: tuple[Floats, Floats]) -> MemoryCurve:
    """Return the memory of the worker with index `worker`.

    At equal times frees precede allocations, so an activation can reuse another's memory.

    Args:
        changes: amounts allocated and freed by each row, as from `activation_changes`.
    """
    c, (added, freed) = timeline.schedule.columns, changes
    rows = np.arange(c.offsets[worker], c.offsets[worker + 1])
    grow, shrink = rows[added[rows] > 0], rows[freed[rows] > 0]
    moment = np.concatenate([timeline.start[grow], timeline.end[shrink]])
    change = np.concatenate([added[grow], -freed[shrink]])
    row = np.concatenate([grow, shrink])
    order = np.lexsort((change > 0, moment))
    return MemoryCurve(
        np.append(0.0, moment[order]), np.append(0.0, np.cumsum(change[order])), np.append(-1, row[order])
    )


def micro_batches_held(timeline: Timeline, worker: int, time: float) -> list[str]:
    """Return the instructions whose activations a worker holds at a time, by start."""
    c, schedule = timeline.schedule.columns, timeline.schedule
    added, freed = activation_changes(schedule, timeline.profile, in_bytes=False)
    held: Counter[tuple[int, int, int]] = Counter()
    names = {}
    for row in range(*c.offsets[worker : worker + 2].tolist()):
        key, backward = (c.stage[row], c.pipeline[row], c.index[row]), (c.stage2[row], c.pipeline2[row], c.index2[row])
        if added[row] and timeline.start[row] <= time:
            held[key] += added[row]
            names[key] = str(schedule.instruction(row))
        if freed[row] and timeline.end[row] <= time:
            held[key if backward[1] < 0 else backward] -= freed[row]
    return [name for key, name in names.items() if held[key] > TOLERANCE]


def knows_bytes(profile: Profile) -> bool:
    """Return whether a profile states sizes; without sizes each activation counts 1."""
    return profile.capacity is not None or profile.activation != 1.0 or profile.static != 0.0


def limits_of_workers(context: TimelineContext) -> list[float | None]:
    """Return the memory limit of each worker, in the unit of `held_by_all`; None without one."""
    timeline, limits = context.timeline, context.limits
    workers = range(timeline.schedule.shape.worker_count)
    if knows_bytes(timeline.profile):
        return [timeline.profile.capacity for _ in workers]
    return [limits[w % len(limits)] / context.chunks if limits else None for w in workers]


def held_by_all(entry: TimedLanes, context: TimelineContext) -> tuple[Singles, Singles, Singles]:
    """Return the memory of all workers at each operation.

    It is in bytes if the profile states sizes, else in activations of a worker's whole part of the model.

    Returns (limit of each lane, NaN without one; memory from the start of each operation; memory from its end). Memory
    does not change between operations.
    """
    table, timeline = entry.table, context.timeline
    schedule, profile = timeline.schedule, timeline.profile
    in_bytes = knows_bytes(profile)
    unit = 1.0 if in_bytes else 1.0 / context.chunks
    changes = activation_changes(schedule, profile, in_bytes=in_bytes)
    fixed = static_bytes(schedule, profile) if in_bytes else [0.0] * schedule.shape.worker_count
    limits = np.array([np.nan if limit is None else limit for limit in limits_of_workers(context)], dtype=np.float32)
    limits[table.failed] = np.nan
    from_start, from_end = np.zeros(len(table), dtype=np.float32), np.zeros(len(table), dtype=np.float32)
    for w, worker in enumerate(schedule.shape.workers()):
        if worker in schedule.failed:
            continue
        curve = memory_curve(timeline, w, changes)
        operations = slice(int(table.offsets[w]), int(table.offsets[w + 1]))
        for times, values in ((table.start, from_start), (table.end, from_end)):
            held = curve.held[np.searchsorted(curve.time, times[operations], side="right") - 1]
            values[operations] = unit * held + fixed[w]
    return limits, from_start, from_end


def encode_held(entry: TimedLanes, context: TimelineContext) -> bytes:
    """Encode `held_by_all` for the browser.

    Little endian: u32 lanes, u32 1 for bytes or 0 for activations, three float32 arrays.
    """
    head = _HEADER.pack(entry.table.lanes, int(knows_bytes(context.timeline.profile)))
    return head + b"".join(part.astype("<f4").tobytes() for part in held_by_all(entry, context))
