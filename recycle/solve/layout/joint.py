"""The schedules of chains as one: its stages lie between the cuts of any chain.

A worker hosts several such stages in a row, and runs their forwards, or backwards, one behind the other. So each
micro-batch goes through its own chain's parts as it does in the chain's schedule, only the ends of parts are sent, and
every unit is in one stage, whose gradients are summed over all its hosts, however the chains are cut.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise

from recycle.ir.instruction import Compute, Forward, Instruction, OptimizerStep, ReduceGradients
from recycle.ir.schedule import Optimizer, Schedule
from recycle.shape import MicroBatch, Shape, Worker
from recycle.solve.layout.chains import Cut


def common_cut(cuts: Sequence[Cut]) -> Cut:
    """Units of each stage that lies between neighbouring cuts of any chain."""
    ends = sorted({end for cut in cuts for end in accumulate(cut)})
    return tuple(b - a for a, b in pairwise([0, *ends]))


def hosted(cut: Cut, common: Cut) -> Iterator[tuple[int, ...]]:
    """The stages of the common cut that each part of a chain consists of."""
    ends = list(accumulate(common))
    for begin, end in pairwise([0, *accumulate(cut)]):
        yield tuple(stage for stage, at in enumerate(ends) if begin < at <= end)


def expanded(
    program: Sequence[Instruction], hosts: tuple[int, ...], micro_batches: Sequence[MicroBatch]
) -> Iterator[Instruction]:
    """A part's program in the stages that it consists of: forwards downwards, backwards upwards.

    Args:
        program: compute-only, of a chain by itself; micro-batches beyond those that are given are left out.
    """
    for one in program:
        assert isinstance(one, Compute)
        if one.micro_batch.index < len(micro_batches):
            for stage in hosts if isinstance(one, Forward) else hosts[::-1]:
                yield type(one)(stage, micro_batches[one.micro_batch.index])


def micro_batches_of(shape: Shape, shares: Sequence[int], homes: Sequence[int]) -> list[list[MicroBatch]]:
    """The micro-batches that each chain runs, in order: first those of its home, then what other homes have left.

    Args:
        shares: of each chain, which add up to all of the shape's.
        homes: a pipeline for each chain, all different; chains beyond them have none.
    """
    m = shape.micro_batches
    kept = [min(share, m) if k < len(homes) else 0 for k, share in enumerate(shares)]
    own = dict(zip(homes, kept, strict=False))
    spare = (MicroBatch(k, j) for k in range(shape.pipelines) for j in range(own.get(k, 0), m))
    return [
        [MicroBatch(homes[k], j) for j in range(kept[k])] + [next(spare) for _ in range(share - kept[k])]
        for k, share in enumerate(shares)
    ]


def joint_schedule(
    shape: Shape,
    chains: Sequence[tuple[Schedule, Cut, Sequence[Worker], Sequence[MicroBatch]]],
    failed: Sequence[Worker],
    optimizer: Optimizer,
) -> Schedule:
    """One schedule of all chains, without transfers.

    Each worker reduces its first stage first: then no worker waits for one that is further down the model and so ends
    later. From the last stage on, workers that share stages with different neighbours would wait for each other in a
    row from the end of the model to its beginning, and all stages would step together.

    Args:
        shape: of the job.
        chains: of each its own schedule of one pipeline, its cut, its workers and its micro-batches.
        failed: dead workers. Live ones that are in no chain host nothing.
    """
    common = common_cut([cut for _, cut, *_ in chains])
    shape = Shape(shape.pipelines, shape.ranks, shape.micro_batches, cut=common)
    programs: dict[Worker, list[Instruction]] = {}
    placement: dict[Worker | str, Sequence[int]] = {}
    for schedule, cut, workers, micro_batches in chains:
        for rank, (worker, stages) in enumerate(zip(workers, hosted(cut, common), strict=True)):
            placement[worker] = stages
            updates = [update for stage in sorted(stages) for update in (ReduceGradients(stage), OptimizerStep(stage))]
            programs[worker] = [*expanded(schedule.program(Worker(0, rank)), stages, micro_batches), *updates]
    return Schedule.build(shape, programs, placement=placement, failed=failed, optimizer=optimizer)
