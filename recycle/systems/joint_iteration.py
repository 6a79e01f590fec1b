"""An iteration of several pipelines with joint reduces: hosts, order and times of all micro-batches.

Shares. Each pipeline runs its own micro-batches first, and pipelines with larger shares run the remaining ones. If the
number of pipelines does not divide the batch, the shape has more pipelines, whose workers count as failed.

Reduces. A reduce needs all hosts of its stage at once. Among stages with free hosts, the one whose busiest host has
most left to reduce begins. Reducing every worker's last stage first, as `lower` does, would make a chain of waits.

Time. Pipelines meet only in their reduces, so each is simulated once for all schedules that contain it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any

import numpy as np

from recycle.ir.event_graph import event_graph
from recycle.ir.instruction import Compute, Forward, Instruction, OptimizerStep, ReduceGradients, is_kind
from recycle.ir.lower import add_transfers
from recycle.ir.schedule import Schedule
from recycle.ir.simulate import time_graph
from recycle.job.profile import Profile
from recycle.job.shape import MicroBatch, Shape, Worker
from recycle.systems.scenario import Split, ranges

WorkerTimes = tuple[float, tuple[int, ...]]
"""(compute time of a worker in seconds from the start, stages that it hosts)."""


def smallest_shape(pipelines: int, ranks: int, micro_batches: int, chunks: int = 1) -> Shape:
    """Return the shape with the fewest pipelines, at least `pipelines`, and `micro_batches` in all.

    Raises:
        JobError: there are more pipelines than micro-batches.
    """
    homes = next((d for d in range(pipelines, micro_batches + 1) if micro_batches % d == 0), pipelines)
    return Shape(homes, ranks, micro_batches // homes, chunks)


def even_shares(micro_batches: int, pipelines: int) -> list[int]:
    """Return shares that differ by at most one, the larger ones first."""
    return [micro_batches // pipelines + (k < micro_batches % pipelines) for k in range(pipelines)]


def hosted_stages(cut: Split, common: Split) -> Iterator[tuple[int, ...]]:
    ends = list(accumulate(common))
    for begin, end in ranges(cut):
        yield tuple(stage for stage, at in enumerate(ends) if begin < at <= end)


def expand_program(
    program: Sequence[Instruction], hosts: tuple[int, ...], micro_batches: Sequence[MicroBatch]
) -> Iterator[Instruction]:
    """Yield a pipeline's compute-only program over the stages of a worker: forwards ascending, backwards descending."""
    for compute in program:
        assert isinstance(compute, Compute)
        for stage in hosts if isinstance(compute, Forward) else hosts[::-1]:
            yield type(compute)(stage, micro_batches[compute.micro_batch.index])


def assign_micro_batches(shape: Shape, shares: Sequence[int]) -> list[list[MicroBatch]]:
    """Return the micro-batches of each pipeline, given their numbers: first its own, then remaining ones."""
    m = shape.micro_batches
    kept = [min(share, m) for share in shares] + [0] * (shape.pipelines - len(shares))
    spare = (MicroBatch(k, j) for k in range(shape.pipelines) for j in range(kept[k], m))
    return [
        [MicroBatch(k, j) for j in range(kept[k])] + [next(spare) for _ in range(share - kept[k])]
        for k, share in enumerate(shares)
    ]


def reduce_order(hosted: Iterable[Iterable[int]], weights: Sequence[float]) -> tuple[int, ...]:
    """Return all stages in the order of their reduces, given the stages of each worker and relative durations."""
    workers = list(dict.fromkeys(frozenset(stages) for stages in hosted))
    hosts = [[w for w, stages in enumerate(workers) if stage in stages] for stage in range(len(weights))]
    remaining = [sum(weights[stage] for stage in stages) for stages in workers]
    free, now = [0.0] * len(workers), 0.0
    waiting, order = set(range(len(weights))), []
    while waiting:
        for stage in sorted(
            waiting, key=lambda stage: (-max((remaining[w] for w in hosts[stage]), default=0.0), stage)
        ):
            if all(free[w] <= now for w in hosts[stage]):
                order.append(stage)
                waiting.remove(stage)
                for w in hosts[stage]:
                    free[w] = now + weights[stage]
                    remaining[w] -= weights[stage]
        now = min((end for end in free if end > now), default=now)
    return tuple(order)


def joint_schedule(
    shape: Shape,
    programs: Mapping[Worker, Iterable[Instruction]],
    placement: tuple[tuple[int, ...], ...],
    weights: Sequence[float],
    **metadata: Any,
) -> Schedule:
    """Return an iteration with the barrier: compute-only programs, then reduces in `reduce_order` and steps.

    Positions without a program count as failed.
    """
    hosted = {worker: placement[shape.worker_index(worker)] for worker in programs}
    order = reduce_order(hosted.values(), weights)
    full_programs: dict[Worker, list[Instruction]] = {}
    for worker, program in programs.items():
        own = [stage for stage in order if stage in hosted[worker]]
        full_programs[worker] = [*program, *map(ReduceGradients, own), *map(OptimizerStep, own)]
    return Schedule.build(
        shape,
        full_programs,
        placement=placement,
        failed=[worker for worker in shape.workers() if worker not in full_programs],
        optimizer="barrier",
        metadata=metadata,
    )


def worker_times(schedule: Schedule, profile: Profile) -> list[WorkerTimes]:
    """Return each live worker's compute time in one iteration of a compute-only schedule, and its stages."""
    timeline = time_graph(event_graph(add_transfers(schedule)[0]), profile)
    c = timeline.schedule.columns
    end = np.where(is_kind(c.kind, Compute), timeline.end, 0.0)
    times = []
    for worker in schedule.live:
        w = schedule.shape.worker_index(worker)
        last = float(end[c.offsets[w] : c.offsets[w + 1]].max(initial=0.0))
        times.append((last, schedule.stages_of(worker)))
    return times


def iteration_seconds(workers: Sequence[WorkerTimes], profile: Profile, weights: Sequence[float]) -> float:
    """Return the seconds of the iteration, including reduces in `reduce_order` and steps."""
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
