"""Selective decoupling: fuse I and W into one B where splitting the backward pass does not pay.

A W directly after its I is useful only if another stage uses the gradient meanwhile. One B saves the cost of the split
(kept inputs, a second pass over the layers). Each stage is fused if the period does not increase.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from recycle.ir.columns import Rows
from recycle.ir.instruction import Backward, BackwardInput, BackwardWeight
from recycle.ir.schedule import Schedule
from recycle.ir.simulate import TOLERANCE, Timeline, simulate
from recycle.job.profile import Profile
from recycle.solve.effort import Deadline, Pace


def fuse_backward(
    schedule: Schedule, profile: Profile, deadline: Deadline, timeline: Timeline | None = None
) -> tuple[Schedule, Timeline]:
    """Fuse every stage that this does not slow down, and return the schedule and its timeline.

    Args:
        schedule: compute-only.
        deadline: stages not tried by then are unchanged.
    """
    pace = Pace(deadline)
    best, kept = timeline or simulate(schedule, profile), schedule
    pairs = _pairs(schedule)
    if not len(pairs) or pace.is_over():
        return kept, best
    stage = schedule.columns.stage[pairs]
    everywhere = _fused(schedule, pairs)
    timeline = simulate(everywhere, profile)
    if _no_longer(timeline, best):
        return everywhere, timeline
    chosen = np.empty(0, dtype=np.int64)
    for s in np.unique(stage).tolist():
        if pace.is_over():
            break
        more = np.concatenate([chosen, pairs[stage == s]])
        fused = _fused(schedule, more)
        timeline = simulate(fused, profile)
        if _no_longer(timeline, best):
            chosen, kept, best = more, fused, timeline
    return kept, best


def _no_longer(timeline: Timeline, than: Timeline) -> bool:
    return timeline.period <= than.period * (1 + TOLERANCE) and timeline.makespan <= than.makespan * (1 + TOLERANCE)


def _pairs(schedule: Schedule) -> Rows:
    c = schedule.columns
    same = (c.kind[:-1] == BackwardInput.kind) & (c.kind[1:] == BackwardWeight.kind)
    for column in (c.worker, c.stage, c.pipeline, c.index):
        same &= column[:-1] == column[1:]
    return np.flatnonzero(same)


def _fused(schedule: Schedule, pairs: Rows) -> Schedule:
    c = schedule.columns
    kind = c.kind.copy()
    kind[pairs] = Backward.kind
    keep = np.ones(len(c), dtype=np.bool_)
    keep[pairs + 1] = False
    offsets = np.concatenate([[0], np.cumsum(keep)])[c.offsets]
    return replace(schedule, columns=replace(c, kind=kind).take(np.flatnonzero(keep), offsets))
