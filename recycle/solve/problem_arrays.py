"""A planning problem as the compiled loops read it, and their random numbers.

These are the same in plain Python and compiled, for the same seed. The plan of a job depends on them, so they never
change.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from recycle.ir.compiled import called_by_kernels

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


def seeded(seed: int) -> Operations:
    """[1], the generator's state for a seed."""
    return np.array([seed % 2147483647 + 1], dtype=np.int64)


@called_by_kernels
def draw(state: Any) -> Any:
    """The next number from 0 to 2**31 - 1 of a linear congruential generator (constants of ANSI C's example).

    The low bits have short periods, so callers use the high ones.
    """
    state[0] = (state[0] * 1103515245 + 12345) & 0x7FFFFFFF
    return state[0]


@called_by_kernels
def draw_below(state: Any, most: int) -> Any:
    """The next number from 0 to `most` - 1."""
    return (draw(state) >> 8) % most
