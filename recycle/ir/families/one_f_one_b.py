"""1F1B: each worker runs P - r forwards, then alternates backward and forward (PipeDream-flush, Narayanan et al.,
2021, arXiv 2006.09503; Megatron-LM's non-interleaved schedule).

Bubble per worker (P - 1)(F + B), makespan (m + P - 1)(F + B), peak min(P - r, m) activations on rank r. Limits: one
chunk per rank.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from recycle.errors import ScheduleError
from recycle.ir.families.every_pipeline import placed, tiled
from recycle.ir.instruction import Backward, Forward
from recycle.ir.schedule import Optimizer, Schedule
from recycle.shape import Shape


def one_f_one_b(shape: Shape, optimizer: Optimizer = "staggered") -> Schedule:
    """The compute-only 1F1B schedule of `shape`. Raises ScheduleError when chunks > 1."""
    if shape.chunks != 1:
        raise ScheduleError(f"1f1b: needs chunks = 1, got {shape.chunks}")
    ranks, m = shape.ranks, shape.micro_batches
    warm_up = np.minimum(ranks - np.arange(ranks), m)[:, None]
    j = np.arange(m)[None, :]
    # Where F j and B j stand in the program of each rank: F behind the warm-up follow a B each, B alternate with them.
    forward = np.where(j < warm_up, j, 2 * j - warm_up + 1)
    backward = np.minimum(warm_up + 2 * j, m + j)
    stage = np.arange(ranks)[:, None]
    columns = placed(j[0], (Forward, forward, stage), (Backward, backward, stage))
    one = Schedule.from_columns(replace(shape, pipelines=1), columns, optimizer=optimizer, metadata={"family": "1f1b"})
    return tiled(one, shape)
