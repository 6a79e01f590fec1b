"""What every worker holds over time, beside the operations of a table, as the browser draws it in all lanes at once.

Of each operation what its worker holds from its start on, and from its end on: between two operations nothing changes
but what the second value says. In bytes where the profile knows what things weigh, else in activations (chunks).
"""

from __future__ import annotations

import struct

import numpy as np
import numpy.typing as npt

from recycle.ir.memory import activation_changes, static_bytes
from recycle.profile import Profile
from viz.lane_cache import CachedLanes, Explainer

_HEADER = struct.Struct("<II")
Singles = npt.NDArray[np.float32]


def knows_bytes(profile: Profile) -> bool:
    """Whether a profile says what activations weigh: one that leaves it out counts each as 1."""
    return profile.capacity is not None or profile.activation != 1.0 or profile.static != 0.0


def held(shown: CachedLanes, explainer: Explainer) -> tuple[Singles, Singles, Singles]:
    """(limit of each lane, NaN without one; held from the start of each operation; from its end), see the module."""
    table, timeline = shown.table, explainer.timeline
    schedule, c, profile = timeline.schedule, timeline.schedule.columns, timeline.profile
    in_bytes = knows_bytes(profile)
    added, freed = activation_changes(schedule, profile, in_bytes=in_bytes)
    fixed = static_bytes(schedule, profile) if in_bytes else [0.0] * schedule.shape.worker_count
    limits = np.full(table.lanes, np.nan, dtype=np.float32)
    from_start, from_end = np.zeros(len(table), dtype=np.float32), np.zeros(len(table), dtype=np.float32)
    for w, worker in enumerate(schedule.shape.workers()):
        lane = explainer.lane(table, worker)
        if lane < 0 or worker in schedule.failed:
            continue
        if in_bytes:
            limits[lane] = np.nan if profile.capacity is None else profile.capacity
        elif explainer.limits:
            limits[lane] = explainer.limits[w % len(explainer.limits)]
        rows = np.arange(c.offsets[w], c.offsets[w + 1])
        grow, shrink = rows[added[rows] > 0], rows[freed[rows] > 0]
        moment = np.concatenate([timeline.start[grow], timeline.end[shrink]])
        change = np.concatenate([added[grow], -freed[shrink]])
        order = np.argsort(moment, kind="stable")
        level = np.concatenate([[0.0], np.cumsum(change[order])]) + fixed[w]
        mine = slice(int(table.offsets[lane]), int(table.offsets[lane + 1]))
        for times, values in ((table.start, from_start), (table.end, from_end)):
            values[mine] = level[np.searchsorted(moment[order], times[mine], side="right")]
    return limits, from_start, from_end


def encode(shown: CachedLanes, explainer: Explainer) -> bytes:
    """`held` as bytes, little endian: u32 lanes, u32 1 for bytes and 0 for activations, then the three as float32."""
    head = _HEADER.pack(shown.table.lanes, int(knows_bytes(explainer.timeline.profile)))
    return head + b"".join(part.astype("<f4").tobytes() for part in held(shown, explainer))
