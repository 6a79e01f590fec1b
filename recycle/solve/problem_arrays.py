"""Planning problem and random numbers for the compiled loops. Plans depend on the numbers, so they must not change."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from recycle.ir.compiled import called_by_kernels

Operations = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
FORWARD, INPUT, WEIGHT = 0, 1, 2
"""Numbers of the kinds of operations: F, I (or a whole B), W."""


class ProblemArrays(NamedTuple):
    """A problem for the compiled loops: S stages, n micro-batches in all, P ranks, W workers.

    Attributes:
        stages, micro_batches, ranks: S, n and P.
        split, staggered: as in `Problem`.
        times: [3 * S], F, I (or B) and W of every stage at speed 1.
        rank_of: [S], rank that hosts each stage.
        update_seconds: [P], reduce and step of all stages of a rank.
        link: time of the slowest transfer.
        hops: transfer time of each lane, indexed by `lane_between`; empty if all transfers take `link`.
        speed: [W], factor on compute times.
        cap: [W], maximum activations.
        stash: share of an activation held between I and W.
        needs, feeds, wakes: [operations], as in `Problem`.
    """

    stages: int
    micro_batches: int
    ranks: int
    split: bool
    staggered: bool
    times: Floats
    rank_of: Operations
    update_seconds: Floats
    link: float
    hops: Floats
    speed: Floats
    cap: Floats
    stash: float
    needs: Operations
    feeds: Operations
    wakes: Operations


@called_by_kernels
def lane_between(sender: Any, receiver: Any, workers: int, ranks: int) -> Any:
    """Return the number of a lane, a directed pair of workers of one rank or of ranks next to each other."""
    ahead = (receiver - sender) % ranks
    direction = 1 * (ahead > 0) + 1 * (ahead > 1)
    return (sender + workers * direction) * (workers // ranks) + receiver // ranks


def seeded(seed: int) -> Operations:
    """Return [1], the generator's state for a seed."""
    return np.array([seed % 2147483647 + 1], dtype=np.int64)


@called_by_kernels
def draw(state: Any) -> Any:
    """Return a random number from 0 to 2**31 - 1 (ANSI C's generator); only the high bits have long periods."""
    state[0] = (state[0] * 1103515245 + 12345) & 0x7FFFFFFF
    return state[0]


@called_by_kernels
def draw_below(state: Any, most: int) -> Any:
    """Return the next number from 0 to `most` - 1."""
    return (draw(state) >> 8) % most
