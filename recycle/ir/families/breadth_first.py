"""Breadth-first schedules: a chunk runs all its forwards before the next begins, then from the last chunk down each
runs all its backwards.

GPipe (Huang et al., 2019, arXiv 1811.06965) has one chunk per rank. Bubble per worker (P - 1)(F + B), peak m
activations on every worker.

Looped breadth-first (Lamy-Poirier, 2022, arXiv 2211.05953) is GPipe, if each worker hosted V chunks. Micro-batches
descend in the backwards, as in `torch.distributed.pipelining`. Bubble per worker (P - 1)(F + B) in chunk times, a V-th
of GPipe's; inner bubble (P - 1 - r)(F + B) on rank r; peak m V activations on every worker. With m < P both bubbles
grow by (V - 1)(P - m)(F + B): the first micro-batch is not back at rank 0 in time for its next chunk.
"""

from __future__ import annotations

from recycle.errors import ScheduleError
from recycle.ir.families.every_pipeline import every_pipeline
from recycle.ir.instruction import Backward, Forward, Instruction
from recycle.ir.schedule import Optimizer, Schedule
from recycle.job.shape import MicroBatch, Shape


def gpipe(shape: Shape, optimizer: Optimizer = "staggered") -> Schedule:
    """The compute-only GPipe schedule of `shape`. Raises ScheduleError when chunks > 1."""
    if shape.chunks != 1:
        raise ScheduleError(f"gpipe: needs chunks = 1, got {shape.chunks}")
    return _breadth_first(shape, "gpipe", optimizer, range(shape.micro_batches))


def looped_bfs(shape: Shape, optimizer: Optimizer = "staggered") -> Schedule:
    """The compute-only looped breadth-first schedule of `shape`. Every shape has one."""
    return _breadth_first(shape, "looped-bfs", optimizer, range(shape.micro_batches)[::-1])


def _breadth_first(shape: Shape, family: str, optimizer: Optimizer, backwards: range) -> Schedule:
    """The schedule with the micro-batches of the backwards in this order."""
    micro_batches = [MicroBatch(0, j) for j in range(shape.micro_batches)]
    programs = []
    for rank in range(shape.ranks):
        stages = range(rank, shape.stages, shape.ranks)
        forwards: list[Instruction] = [Forward(stage, j) for stage in stages for j in micro_batches]
        programs.append(forwards + [Backward(stage, micro_batches[j]) for stage in stages[::-1] for j in backwards])
    return every_pipeline(shape, programs, optimizer=optimizer, metadata={"family": family})
