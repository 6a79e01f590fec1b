"""The event graph of a lowered schedule: nodes, edges, durations, earliest times and the steady-state period.

Compute rows occupy their worker in program order. A send occupies the lane of its directed worker pair; a receive takes
no time. Copies to and from the host occupy a lane per worker and direction: OFFLOAD begins after its forward and ends
before the worker's next instruction, RELOAD begins after the instruction before it. With N buckets, each sum takes the
latency of a reduce and an N-th of the rest, and each W part an N-th of the W. The sums of one worker follow each other
and overlap its compute, except REDUCE_GRAD.

The period is the time between two iterations in steady state: the largest mean of a cycle through the edges into the
next iteration, which is the eigenvalue of the max-plus matrix of the repeated schedule (see `period_of`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from recycle.ir.columns import (
    Columns,
    Floats,
    Ints,
    Rows,
    chain_ends,
    compute_chains,
    compute_order,
    consecutive,
    lane_chains,
    offsets_of,
    program_chains,
    rows_before,
)
from recycle.ir.communicators import lanes_of, share_communicators, shared_chains
from recycle.ir.compiled import COMPILE_FROM, load, run
from recycle.ir.dependencies import Cause, Dependencies, dependencies
from recycle.ir.instruction import (
    KIND_CLASSES,
    AsyncInstruction,
    Backward,
    Compute,
    Forward,
    HostCopy,
    Offload,
    OverlappedPair,
    Part,
    ReduceBucket,
    ReduceGradients,
    Send,
    SendGradient,
    is_kind,
)
from recycle.ir.kinds import Codes
from recycle.ir.memory import TOLERANCE
from recycle.ir.schedule import Schedule
from recycle.job.profile import Profile


def group_edges(values: Rows, keys: Rows, nodes: int) -> tuple[Rows, Rows]:
    """Group values by key as CSR: (offsets, values sorted by key). The sort is stable."""
    offsets = offsets_of(keys, nodes)
    if len(values) < COMPILE_FROM:
        return offsets, values[np.argsort(keys, kind="stable")]
    *_, grouped = run(_place, len(values), values, keys, offsets[:-1].copy(), np.empty(len(values), dtype=np.int64))
    return offsets, np.asarray(grouped, dtype=np.int64)


def _place(values: Any, keys: Any, free: Any, grouped: Any) -> None:
    for i in range(len(values)):
        key = keys[i]
        grouped[free[key]] = values[i]
        free[key] += 1


def topological_order(source: Rows, target: Rows, nodes: int) -> Rows:
    """Return the nodes in topological order. Nodes on a cycle, or reachable from a cycle, are left out."""
    offsets, targets = group_edges(target, source, nodes)
    waiting, order = np.bincount(target, minlength=nodes), np.empty(nodes, dtype=np.int64)
    done, *_, order = run(_topological_order, nodes, offsets, targets, waiting, order)
    return np.asarray(order[:done], dtype=np.int64)


def earliest(order: Rows, offsets: Rows, sources: Rows, seconds: Floats, release: Floats) -> tuple[Floats, Rows]:
    """Return (earliest start of each node in seconds, predecessor that decides it or -1).

    Args:
        order: topological order of the nodes.
        offsets, sources: CSR of predecessors.
        seconds, release: duration and earliest allowed start of each node.
    """
    graph = ranked(order, offsets, sources)
    return graph.by_node(*earliest_ranked(graph, seconds[order], release[order]), release)


class Ranked(NamedTuple):
    """A graph with nodes numbered by their place in a topological order.

    `order` and `place` convert between places and nodes; `offsets`, `sources` are CSR of predecessors, by place, int32.
    """

    order: Rows
    place: Rows
    offsets: Ints
    sources: Ints

    def by_node(self, start: Floats, last: Rows, release: Floats) -> tuple[Floats, Rows]:
        """Convert the result of `earliest_ranked` to node numbers. Nodes without a place start at their release."""
        starts, lasts = release.copy(), np.full(len(release), -1, dtype=np.int64)
        starts[self.order], lasts[self.order] = start, np.where(last >= 0, self.order[last], -1)
        return starts, lasts


def ranked(order: Rows, offsets: Rows, sources: Rows) -> Ranked:
    """Renumber a graph by `order`. The arguments are as in `earliest`."""
    place = np.empty(len(offsets) - 1, dtype=np.int64)
    place[order] = np.arange(len(order))
    count = np.diff(offsets)[order]
    begin = np.concatenate([[0], np.cumsum(count)])
    edges = np.arange(begin[-1]) + np.repeat(offsets[order] - begin[:-1], count)
    return Ranked(order, place, begin.astype(np.int32), place[sources[edges]].astype(np.int32))


def earliest_ranked(graph: Ranked, seconds: Floats, release: Floats) -> tuple[Floats, Rows]:
    """Compute `earliest` with all arrays indexed by place."""
    start, last = release.copy(), np.full(len(release), -1, dtype=np.int64)
    *_, start, last = run(_earliest_ranked, len(release), graph.offsets, graph.sources, seconds, start, last)
    return np.asarray(start, dtype=np.float64), np.asarray(last, dtype=np.int64)


def _topological_order(offsets: Any, targets: Any, waiting: Any, order: Any) -> int:
    done = 0
    for node in range(len(waiting)):
        if waiting[node] == 0:
            order[done] = node
            done += 1
    head = 0
    while head < done:
        node = order[head]
        head += 1
        for edge in range(offsets[node], offsets[node + 1]):
            target = targets[edge]
            waiting[target] -= 1
            if waiting[target] == 0:
                order[done] = target
                done += 1
    return done


def _earliest_ranked(offsets: Any, sources: Any, seconds: Any, start: Any, last: Any) -> None:
    for place in range(len(start)):
        begin = start[place]
        for edge in range(offsets[place], offsets[place + 1]):
            source = sources[edge]
            ready = start[source] + seconds[source]
            if ready > begin:
                begin = ready
                last[place] = source
        start[place] = begin


def load_compiled() -> None:
    """Load the compiled loops, before a caller times hundreds of small graphs."""
    load(_topological_order, _earliest_ranked, _place)


def compile_all() -> None:
    """Compile all loops by calls with the argument types in use."""
    load_compiled()
    source, target, seconds = np.array([0]), np.array([1]), np.zeros(2)
    order = topological_order(source, target, 2)
    offsets, sources = group_edges(source, target, 2)
    run(_place, 1, source, target, offsets[:-1].copy(), np.empty(1, dtype=np.int64))
    earliest(order, offsets, sources, seconds, seconds)


class Repeats(NamedTuple):
    """Edges from one iteration into the next, and the chains of workers and lanes.

    Attributes:
        source, target: the edges, sorted by target.
        targets, first: each target once, and the index of its first edge.
        chains: (chain, node) of workers and lanes, sorted by chain, then order.
    """

    source: Rows
    target: Rows
    targets: Rows
    first: Rows
    chains: Sequence[tuple[Rows, Rows]]


def repeats(carried_source: Rows, carried_target: Rows, chains: Sequence[tuple[Rows, Rows]]) -> Repeats:
    """Collect the carried dependencies and an edge from the last to the first node of each chain."""
    firsts, lasts = zip(*(chain_ends(chain) for chain in chains), strict=True)
    source = np.concatenate([carried_source, *lasts])
    target = np.concatenate([carried_target, *firsts])
    by_target = np.argsort(target, kind="stable")
    target = target[by_target]
    first = np.flatnonzero(np.diff(target, prepend=-1))
    return Repeats(source[by_target], target, target[first], first, chains)


def period_of(graph: Ranked, edges: Repeats, seconds: Floats, start: Floats, last: Rows) -> float:
    """Compute the largest cycle mean of the repeated schedule, in seconds.

    Starting from the load of the busiest worker or lane, iterations are released one period apart. If the releases
    settle, the bound is the period. Otherwise the critical path to a growing release runs around a longer cycle, whose
    mean is the next bound. `start` and `last` are the result of `earliest_ranked` for one iteration from idle.
    """
    released = np.zeros(len(seconds))
    tolerance = float((start + seconds).max(initial=0.0)) * TOLERANCE
    if not tolerance:
        return 0.0
    best = _busiest(edges, seconds)
    history: list[tuple[Rows, Rows]] = []
    while True:
        ready = start[edges.source] + seconds[edges.source] - best
        following = np.maximum.reduceat(ready, edges.first) if len(ready) else ready
        moved = following > released[edges.targets] + tolerance
        if not moved.any():
            return best
        latest = np.zeros(len(seconds))
        latest[edges.targets[moved]] = following[moved]
        decides = np.full(len(seconds), -1, dtype=np.int64)
        chosen = np.flatnonzero((latest[edges.target] > 0) & (ready >= latest[edges.target]))
        decides[edges.target[chosen]] = edges.source[chosen]
        released[edges.targets[moved]] = following[moved]
        history.append((last, decides))
        longer = _cycle_mean(history, seconds, int(latest.argmax()))
        if longer > best:
            best = longer
            history.clear()
            released = np.zeros(len(seconds))
        start, last = earliest_ranked(graph, seconds, released)


def _busiest(edges: Repeats, seconds: Floats) -> float:
    longest = 0.0
    for chain, nodes in edges.chains:
        if len(nodes):
            taken = seconds[nodes]
            bounds = np.flatnonzero(np.diff(chain, prepend=-1, append=-1))
            most = int(np.add.reduceat(taken, bounds[:-1]).argmax())
            longest = max(longest, math.fsum(taken[bounds[most] : bounds[most + 1]].tolist()))
    return longest


def _cycle_mean(history: list[tuple[Rows, Rows]], seconds: Floats, node: int) -> float:
    seen: dict[int, tuple[int, int]] = {}
    path: list[int] = []
    for iteration in range(len(history) - 1, -1, -1):
        last, decides = history[iteration]
        if node in seen:
            later, begin = seen[node]
            return math.fsum(seconds[path[begin:]].tolist()) / (later - iteration)
        seen[node] = iteration, len(path)
        node, previous = decides.item(node), last.item  # quicker than an index
        if node < 0:
            return 0.0
        while node >= 0:
            path.append(node)
            node = previous(node)
        node = path[-1]
    return 0.0


@dataclass(frozen=True)
class EventGraph:
    """A lowered schedule with its dependencies, program order and lane order as one graph.

    Attributes:
        offsets, sources: CSR of predecessors of each node.
        order: topological order; shorter than the number of nodes if the graph has a cycle.
        shared: chains of transfers that wait for each other, beyond those of a lane (see `event_edges`); None for none.
        origin: row before lowering of each row, -1 for rows that lowering added; None if unknown.
    """

    schedule: Schedule
    dependencies: Dependencies
    offsets: Rows
    sources: Rows
    order: Rows
    shared: tuple[Rows, Rows] | None
    origin: Rows | None = None

    @property
    def is_acyclic(self) -> bool:
        return len(self.order) == self.dependencies.nodes

    @property
    def edges(self) -> tuple[Rows, Rows]:
        """(source, target) of all edges, sorted by target."""
        return self.sources, np.repeat(np.arange(self.dependencies.nodes), np.diff(self.offsets))

    @cached_property
    def ranked(self) -> Ranked:
        """The graph indexed by place in `order`. Requires an acyclic graph."""
        return ranked(self.order, self.offsets, self.sources)

    @cached_property
    def repeats(self) -> Repeats:
        """The edges into the next iteration, indexed by place as in `ranked`."""
        columns, within, place = self.schedule.columns, self.dependencies, self.ranked.place
        chains = [compute_chains(columns), lane_chains(columns)]
        if self.shared is not None:
            chains.append(self.shared)
        placed = [(chain, place[rows]) for chain, rows in chains]
        return repeats(place[within.carried_source], place[within.carried_target], placed)


def event_edges(
    columns: Columns, graph: Dependencies, shared: tuple[Rows, Rows] | None = None
) -> tuple[Rows, Rows, Codes]:
    """Return (source, target, `Cause`) of all edges: dependencies, program order and lane order.

    The transfers of a chain of `shared` follow each other at one of their ends, unbuffered and in program order.
    """
    before = rows_before(columns, ~is_kind(columns.kind, AsyncInstruction))
    extra = [
        (compute_order(columns), Cause.ORDER),
        (consecutive(lane_chains(columns)), Cause.LANE),
        (_arrivals(graph, columns, before), Cause.REDUCE),
    ]
    copies = is_kind(columns.kind, HostCopy)
    if copies.any():
        # What follows an OFFLOAD may use its memory; a RELOAD uses memory that is free after the compute before it.
        is_offload, is_async = columns.kind == Offload.kind, is_kind(columns.kind, AsyncInstruction)
        last = rows_before(columns, is_offload)
        user = np.flatnonzero((last > before) & (~is_async | copies & ~is_offload))
        back = np.flatnonzero((before >= 0) & copies & ~is_offload)
        extra += [((last[user], user), Cause.ORDER), ((before[back], back), Cause.ORDER)]
    begins = np.flatnonzero(columns.kind == ReduceBucket.kind)
    if len(begins):
        sums = is_kind(columns.kind, (ReduceBucket, ReduceGradients))  # the sums of one worker are serial
        begins = begins[before[begins] >= 0]
        extra += [
            ((before[begins], begins), Cause.ORDER),
            (consecutive(program_chains(columns, sums)), Cause.LANE),
            (_arrivals(graph, columns, rows_before(columns, sums)), Cause.LANE),
        ]
    if shared is not None:
        extra.append((consecutive(shared), Cause.LANE))
    return (
        np.concatenate([graph.source, *(edges[0] for edges, _ in extra)]),
        np.concatenate([graph.target, *(edges[1] for edges, _ in extra)]),
        np.concatenate([graph.cause, *(np.full(len(edges[0]), cause, np.uint8) for edges, cause in extra)]),
    )


def event_graph(
    schedule: Schedule, serialised: bool = False, graph: Dependencies | None = None, shared: bool = False
) -> EventGraph:
    """Build the event graph of a lowered schedule, from its dependencies `graph` if known. See `event_edges`.

    If `serialised`, each worker carries one transfer at a time (one NCCL stream); if `shared`, one per communicator.
    """
    graph = graph or dependencies(schedule)
    chains = None
    if serialised:
        chains = shared_chains(schedule, graph.sends, [lanes_of(schedule)])
    elif shared:
        communicators = share_communicators(lanes_of(schedule))
        chains = shared_chains(schedule, graph.sends, [lanes for lanes in communicators if len(lanes) > 1])
    source, target, _ = event_edges(schedule.columns, graph, chains)
    offsets, sources = group_edges(source, target, graph.nodes)
    order = topological_order(source, target, graph.nodes)
    return EventGraph(schedule, graph, offsets, sources, order, chains)


def _arrivals(graph: Dependencies, columns: Columns, row_before: Rows) -> tuple[Rows, Rows]:
    """Return edges from the row before each reduce to its join, since a reduce begins when the last host arrives.

    A worker with several tied stages arrives with its first reduce of the group, even if no row precedes that reduce.
    """
    out = graph.out_of_joins
    out = out[is_kind(columns.kind[graph.target[out]], (ReduceGradients, ReduceBucket))]
    join, reduce = graph.source[out], graph.target[out]
    by_row = np.argsort(reduce, kind="stable")
    join, reduce = join[by_row], reduce[by_row]
    arrival = np.unique(columns.worker[reduce].astype(np.int64) * graph.nodes + join, return_index=True)[1]
    source, target = row_before[reduce[arrival]], join[arrival]
    return source[source >= 0], target[source >= 0]


@np.errstate(over="ignore")  # callers reject infinite sums of times
def durations(schedule: Schedule, profile: Profile) -> Floats:
    """Compute the duration of each row in seconds. A receive takes none; its send takes the whole transfer.

    Raises:
        JobError: a per-stage list of the profile has the wrong length, or a link lies outside the shape.
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
        compute = is_kind(c.kind, (Compute, OverlappedPair)) & ~is_kind(c.kind, HostCopy)
        seconds = np.where(compute, seconds * speed[c.worker], seconds)
    sends = np.flatnonzero(is_kind(c.kind, Send))
    boundary = stage[sends] - (c.kind[sends] == SendGradient.kind)  # gradients cross the boundary before the stage
    seconds[sends] = profile.transfer_seconds(schedule.shape, c.worker[sends], c.peer[sends], boundary)
    return seconds


@dataclass(frozen=True, eq=False)
class Times:
    """Start and end times of the rows of a lowered schedule, simulated with `profile`.

    Attributes:
        start, end: seconds per row of `schedule.columns`; for a send, the span of its transfer.
        last: predecessor that decided the start of each row, then of each join; -1 without one.
    """

    schedule: Schedule
    profile: Profile
    start: Floats
    end: Floats
    last: Rows
    dependencies: Dependencies

    @cached_property
    def makespan(self) -> float:
        """Seconds from the first start to the last end of one iteration from idle."""
        return float(self.end.max() - self.start.min()) if len(self.end) else 0.0
