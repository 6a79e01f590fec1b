"""Pipelines that run unequal numbers of micro-batches, in the one shape that a schedule has.

A shape gives every pipeline the same m. Whose home a micro-batch has says nothing of who runs it, so unequal shares
need no other shape: there are D * m micro-batches in all, each pipeline runs its own first, and those that are left
over go to pipelines with more. Where the number of pipelines does not divide the batch, the shape has more of them,
and the workers of those that do not exist count as failed.
"""

from __future__ import annotations

from collections.abc import Sequence

from recycle.shape import MicroBatch, Shape


def shape_for(pipelines: int, ranks: int, micro_batches: int, chunks: int = 1) -> Shape:
    """The shape with the fewest pipelines, at least `pipelines`, that has `micro_batches` in all.

    Raises:
        JobError: there are more pipelines than micro-batches.
    """
    homes = next((d for d in range(pipelines, micro_batches + 1) if micro_batches % d == 0), pipelines)
    return Shape(homes, ranks, micro_batches // homes, chunks)


def even_shares(micro_batches: int, pipelines: int) -> list[int]:
    """Shares that differ by one at most, the larger ones first."""
    return [micro_batches // pipelines + (k < micro_batches % pipelines) for k in range(pipelines)]


def assign_micro_batches(shape: Shape, shares: Sequence[int]) -> list[list[MicroBatch]]:
    """The micro-batches that each pipeline runs, in order; `shares` of them, which add up to all of the shape's."""
    m = shape.micro_batches
    kept = [min(share, m) for share in shares] + [0] * (shape.pipelines - len(shares))
    spare = (MicroBatch(k, j) for k in range(shape.pipelines) for j in range(kept[k], m))
    return [
        [MicroBatch(k, j) for j in range(kept[k])] + [next(spare) for _ in range(share - kept[k])]
        for k, share in enumerate(shares)
    ]
