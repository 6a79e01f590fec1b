"""Families with chunk c of rank r on stage c * P + r.

GPipe (Huang et al., 2019, arXiv 1811.06965) runs all forwards, then all backwards, with one chunk per rank. Bubble per
worker (P - 1)(F + B), peak m activations on every worker.

Looped breadth-first (Lamy-Poirier, 2022, arXiv 2211.05953) is GPipe with V chunks per worker: all forwards of a chunk
before the next chunk, then all backwards from the last chunk down, with descending micro-batches as in
`torch.distributed.pipelining`. Bubble per worker (P - 1)(F + B) in chunk times, a V-th of GPipe's; inner bubble
(P - 1 - r)(F + B) on rank r; peak m V activations. With m < P both bubbles grow by (V - 1)(P - m)(F + B).

1F1B (PipeDream-flush, Narayanan et al., 2021, arXiv 2006.09503): rank r warms up with P - 1 - r forwards, then a
forward and a backward alternate. Bubble per worker (P - 1)(F + B), makespan (m + P - 1)(F + B), peak min(P - r, m)
activations on rank r. Limits: one chunk per rank.

Interleaved 1F1B (Narayanan et al., 2021, arXiv 2104.04473, section 2.2; Megatron-LM's schedule table): the forwards of
a rank form one list of units: N micro-batches through chunk 0, the same through chunk 1, up to chunk V - 1, then the
next N; the last group takes the rest. Backward units are the same list with the chunks mirrored. After
min(m V, (V - 1) N + 2 (P - 1 - r)) forwards, a forward and a backward alternate. N = P unless given. Bubble per worker
(P - 1)(F + B) in chunk times, a V-th of 1F1B's; inner bubble (P - 1 - r)(F + B); peak
min(m V, (V - 1) N + 2 (P - 1 - r) + 1) activations on rank r. Groups smaller than P can deadlock and are refused, as in
Megatron-LM, except a single group, N = m; below P micro-batches its bubbles grow by (V - 1)(P - m)(F + B).

Zero-bubble schedules by hand (Qi et al., 2023, arXiv 2401.10241, section 2): 1F1B with the backward split. After the
warm-up forwards a rank runs I k, W k - lag and the next forward for each k, and the remaining W at the end. Limits: one
chunk per rank.

ZB-H1: rank r runs min(P - r, m) forwards first and delays each W by r micro-batches. Peak min(P, m) activations. The
bubble per worker is (P - 1)(F + I) - (min(m, P) - 1) min(F, I, W); the largest inner bubble is the same with min(F, W)
instead of min(F, I, W).

ZB-H2: rank r runs min(2 (P - r) - 1, m) forwards first and delays each W by 2 r micro-batches. Peak min(2 P - 1, m)
activations. For m >= 2 P - 1 the largest inner bubble is (P - 1) max(0, I - F, F + I - 2 W), none at F = I = W, and the
bubble per worker (P - 1) max(F, I - F, F + I - 2 W). With fewer micro-batches a closed form is known only for
F = I = W: the largest inner bubble is (2 P - 1 - m) F.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from recycle.errors import ScheduleError
from recycle.ir.columns import Rows
from recycle.ir.families.every_pipeline import every_pipeline, in_turn
from recycle.ir.instruction import Backward, BackwardInput, BackwardWeight, Forward, Instruction
from recycle.ir.schedule import Optimizer, Schedule
from recycle.job.shape import MicroBatch, Shape


def gpipe(shape: Shape, optimizer: Optimizer = "staggered") -> Schedule:
    """The compute-only GPipe schedule of `shape`. Raises ScheduleError if chunks > 1."""
    if shape.chunks != 1:
        raise ScheduleError(f"gpipe: needs chunks = 1, got {shape.chunks}")
    return _breadth_first(shape, "gpipe", optimizer, range(shape.micro_batches))


def looped_bfs(shape: Shape, optimizer: Optimizer = "staggered") -> Schedule:
    """The compute-only looped breadth-first schedule of `shape`."""
    return _breadth_first(shape, "looped-bfs", optimizer, range(shape.micro_batches)[::-1])


def _breadth_first(shape: Shape, family: str, optimizer: Optimizer, backwards: range) -> Schedule:
    micro_batches = [MicroBatch(0, j) for j in range(shape.micro_batches)]
    programs = []
    for rank in range(shape.ranks):
        stages = range(rank, shape.stages, shape.ranks)
        forwards: list[Instruction] = [Forward(stage, j) for stage in stages for j in micro_batches]
        programs.append(forwards + [Backward(stage, micro_batches[j]) for stage in stages[::-1] for j in backwards])
    return every_pipeline(shape, programs, optimizer=optimizer, metadata={"family": family})


def one_f_one_b(shape: Shape, optimizer: Optimizer = "staggered") -> Schedule:
    """The compute-only 1F1B schedule of `shape`. Raises ScheduleError if chunks > 1."""
    if shape.chunks != 1:
        raise ScheduleError(f"1f1b: needs chunks = 1, got {shape.chunks}")
    warm_up = shape.ranks - 1 - np.arange(shape.ranks)
    return _alternating(shape, units(shape.micro_batches, 1, 1), warm_up, optimizer, {"family": "1f1b"})


def interleaved(shape: Shape, optimizer: Optimizer = "staggered", group_size: int | None = None) -> Schedule:
    """The compute-only interleaved 1F1B schedule of `shape`; `group_size` is N, None for P.

    Raises ScheduleError if P does not divide m and no N is given, or one of several groups is smaller than P.
    """
    ranks, m, chunks = shape.ranks, shape.micro_batches, shape.chunks
    size = ranks if group_size is None else group_size
    if group_size is None and m % ranks:
        raise ScheduleError(f"interleaved: needs micro_batches divisible by ranks = {ranks} or a group_size, got {m}")
    if size != m and not (ranks <= size < m and (m % size == 0 or m % size >= ranks)):
        raise ScheduleError(
            f"interleaved: group_size must be micro_batches = {m}, or at least ranks = {ranks} with no"
            f" smaller last group, got {size}"
        )
    given = {} if group_size is None else {"group_size": group_size}
    warm_up = (chunks - 1) * size + 2 * (ranks - 1 - np.arange(ranks))
    return _alternating(shape, units(m, chunks, size), warm_up, optimizer, {"family": "interleaved", **given})


def _alternating(
    shape: Shape, forwards: list[tuple[int, int]], warm_up: Rows, optimizer: Optimizer, metadata: dict[str, Any]
) -> Schedule:
    down = np.array([chunk for chunk, _ in forwards])
    up = 2 * shape.chunks - 1 - down  # with the chunks mirrored
    count = len(down)
    orders = np.empty((shape.ranks, 2 * count), dtype=np.int64)
    for order, first in zip(orders, np.minimum(count, warm_up).tolist(), strict=True):
        last = 2 * count - first
        order[:first], order[last:] = down[:first], up[count - first :]
        order[first:last:2], order[first + 1 : last : 2] = down[first:], up[: count - first]
    chunks = [range(chunk * shape.ranks, (chunk + 1) * shape.ranks) for chunk in range(shape.chunks)]
    work = [(cls, stages) for cls in (Forward, Backward) for stages in chunks]
    return in_turn(shape, orders, work, optimizer=optimizer, metadata=metadata)


def units(micro_batches: int, chunks: int, size: int) -> list[tuple[int, int]]:
    """Return (chunk, micro-batch) of each forward unit, in order."""
    return [
        (chunk, j)
        for first in range(0, micro_batches, size)
        for chunk in range(chunks)
        for j in range(first, min(first + size, micro_batches))
    ]


def zb_h1(shape: Shape, optimizer: Optimizer = "staggered") -> Schedule:
    """The compute-only ZB-H1 schedule of `shape`. Raises ScheduleError if chunks > 1."""
    rank = np.arange(shape.ranks)
    return _delayed_weights(shape, "zb-h1", optimizer, shape.ranks - rank, rank)


def zb_h2(shape: Shape, optimizer: Optimizer = "staggered") -> Schedule:
    """The compute-only ZB-H2 schedule of `shape`. Raises ScheduleError if chunks > 1."""
    rank = np.arange(shape.ranks)
    return _delayed_weights(shape, "zb-h2", optimizer, 2 * (shape.ranks - rank) - 1, 2 * rank)


def _delayed_weights(shape: Shape, family: str, optimizer: Optimizer, warm_up: Rows, lag: Rows) -> Schedule:
    if shape.chunks != 1:
        raise ScheduleError(f"{family}: needs chunks = 1, got {shape.chunks}")
    m, orders = shape.micro_batches, []
    for first, delay in zip(np.minimum(warm_up, m).tolist(), np.minimum(lag, m).tolist(), strict=True):
        order = [0] * first
        for k in range(m):
            order += [1] + [2] * (k >= delay) + [0] * (first + k < m)
        orders.append(order + [2] * delay)
    work = [(cls, range(shape.ranks)) for cls in (Forward, BackwardInput, BackwardWeight)]
    return in_turn(shape, orders, work, optimizer=optimizer, metadata={"family": family})
