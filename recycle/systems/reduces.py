"""In which order workers that host several stages reduce them, so that reduces run beside each other.

A reduce needs all hosts of its stage at once, and a worker takes part in one at a time. Where every worker reduces its
last stage first, as `lower` writes it, workers that share stages with different neighbours wait for each other in a
row from one end of the model to the other. Here a list scheduler sets the order: whenever hosts are free, the
stage begins whose busiest host has most left to reduce.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from recycle.ir.columns import columns_of
from recycle.ir.instruction import Instruction, OptimizerStep, ReduceGradients
from recycle.ir.schedule import Schedule
from recycle.shape import Worker


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
