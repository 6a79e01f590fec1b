"""Pipelines that cut the model differently, in the stages of one schedule.

A stage lies between two neighbouring cuts of any pipeline. A worker of a shallow pipeline hosts several of them in a
row, and runs their forwards, or backwards, one behind the other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise

from recycle.ir.instruction import Compute, Forward, Instruction
from recycle.shape import MicroBatch, Shape
from recycle.systems.setting import Split


def hosted(cut: Split, common: Split) -> Iterator[tuple[int, ...]]:
    """The stages of the common cut that each part of a pipeline consists of."""
    ends = list(accumulate(common))
    for begin, end in pairwise([0, *accumulate(cut)]):
        yield tuple(stage for stage, at in enumerate(ends) if begin < at <= end)


def expanded(
    program: Sequence[Instruction], hosts: tuple[int, ...], micro_batches: Sequence[MicroBatch]
) -> Iterator[Instruction]:
    """A worker's program in the stages that it consists of: forwards downwards, backwards upwards.

    Args:
        program: compute-only, of a pipeline by itself; micro-batches beyond those that are given are left out.
    """
    for one in program:
        assert isinstance(one, Compute)
        if one.micro_batch.index < len(micro_batches):
            for stage in hosts if isinstance(one, Forward) else hosts[::-1]:
                yield type(one)(stage, micro_batches[one.micro_batch.index])


def micro_batches_of(shape: Shape, shares: Sequence[int], homes: Sequence[int]) -> list[list[MicroBatch]]:
    """The micro-batches that each pipeline runs, in order: first those of its home, then what other homes have left.

    Args:
        shares: of each pipeline, which add up to all of the shape's.
        homes: of each of the first, a pipeline of the shape, all different; those beyond have none.
    """
    m = shape.micro_batches
    kept = [min(share, m) if k < len(homes) else 0 for k, share in enumerate(shares)]
    own = dict(zip(homes, kept, strict=False))
    spare = (MicroBatch(k, j) for k in range(shape.pipelines) for j in range(own.get(k, 0), m))
    return [
        [MicroBatch(homes[k], j) for j in range(kept[k])] + [next(spare) for _ in range(share - kept[k])]
        for k, share in enumerate(shares)
    ]
