"""What an order holds in memory: activations from the start of their F to the end of their W, and what is there anyway.

Read off the order alone, so that it needs no times.
"""

from __future__ import annotations

import numpy as np

from recycle.ir.dependencies import Rows, work
from recycle.ir.graph import Floats
from recycle.ir.instruction import Kind, is_kind
from recycle.ir.schedule import Schedule
from recycle.profile import Profile

_SAME = 1e-9
"""Relative slack when two amounts count as equal."""


def activation_changes(schedule: Schedule, profile: Profile, weights: Floats | None) -> tuple[Floats, Floats]:
    """(added at its start, freed at its end) of each row, in activations or in the unit of `weights`.

    A forward adds its stage's weight (1 when `weights` is None), I gives back all but `weight_stash` of it, W the
    rest, B the whole. An overlapped pair holds both activations at once. What a redundant forward adds goes but for
    `redundant_stash` when it ends, and then with the backward (or I) of the stage before on the same worker.
    """
    c, shape = schedule.columns, schedule.shape
    weight = np.ones(shape.stages) if weights is None else weights
    mine = weight[np.clip(c.stage, 0, shape.stages - 1)]
    freed = np.zeros(len(c))
    freed = np.where(c.kind == Kind.BACKWARD, mine, freed)
    freed = np.where(c.kind == Kind.BACKWARD_INPUT, mine * (1 - profile.weight_stash), freed)
    freed = np.where(c.kind == Kind.BACKWARD_WEIGHT, mine * profile.weight_stash, freed)
    freed = np.where(c.kind == Kind.OVERLAPPED_PAIR, weight[np.clip(c.stage2, 0, shape.stages - 1)], freed)
    redundant = c.kind == Kind.REDUNDANT_FORWARD
    if redundant.any():
        freed = np.where(redundant, mine * (1 - profile.redundant_stash), freed)
        released, by = released_redundant(schedule)
        np.add.at(freed, by, mine[released] * profile.redundant_stash)
    return np.where(is_kind(c.kind, _ADD_ACTIVATIONS), mine, 0.0), freed


_ADD_ACTIVATIONS = (Kind.FORWARD, Kind.OVERLAPPED_PAIR, Kind.REDUNDANT_FORWARD)


def released_redundant(schedule: Schedule) -> tuple[Rows, Rows]:
    """(row of a redundant forward, row of the backward or I of the stage before, same micro-batch and worker)."""
    pieces = work(schedule)
    key = (pieces.worker * (schedule.shape.stages + 1) + pieces.stage) * schedule.shape.global_micro_batches
    key = key + pieces.micro_batch
    redundant = np.flatnonzero((pieces.kind == Kind.REDUNDANT_FORWARD) & pieces.valid)
    backward = np.flatnonzero(is_kind(pieces.kind, (Kind.BACKWARD, Kind.BACKWARD_INPUT)) & pieces.valid)
    before = key[redundant] - schedule.shape.global_micro_batches
    _, first, second = np.intersect1d(before, key[backward], return_indices=True)
    return pieces.row[redundant[first]], pieces.row[backward[second]]


def held_activations(schedule: Schedule, profile: Profile, weights: Floats | None) -> tuple[list[float], list[int]]:
    """(most held, row that sets it first) per worker, read off the order alone (see `activation_changes`)."""
    c, shape = schedule.columns, schedule.shape
    added, freed = activation_changes(schedule, profile, weights)
    total = np.cumsum(added - freed)
    peaks, rows = [], []
    for w in range(shape.worker_count):
        first, end = int(c.offsets[w]), int(c.offsets[w + 1])
        before = total[first - 1] if first else 0.0
        held = total[first:end] + freed[first:end] - before
        peak = float(held.max()) if end > first else 0.0
        rows.append(first + int((held >= peak * (1 - _SAME)).argmax()) if end > first else -1)
        peaks.append(round(peak, 9))
    return peaks, rows


def static_bytes(schedule: Schedule, profile: Profile) -> list[float]:
    """Bytes that the stages of each worker need whatever the schedule."""
    static = profile.per_stage("static", schedule.shape.stages)
    return [sum(static[s] for s in stages) for stages in schedule.placement]
