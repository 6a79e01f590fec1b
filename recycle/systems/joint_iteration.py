"""An iteration of several pipelines that reduce together: who runs which micro-batches, in which order, until when.

Shares. A shape gives every pipeline the same m. Whose home a micro-batch has says nothing of who runs it, so unequal
shares need no other shape: there are D * m micro-batches in all, each pipeline runs its own first, and those that are
left over go to pipelines with more. Where the number of pipelines does not divide the batch, the shape has more of
them, and the workers of those that do not exist count as failed.

Stages. Where pipelines cut the model differently, a stage lies between two neighbouring cuts of any of them. A worker
of a shallow pipeline hosts several in a row, and runs their forwards, or backwards, one after the other.

Reduces. One needs all hosts of its stage at once, and a worker takes part in one at a time. Where every worker reduces
its last stage first, as `lower` writes it, workers that share stages with different neighbours wait for each other in a
row from one end of the model to the other. Here a list scheduler sets the order: whenever hosts are free, the stage
begins whose busiest host has most left to reduce.

Time. The pipelines only meet in their reduces, so each can be simulated by itself, once for all schedules that it
occurs in. What follows is what `simulate` does behind the last backward of a schedule with the barrier: each worker
reduces its stages in one order, a reduce begins when its last host is there, and when all are done each worker steps
its stages.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any

import numpy as np

from recycle.ir.event_graph import durations, earliest, event_graph
from recycle.ir.instruction import (
    Compute,
    Forward,
    Instruction,
    OptimizerStep,
    OverlappedPair,
    ReduceGradients,
    is_kind,
)
from recycle.ir.lower import add_transfers
from recycle.ir.schedule import Schedule
from recycle.job.profile import Profile
from recycle.job.shape import MicroBatch, Shape, Worker
from recycle.systems.setting import Split, ranges

WorkerTimes = tuple[float, tuple[int, ...]]
"""When a worker has computed, in seconds from the start; the stages that it hosts."""


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


def hosted(cut: Split, common: Split) -> Iterator[tuple[int, ...]]:
    """The stages of the common cut that each part of a pipeline consists of."""
    ends = list(accumulate(common))
    for begin, end in ranges(cut):
        yield tuple(stage for stage, at in enumerate(ends) if begin < at <= end)


def expanded(
    program: Sequence[Instruction], hosts: tuple[int, ...], micro_batches: Sequence[MicroBatch]
) -> Iterator[Instruction]:
    """A worker's program in the stages that it consists of: forwards downwards, backwards upwards.

    Args:
        program: compute-only, of a pipeline by itself, with as many micro-batches.
    """
    for compute in program:
        assert isinstance(compute, Compute)
        for stage in hosts if isinstance(compute, Forward) else hosts[::-1]:
            yield type(compute)(stage, micro_batches[compute.micro_batch.index])


def micro_batches_of(shape: Shape, shares: Sequence[int]) -> list[list[MicroBatch]]:
    """The micro-batches that each pipeline runs, in order: first its own, then what others have left.

    Args:
        shares: of each of the shape's first pipelines, which add up to all micro-batches.
    """
    m = shape.micro_batches
    kept = [min(share, m) for share in shares] + [0] * (shape.pipelines - len(shares))
    spare = (MicroBatch(k, j) for k in range(shape.pipelines) for j in range(kept[k], m))
    return [
        [MicroBatch(k, j) for j in range(kept[k])] + [next(spare) for _ in range(share - kept[k])]
        for k, share in enumerate(shares)
    ]


def reduce_order(hosted: Iterable[Iterable[int]], weights: Sequence[float]) -> tuple[int, ...]:
    """All stages, in the order in which their reduces begin.

    Args:
        hosted: the stages of each worker.
        weights: of each stage, in proportion to how long its reduce takes; above 0.
    """
    workers = list(dict.fromkeys(frozenset(stages) for stages in hosted))
    hosts = [[w for w, stages in enumerate(workers) if stage in stages] for stage in range(len(weights))]
    left = [sum(weights[stage] for stage in stages) for stages in workers]
    free, now = [0.0] * len(workers), 0.0
    waiting, order = set(range(len(weights))), []
    while waiting:
        for stage in sorted(waiting, key=lambda stage: (-max((left[w] for w in hosts[stage]), default=0.0), stage)):
            if all(free[w] <= now for w in hosts[stage]):
                order.append(stage)
                waiting.remove(stage)
                for w in hosts[stage]:
                    free[w] = now + weights[stage]
                    left[w] -= weights[stage]
        now = min((end for end in free if end > now), default=now)
    return tuple(order)


def joint_schedule(
    shape: Shape,
    programs: Mapping[Worker, Iterable[Instruction]],
    placement: tuple[tuple[int, ...], ...],
    weights: Sequence[float],
    **metadata: Any,
) -> Schedule:
    """An iteration with the barrier: these compute-only programs, each followed by the worker's reduces in
    `reduce_order` and its steps. Positions without a program count as failed."""
    hosted = {worker: placement[shape.worker_index(worker)] for worker in programs}
    order = reduce_order(hosted.values(), weights)
    whole: dict[Worker, list[Instruction]] = {}
    for worker, program in programs.items():
        own = [stage for stage in order if stage in hosted[worker]]
        whole[worker] = [*program, *map(ReduceGradients, own), *map(OptimizerStep, own)]
    return Schedule.build(
        shape,
        whole,
        placement=placement,
        failed=[worker for worker in shape.workers() if worker not in whole],
        optimizer="barrier",
        metadata=metadata,
    )


def computed(schedule: Schedule, profile: Profile) -> list[WorkerTimes]:
    """When each live worker has computed its part of one iteration, and what it hosts; by worker.

    Args:
        schedule: compute-only, valid.
    """
    graph = event_graph(add_transfers(schedule)[0])
    c, nodes = graph.schedule.columns, graph.dependencies.nodes
    seconds = np.zeros(nodes)
    seconds[: len(c)] = durations(graph.schedule, profile)
    start, _ = earliest(graph.order, graph.offsets, graph.sources, seconds, np.zeros(nodes))
    end = np.where(is_kind(c.kind, (Compute, OverlappedPair)), (start + seconds)[: len(c)], 0.0)
    found = []
    for worker in schedule.live:
        w = schedule.shape.worker_index(worker)
        last = float(end[c.offsets[w] : c.offsets[w + 1]].max(initial=0.0))
        found.append((last, schedule.stages_of(worker)))
    return found


def synchronised(workers: Sequence[WorkerTimes], profile: Profile, weights: Sequence[float]) -> float:
    """Seconds of the iteration, its reduces and steps included.

    Args:
        workers: of all pipelines.
        profile: of the stages.
        weights: of each stage, for `reduce_order`.
    """
    reduce, step = (profile.per_stage(name, len(weights)) for name in ("reduce", "step"))
    ends, hosts = [end for end, _ in workers], [list[int]() for _ in weights]
    for worker, (_, stages) in enumerate(workers):
        for stage in stages:
            hosts[stage].append(worker)
    for stage in reduce_order((stages for _, stages in workers), weights):
        done = max(ends[worker] for worker in hosts[stage]) + reduce[stage]
        for worker in hosts[stage]:
            ends[worker] = done
    return max(ends) + max(sum(step[stage] for stage in stages) for _, stages in workers)
