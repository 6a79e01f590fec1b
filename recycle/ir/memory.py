"""Memory of workers: activations from the start of F to the end of W, and the static bytes of stages."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from recycle.errors import JobError
from recycle.ir.columns import Floats, Rows
from recycle.ir.instruction import Backward, Forward, Instruction, Offload, OverlappedPair, Part, Reload
from recycle.ir.kinds import is_kind, kinds_where, makers_of, per_kind
from recycle.ir.operations import operations_of
from recycle.ir.schedule import Schedule
from recycle.job.profile import Profile

TOLERANCE = 1e-9
"""Relative difference at which two times, or two amounts of memory, count as equal."""


def activation_changes(schedule: Schedule, profile: Profile, *, in_bytes: bool) -> tuple[Floats, Floats]:
    """Return (added at the start, freed at the end) of each row, in activations or in bytes.

    Kinds that hold an activation add 1 (with a cut, the stage's share of a fault-free activation), or the bytes of the
    stage; each row frees the share given by its kind. With recomputation, in bytes, the forward adds only the input of
    the recomputation, and the backward the rest. A forward-only schedule holds an activation only while F runs.
    """
    c, shape = schedule.columns, schedule.shape
    stage = np.clip(c.stage, 0, shape.stages - 1)
    weight, recomputed = np.array(shape.stage_sizes), np.zeros(shape.stages)
    if in_bytes:
        weight = np.array(profile.per_stage("activation", shape.stages))
        recomputed = weight - np.array(profile.per_stage("recomputed_from", shape.stages))
    size = weight[stage]
    added = np.where(is_kind(c.kind, kinds_where(lambda row: row.holds)), size, 0.0)
    if schedule.forward_only:
        return added, added.copy()
    freed = size * per_kind(lambda cls: cls.row.frees(profile))[c.kind]
    if schedule.buckets > 1:
        freed[is_kind(c.kind, Part)] /= schedule.buckets
    pair = np.flatnonzero(c.kind == OverlappedPair.kind)
    stage2 = np.clip(c.stage2[pair], 0, shape.stages - 1)
    freed[pair] = weight[stage2] * Backward.row.frees(profile)
    if recomputed.any():
        added -= np.where(is_kind(c.kind, (Forward, OverlappedPair, Reload)), recomputed[stage], 0.0)
        freed -= np.where(c.kind == Offload.kind, recomputed[stage], 0.0)
        added += np.where(is_kind(c.kind, kinds_where(lambda row: row.remakes)), recomputed[stage], 0.0)
        added[pair] += recomputed[stage2]
    for cls in kinds_where(lambda row: row.released_by is not None):
        if (c.kind == cls.kind).any():
            held, by = _released(schedule, cls)
            np.add.at(freed, by, size[held] * (1 - cls.row.frees(profile)))
    return added, freed


def _released(schedule: Schedule, cls: type[Instruction]) -> tuple[Rows, Rows]:
    assert cls.row.released_by is not None
    value, offset = cls.row.released_by
    ops, micro_batches = operations_of(schedule), schedule.shape.global_micro_batches
    key = ops.worker_cell + ops.worker * micro_batches  # room for a stage beyond the model
    holders, makers = ops.select(cls), ops.select(*makers_of(value))
    _, first, second = np.intersect1d(key[holders] + offset * micro_batches, key[makers], return_indices=True)
    return ops.row[holders[first]], ops.row[makers[second]]


def held_before(schedule: Schedule, profile: Profile, *, in_bytes: bool) -> tuple[Floats, Floats, Floats]:
    """Return (added at start, freed at end, held by its worker before) of each row (see `activation_changes`)."""
    c = schedule.columns
    added, freed = activation_changes(schedule, profile, in_bytes=in_bytes)
    total = np.append(0.0, np.cumsum(added - freed))
    return added, freed, total[:-1] - total[c.offsets[c.worker]]


def held_activations(schedule: Schedule, profile: Profile, *, in_bytes: bool) -> tuple[list[float], list[int]]:
    """Return (peak, first row that reaches it) per worker, from the order alone (see `activation_changes`)."""
    c = schedule.columns
    added, _, before = held_before(schedule, profile, in_bytes=in_bytes)
    during = before + added
    peaks, rows = np.zeros(len(c.offsets) - 1), np.full(len(c.offsets) - 1, -1)
    busy = np.flatnonzero(np.diff(c.offsets))
    if len(busy):
        first = c.offsets[busy]
        peaks[busy] = np.maximum.reduceat(during, first)
        reached = np.flatnonzero(during >= peaks[c.worker] * (1 - TOLERANCE))
        rows[busy] = reached[np.searchsorted(reached, first)]
    return [round(peak, 9) for peak in peaks.tolist()], rows.tolist()


def static_bytes(schedule: Schedule, profile: Profile) -> list[float]:
    """Return the bytes of each worker in addition to activations: `Profile.fixed_bytes` of its stages."""
    count = schedule.shape.stages
    return [profile.fixed_bytes([s for s in hosted if 0 <= s < count], count) for hosted in schedule.placement]


def require_limits(limits: Sequence[float], ranks: int) -> None:
    """Raise JobError unless `limits` has one number of at least 0 per rank."""
    if not isinstance(limits, Sequence | np.ndarray):
        raise JobError(f"limits: write one number of activations per rank, for example [{limits}] * {ranks}")
    if len(limits) != ranks:
        raise JobError(f"limits: lists {len(limits)} ranks, the schedule has {ranks}")
    for rank, limit in enumerate(limits):
        if not isinstance(limit, int | float | np.number) or not limit >= 0:
            raise JobError(f"limits: {limit!r} of rank {rank} is not a number of activations (0 or more)")
