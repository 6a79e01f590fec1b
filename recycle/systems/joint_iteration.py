"""An iteration of several pipelines that reduce together: who runs which micro-batches, in which order, until when.

Shares. A shape gives every pipeline the same m. Whose home a micro-batch has says nothing of who runs it, so unequal
shares need no other shape: there are D * m micro-batches in all, each pipeline runs its own first, and those that are
left over go to pipelines with more. Where the number of pipelines does not divide the batch, the shape has more of
them, and the workers of those that do not exist count as failed.

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

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import numpy as np

from recycle.ir.columns import columns_of
from recycle.ir.event_graph import durations, event_graph
from recycle.ir.graph import earliest
from recycle.ir.instruction import Compute, Instruction, OptimizerStep, OverlappedPair, ReduceGradients, is_kind
from recycle.ir.lower import add_transfers
from recycle.ir.schedule import Schedule
from recycle.profile import Profile
from recycle.shape import Shape, Worker

WorkerTimes = tuple[float, tuple[int, ...]]
"""When a worker has computed, in seconds from the start; the stages that it hosts."""
SETTLED = 5
TOLERANCE = 1e-9
"""Relative, of the time of the slowest stage."""


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


def with_updates(schedule: Schedule, weights: Sequence[float]) -> Schedule:
    """The compute-only schedule with each worker's reduces, in `reduce_order`, and then its steps."""
    live = {worker: schedule.stages_of(worker) for worker in schedule.live}
    order = reduce_order(live.values(), weights)
    programs: dict[Worker, list[Instruction]] = {}
    for worker, stages in live.items():
        mine = [stage for stage in order if stage in stages]
        updates: list[Instruction] = [*map(ReduceGradients, mine), *map(OptimizerStep, mine)]
        programs[worker] = [*schedule.program(worker), *updates]
    return replace(schedule, columns=columns_of(schedule.shape, programs))


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


def ends_of_1f1b(simulated: Callable[[int], list[float]], slowest: float, micro_batches: int) -> list[float]:
    """When each worker of a 1F1B pipeline has computed any number of micro-batches, from simulations of a few.

    Behind its warm-up a pipeline takes one more slowest stage per micro-batch. Whether it has come to that is looked up
    in the simulations themselves: from 5 S micro-batches on, if the last one and the last S of them took just that for
    every worker. Where they did not (links that take longer than stages), all is simulated.

    Args:
        simulated: the same for a number of micro-batches; one entry per stage.
        slowest: seconds of the slowest stage per micro-batch.
    """
    stages = len(simulated(1))
    known = SETTLED * stages
    if micro_batches <= known:
        return simulated(micro_batches)
    last = simulated(known)
    for back in (1, stages):
        steps = (now - before for now, before in zip(last, simulated(known - back), strict=True))
        if any(abs(step - back * slowest) > TOLERANCE * back * slowest for step in steps):
            return simulated(micro_batches)
    return [end + (micro_batches - known) * slowest for end in last]


def synchronised(
    workers: Iterable[WorkerTimes], reduce: Sequence[float], step: Sequence[float], order: Iterable[int]
) -> float:
    """Seconds of the iteration, its reduces and steps included.

    Args:
        workers: of all pipelines.
        reduce, step: seconds of each stage.
        order: of the stages, in which every worker reduces those that it hosts.
    """
    ends, hosts = [], [list[int]() for _ in reduce]
    steps = 0.0
    for worker, (end, stages) in enumerate(workers):
        ends.append(end)
        steps = max(steps, sum(step[stage] for stage in stages))
        for stage in stages:
            hosts[stage].append(worker)
    for stage in order:
        done = max(ends[worker] for worker in hosts[stage]) + reduce[stage]
        for worker in hosts[stage]:
            ends[worker] = done
    return max(ends) + steps
