"""1F1B and its interleaved form: after a warm-up of forwards, a forward and a backward alternate.

1F1B: rank r warms up with P - 1 - r forwards (PipeDream-flush, Narayanan et al., 2021, arXiv 2006.09503; Megatron-LM's
non-interleaved schedule). Bubble per worker (P - 1)(F + B), makespan (m + P - 1)(F + B), peak min(P - r, m) activations
on rank r. Limits: one chunk per rank.

Interleaved 1F1B: each worker hosts V chunks and walks through them in groups of micro-batches, so that a warm-up
step costs one chunk instead of one whole rank (Narayanan et al., 2021, arXiv 2104.04473, section 2.2; Megatron-LM's
schedule table).

Chunk c of rank r is stage c * P + r. The forwards of a rank form one list of units: N micro-batches through chunk 0,
the same through chunk 1, up to chunk V - 1, then the next N; the last group takes what is left. Backward units are
the same list with the chunks mirrored. After min(m V, (V - 1) N + 2 (P - 1 - r)) forwards, a forward and a backward
alternate. N = P unless given.

Bubble per worker (P - 1)(F + B) in chunk times, a V-th of 1F1B's; inner bubble (P - 1 - r)(F + B); peak
min(m V, (V - 1) N + 2 (P - 1 - r) + 1) activations on rank r. A group smaller than P, or a last group smaller than P,
would make ranks wait for each other, in places for ever (P = 3, V = 2, m = 3, N = 1), so it is refused, as Megatron-LM
does. The one exception is a single group, N = m: never stuck, but below P micro-batches its bubbles grow by
(V - 1)(P - m)(F + B).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from recycle.errors import ScheduleError
from recycle.ir.columns import Rows
from recycle.ir.families.every_pipeline import placed
from recycle.ir.instruction import Backward, Forward
from recycle.ir.schedule import Optimizer, Schedule
from recycle.job.shape import Shape


def one_f_one_b(shape: Shape, optimizer: Optimizer = "staggered") -> Schedule:
    """The compute-only 1F1B schedule of `shape`. Raises ScheduleError when chunks > 1."""
    if shape.chunks != 1:
        raise ScheduleError(f"1f1b: needs chunks = 1, got {shape.chunks}")
    warm_up = shape.ranks - 1 - np.arange(shape.ranks)
    return _alternating(shape, units(shape.micro_batches, 1, 1), warm_up, optimizer, {"family": "1f1b"})


def interleaved(shape: Shape, optimizer: Optimizer = "staggered", group_size: int | None = None) -> Schedule:
    """The compute-only interleaved 1F1B schedule of `shape`.

    Args:
        group_size: N, micro-batches that a rank takes through one chunk before the next; P when left out.

    Raises:
        ScheduleError: P does not divide m and no group size is given; or some group would have fewer than P
            micro-batches and is not the only one.
    """
    ranks, m, chunks = shape.ranks, shape.micro_batches, shape.chunks
    size = ranks if group_size is None else group_size
    if group_size is None and m % ranks:
        raise ScheduleError(f"interleaved: needs micro_batches divisible by ranks = {ranks} or a group_size, got {m}")
    if size != m and not (ranks <= size < m and (m % size == 0 or m % size >= ranks)):
        raise ScheduleError(
            f"interleaved: group_size must be micro_batches = {m}, or at least ranks = {ranks} and leave no last group"
            f" of fewer, got {size}"
        )
    given = {} if group_size is None else {"group_size": group_size}
    warm_up = (chunks - 1) * size + 2 * (ranks - 1 - np.arange(ranks))
    return _alternating(shape, units(m, chunks, size), warm_up, optimizer, {"family": "interleaved", **given})


def _alternating(
    shape: Shape, forwards: list[tuple[int, int]], warm_up: Rows, optimizer: Optimizer, metadata: dict[str, Any]
) -> Schedule:
    """The schedule with so many forwards before each rank's first backward; `forwards` as of `units`."""
    chunk, index = np.array(forwards).T
    n, rank, i = len(index), np.arange(shape.ranks)[:, None], np.arange(len(index))[None, :]
    warm_up = np.minimum(n, warm_up)[:, None]
    # Where the i-th forward and the i-th backward stand: behind the warm-up they alternate until the forwards end.
    forward = np.where(i < warm_up, i, 2 * i - warm_up)
    backward = np.minimum(warm_up + 2 * i + 1, n + i)
    downwards, upwards = chunk * shape.ranks + rank, (shape.chunks - 1 - chunk) * shape.ranks + rank
    pieces = (Forward, forward, downwards), (Backward, backward, upwards)
    return placed(shape, index, *pieces, optimizer=optimizer, metadata=metadata)


def units(micro_batches: int, chunks: int, size: int) -> list[tuple[int, int]]:
    """(chunk, micro-batch) of each forward unit, in order."""
    return [
        (chunk, j)
        for first in range(0, micro_batches, size)
        for chunk in range(chunks)
        for j in range(first, min(first + size, micro_batches))
    ]
