"""A lowered schedule as a graph ready to be timed, and its times.

Compute rows occupy their worker in program order, sends occupy the lane of their directed pair, receives take no time.
Where a stage's gradients are reduced in N buckets, each takes the latency of a reduce and an N-th of its rest, and each
part of a W an N-th of the W; the sums of a worker follow each other, beside its computing but for REDUCE_GRAD.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt

from recycle.ir.columns import (
    Columns,
    Floats,
    Rows,
    compute_before,
    compute_chains,
    compute_order,
    consecutive,
    lane_chains,
    serial_chains,
    sum_chains,
)
from recycle.ir.dependencies import Cause, Dependencies, dependencies
from recycle.ir.graph import Ranked, Repeats, group_edges, ranked, repeats, topological_order
from recycle.ir.instruction import (
    KIND_CLASSES,
    Backward,
    Compute,
    Forward,
    OverlappedPair,
    Part,
    ReduceBucket,
    ReduceGradients,
    Send,
    SendGradient,
    is_kind,
)
from recycle.ir.lower import lower_with_origin
from recycle.ir.schedule import Schedule
from recycle.job.profile import Profile


@dataclass(frozen=True)
class EventGraph:
    """A lowered schedule as a graph ready to be timed: dependencies, program order and lane order together.

    Attributes:
        schedule: the lowered schedule.
        dependencies: its dependency graph.
        offsets, sources: CSR of predecessors of each node.
        order: topological order; shorter than the number of nodes when there is a cycle.
        serialised: each worker carries one transfer at a time.
        origin: for each row the row it had before lowering, -1 where lowering added it; None where that is not known.
    """

    schedule: Schedule
    dependencies: Dependencies
    offsets: Rows
    sources: Rows
    order: Rows
    serialised: bool
    origin: Rows | None = None

    @property
    def is_acyclic(self) -> bool:
        return len(self.order) == self.dependencies.nodes

    @property
    def edges(self) -> tuple[Rows, Rows]:
        """(source, target) of all edges, by target."""
        return self.sources, np.repeat(np.arange(self.dependencies.nodes), np.diff(self.offsets))

    @cached_property
    def ranked(self) -> Ranked:
        """The graph by the place of its nodes in `order`; of an acyclic one."""
        return ranked(self.order, self.offsets, self.sources)

    @cached_property
    def repeats(self) -> Repeats:
        """What leads from one iteration into the next, by place as in `ranked`."""
        columns, within, place = self.schedule.columns, self.dependencies, self.ranked.place
        chains = [compute_chains(columns), lane_chains(columns)]
        if self.serialised:
            chains.append(serial_chains(columns, within.sends))
        placed = [(chain, place[rows]) for chain, rows in chains]
        return repeats(place[within.carried_source], place[within.carried_target], placed)


def event_edges(
    columns: Columns, graph: Dependencies, serialised: bool = False
) -> tuple[Rows, Rows, npt.NDArray[np.uint8]]:
    """(source, target, `Cause`) of all that a lowered schedule waits for: dependencies, program order, lane order.

    Args:
        graph: the schedule's dependencies.
        serialised: each worker carries one transfer at a time, unbuffered, in program order (one NCCL stream).
    """
    ordered = compute_order(columns)
    before = compute_before(columns)
    extra = [
        (ordered, Cause.ORDER),
        (consecutive(lane_chains(columns)), Cause.LANE),
        (_arrivals(graph, columns, before), Cause.REDUCE),
    ]
    begins = np.flatnonzero(columns.kind == ReduceBucket.kind)
    if len(begins):
        sums = consecutive(sum_chains(columns))
        sum_before = np.full(len(columns), -1, dtype=np.int64)
        sum_before[sums[1]] = sums[0]
        begins = begins[before[begins] >= 0]
        extra += [
            ((before[begins], begins), Cause.ORDER),
            (sums, Cause.LANE),
            (_arrivals(graph, columns, sum_before), Cause.LANE),
        ]
    if serialised:
        extra.append((consecutive(serial_chains(columns, graph.sends)), Cause.LANE))
    return (
        np.concatenate([graph.source, *(edges[0] for edges, _ in extra)]),
        np.concatenate([graph.target, *(edges[1] for edges, _ in extra)]),
        np.concatenate([graph.cause, *(np.full(len(edges[0]), cause, np.uint8) for edges, cause in extra)]),
    )


def event_graph(schedule: Schedule, serialised: bool = False, graph: Dependencies | None = None) -> EventGraph:
    """The event graph of a lowered schedule.

    Args:
        serialised: as in `event_edges`.
        graph: the schedule's dependencies where they are known already.
    """
    graph = graph or dependencies(schedule)
    source, target, _ = event_edges(schedule.columns, graph, serialised)
    offsets, sources = group_edges(source, target, graph.nodes)
    order = topological_order(source, target, graph.nodes)
    return EventGraph(schedule, graph, offsets, sources, order, serialised)


def lowered_graph(schedule: Schedule, serialised: bool = False) -> EventGraph:
    """The event graph of a schedule as `lower` writes it out, for who simulates and checks the same schedule.

    Args:
        schedule: lowered or compute-only.
        serialised: as in `event_edges`.
    """
    lowered, origin = lower_with_origin(schedule)
    return replace(event_graph(lowered, serialised), origin=origin)


def _arrivals(graph: Dependencies, columns: Columns, row_before: Rows) -> tuple[Rows, Rows]:
    """A reduce is collective: it begins when the last host arrives at it, so its joins wait for what is before it.

    Tied stages reduce as one: a worker that hosts several of them arrives at the group's join with the first of its
    reduces, also where nothing stands before that one.

    Args:
        row_before: for each row the one before it on its worker, -1 for none.
    """
    out = graph.out_of_joins
    out = out[is_kind(columns.kind[graph.target[out]], (ReduceGradients, ReduceBucket))]
    join, reduce = graph.source[out], graph.target[out]
    by_row = np.argsort(reduce, kind="stable")
    join, reduce = join[by_row], reduce[by_row]
    arrival = np.unique(columns.worker[reduce].astype(np.int64) * graph.nodes + join, return_index=True)[1]
    source, target = row_before[reduce[arrival]], join[arrival]
    return source[source >= 0], target[source >= 0]


@np.errstate(over="ignore")  # who adds the times up refuses what is beyond all bounds
def durations(schedule: Schedule, profile: Profile) -> Floats:
    """Seconds of each row of a schedule; a receive takes none, its send takes the whole transfer.

    Raises:
        JobError: a list of the profile has not one entry per stage, or a link lies outside the schedule's shape.
    """
    c, stages = schedule.columns, schedule.shape.stages
    cost = np.zeros((len(KIND_CLASSES), stages))
    for cls in KIND_CLASSES:
        for name in cls.row.seconds:
            cost[cls.kind] += profile.per_stage(name, stages)
    stage = np.clip(c.stage, 0, stages - 1)
    seconds: Floats = cost[c.kind, stage]
    pair = np.flatnonzero(c.kind == OverlappedPair.kind)
    if profile.overlapped_pair is not None:
        seconds[pair] = np.array(profile.per_stage("overlapped_pair", stages))[stage[pair]]
    else:
        backward = cost[Backward.kind, np.clip(c.stage2[pair], 0, stages - 1)]
        seconds[pair] = cost[Forward.kind, stage[pair]] + backward
    if schedule.buckets > 1:
        seconds[is_kind(c.kind, Part)] /= schedule.buckets
        sums = is_kind(c.kind, (ReduceBucket, ReduceGradients))
        seconds[sums] = np.array(profile.bucket_seconds(schedule.buckets, stages))[stage[sums]]
    if profile.speed:
        speed = np.array([profile.speed_of(worker) for worker in schedule.shape.workers()])
        compute = is_kind(c.kind, (Compute, OverlappedPair))
        seconds = np.where(compute, seconds * speed[c.worker], seconds)
    sends = np.flatnonzero(is_kind(c.kind, Send))
    boundary = stage[sends] - (c.kind[sends] == SendGradient.kind)  # a gradient goes back over the boundary before
    seconds[sends] = profile.transfer_seconds(schedule.shape, c.worker[sends], c.peer[sends], boundary)
    return seconds


@dataclass(frozen=True, eq=False)
class Times:
    """When the rows of a lowered schedule run.

    Attributes:
        schedule: the lowered schedule that was timed.
        profile: what it was timed with.
        start, end: seconds per row of `schedule.columns`; of a send: when its transfer is under way.
        last: for each row, then each join, the node it waited for last, -1 if none.
        dependencies: what each row needs.
    """

    schedule: Schedule
    profile: Profile
    start: Floats
    end: Floats
    last: Rows
    dependencies: Dependencies

    @cached_property
    def makespan(self) -> float:
        """Last end minus first start of one iteration from idle."""
        return float(self.end.max() - self.start.min()) if len(self.end) else 0.0
