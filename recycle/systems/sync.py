"""When an iteration of pipelines that reduce together ends, from when each of their workers has computed.

The pipelines of one schedule only meet in their reduces, so each can be simulated by itself, once for all schedules
that it occurs in. What follows is what `simulate` does behind the last backward of a schedule with the barrier: each
worker reduces its stages in one order, a reduce begins when its last host is there, and when all are done each worker
steps its stages.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from recycle.ir.graph import earliest
from recycle.ir.instruction import Compute, OverlappedPair, is_kind
from recycle.ir.lower import add_transfers
from recycle.ir.schedule import Schedule
from recycle.ir.simulate import durations, event_graph
from recycle.profile import Profile

Computed = tuple[float, tuple[int, ...]]
"""When a worker has computed, in seconds from the start; the stages that it hosts."""


def computed(schedule: Schedule, profile: Profile) -> list[Computed]:
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


def synchronised(
    workers: Iterable[Computed], reduce: Sequence[float], step: Sequence[float], order: Iterable[int]
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
