"""A planning problem as the compiled loops read it."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Operations = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
FORWARD, INPUT, WEIGHT = 0, 1, 2
"""The kinds of operations, as they are numbered: F, I (a whole B counts as one), W."""


class ProblemArrays(NamedTuple):
    """A problem as the compiled loops read it: S stages, n micro-batches in all, P ranks, W workers.

    Attributes:
        stages, micro_batches, ranks: S, n and P.
        split, staggered: as in `Problem`.
        times: [3 * S], F, I (or B) and W of every stage at speed 1.
        update_seconds: [P], reduce and step of all stages of a rank.
        link: time of the slowest transfer.
        hops: time of a transfer over each lane, numbered by `lanes_between`; empty where all take `link`.
        speed: [W], factor on compute times.
        cap: [W], activations that a worker may hold.
        stash: share of an activation held between I and W.
        needs, feeds, wakes: [operations], as in `Problem`.
    """

    stages: int
    micro_batches: int
    ranks: int
    split: bool
    staggered: bool
    times: Floats
    update_seconds: Floats
    link: float
    hops: Floats
    speed: Floats
    cap: Floats
    stash: float
    needs: Operations
    feeds: Operations
    wakes: Operations
