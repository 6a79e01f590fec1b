"""Oobleck's iteration as a schedule: pipelines of different depth in one shape, each 1F1B.

The IR needs nothing new for it. A stage of the schedule is what lies between two neighbouring cuts of any pipeline; a
worker of a shallow pipeline hosts several of them in a row, and runs their forwards, or backwards, one behind the
other. So a micro-batch goes through its own pipeline's stages as it should: only their ends are sent, and the time is
the same. And the sync is right by itself: every layer is in one stage of the schedule, whose gradients are summed over
all its hosts, however the pipelines are cut.

The shape has as many ranks as the deepest pipeline, where its P * V stages allow that (further cuts are made until
they do), else one rank per stage. Positions that shallower pipelines leave empty count as failed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise

from recycle.ir.families import one_f_one_b
from recycle.ir.instruction import Instruction
from recycle.ir.schedule import Schedule
from recycle.job.shape import Shape, Worker
from recycle.systems.joint_iteration import expanded, hosted, joint_schedule, micro_batches_of, shape_for
from recycle.systems.setting import Split


def common_cut(splits: Sequence[Split]) -> tuple[Split, int]:
    """(layers of each of the schedule's stages, ranks).

    Args:
        splits: layers of each stage of each pipeline, which add up to the same.
    """
    layers, deepest = sum(splits[0]), max(map(len, splits))
    cuts = {cut for split in splits for cut in accumulate(split)}
    ranks = next((r for r in range(deepest, len(cuts) + 1) if -(-len(cuts) // r) * r <= layers), len(cuts))
    while len(cuts) % ranks:
        begin, end = max(pairwise([0, *sorted(cuts)]), key=lambda part: part[1] - part[0])
        cuts.add((begin + end) // 2)
    return tuple(b - a for a, b in pairwise([0, *sorted(cuts)])), ranks


def iteration(splits: Sequence[Split], shares: Sequence[int]) -> tuple[Schedule, Split]:
    """(one iteration without its transfers, with the barrier; layers of each of its stages).

    Args:
        splits: layers of each stage of each pipeline.
        shares: micro-batches that each pipeline runs.
    """
    common, ranks = common_cut(splits)
    shape = shape_for(len(splits), ranks, sum(shares), len(common) // ranks)
    programs: dict[Worker, Iterator[Instruction]] = {}
    placement: list[tuple[int, ...]] = [()] * shape.worker_count
    for k, (split, own) in enumerate(zip(splits, micro_batches_of(shape, shares), strict=True)):
        plain = one_f_one_b(Shape(1, len(split), len(own)))
        for rank, stages in enumerate(hosted(split, common)):
            worker = Worker(k, rank)
            placement[shape.worker_index(worker)] = stages
            programs[worker] = expanded(plain.program(Worker(0, rank)), stages, own)
    metadata = {"system": "oobleck", "splits": [list(split) for split in splits]}
    return joint_schedule(shape, programs, tuple(placement), common, **metadata), common
