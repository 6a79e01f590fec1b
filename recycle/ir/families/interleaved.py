"""Interleaved 1F1B: each worker hosts V chunks and walks through them in groups of micro-batches, so that a warm-up
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

from recycle.errors import ScheduleError
from recycle.ir.families.every_pipeline import every_pipeline
from recycle.ir.instruction import Backward, Forward, Instruction
from recycle.ir.schedule import Optimizer, Schedule
from recycle.shape import MicroBatch, Shape


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
    order = units(m, chunks, size)
    programs = []
    for rank in range(ranks):
        forwards = [Forward(chunk * ranks + rank, MicroBatch(0, j)) for chunk, j in order]
        backwards = [Backward((chunks - 1 - chunk) * ranks + rank, MicroBatch(0, j)) for chunk, j in order]
        warm_up = min(len(order), (chunks - 1) * size + 2 * (ranks - 1 - rank))
        steady = len(order) - warm_up
        program: list[Instruction] = [*forwards[:warm_up]]
        for forward, backward in zip(forwards[warm_up:], backwards[:steady], strict=True):
            program += (forward, backward)
        program += backwards[steady:]
        programs.append(program)
    given = {} if group_size is None else {"group_size": group_size}
    return every_pipeline(shape, programs, optimizer=optimizer, metadata={"family": "interleaved", **given})


def units(micro_batches: int, chunks: int, size: int) -> list[tuple[int, int]]:
    """(chunk, micro-batch) of each forward unit, in order."""
    return [
        (chunk, j)
        for first in range(0, micro_batches, size)
        for chunk in range(chunks)
        for j in range(first, min(first + size, micro_batches))
    ]
