"""A lowered schedule as a graph ready to be timed, and its times.

Compute rows occupy their worker in program order, sends occupy the lane of their directed pair, receives take no time.
Where a stage's gradients are reduced in N buckets, each takes the latency of a reduce and an N-th of its rest, and each
part of a W an N-th of the W; the sums of a worker follow each other, beside its computing but for REDUCE_GRAD.

Longest paths over it give end times as early as possible, and the period. Large graphs run the loops here compiled,
small ones in plain Python (`compiled`). Who goes through one graph several times numbers its nodes in topological order
first (`ranked`): a pass then reads memory from front to back, and takes a tenth of the time.

The period is the distance of two iterations in steady state when a schedule is repeated for ever: the largest mean of a
cycle through the edges that lead from one iteration into the next (carried dependencies, each worker's program starting
over, each lane's next transfer), in other words the eigenvalue of the max-plus matrix of the repeated schedule. It is
found by repeating the iteration and reading longer and longer cycles off the critical path, and proven by a fixed
point: with that period no start time has to move. Its nodes are given by their place in a topological order, as in
`Ranked`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from recycle.ir.columns import (
    Columns,
    Floats,
    Rows,
    chain_ends,
    compute_chains,
    compute_order,
    consecutive,
    in_order,
    lane_chains,
    offsets_of,
    rows_before,
    serial_chains,
)
from recycle.ir.compiled import COMPILE_FROM, load, run
from recycle.ir.dependencies import Cause, Dependencies, dependencies
from recycle.ir.instruction import (
    KIND_CLASSES,
    Backward,
    Beside,
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
from recycle.ir.memory import TOLERANCE
from recycle.ir.schedule import Schedule
from recycle.job.profile import Profile


def group_edges(values: Rows, keys: Rows, nodes: int) -> tuple[Rows, Rows]:
    """CSR grouping: (offsets, values sorted by key, those of one key in the order given)."""
    offsets = offsets_of(keys, nodes)
    if len(values) < COMPILE_FROM:
        return offsets, values[np.argsort(keys, kind="stable")]
    *_, grouped = run(_place, len(values), values, keys, offsets[:-1].copy(), np.empty(len(values), dtype=np.int64))
    return offsets, np.asarray(grouped, dtype=np.int64)


def _place(values: Any, keys: Any, free: Any, grouped: Any) -> None:
    """Counting sort; `free` is where the next value of each key goes."""
    for i in range(len(values)):
        key = keys[i]
        grouped[free[key]] = values[i]
        free[key] += 1


def topological_order(source: Rows, target: Rows, nodes: int) -> Rows:
    """Nodes in an order in which each target comes after its sources; nodes on or behind a cycle are left out."""
    offsets, targets = group_edges(target, source, nodes)
    waiting, order = np.bincount(target, minlength=nodes), np.empty(nodes, dtype=np.int64)
    done, *_, order = run(_topological_order, nodes, offsets, targets, waiting, order)
    return np.asarray(order[:done], dtype=np.int64)


def earliest(order: Rows, offsets: Rows, sources: Rows, seconds: Floats, release: Floats) -> tuple[Floats, Rows]:
    """Start of each node when it begins as soon as all it waits for has ended, and which predecessor was last.

    Args:
        order: topological order of the nodes.
        offsets, sources: CSR of predecessors.
        seconds: duration of each node.
        release: no node starts before its release.

    Returns:
        (start, last): `last` is -1 where the release decided.
    """
    graph = ranked(order, offsets, sources)
    return graph.by_node(*earliest_ranked(graph, seconds[order], release[order]), release)


class Ranked(NamedTuple):
    """A graph with its nodes numbered by their place in a topological order.

    Attributes:
        order: node at each place.
        place: place of each node.
        offsets, sources: CSR of predecessors, all by place, int32.
    """

    order: Rows
    place: Rows
    offsets: npt.NDArray[np.int32]
    sources: npt.NDArray[np.int32]

    def by_node(self, start: Floats, last: Rows, release: Floats) -> tuple[Floats, Rows]:
        """What `earliest_ranked` gives, by node; nodes without a place start at their release."""
        starts, lasts = release.copy(), np.full(len(release), -1, dtype=np.int64)
        starts[self.order], lasts[self.order] = start, np.where(last >= 0, self.order[last], -1)
        return starts, lasts


def ranked(order: Rows, offsets: Rows, sources: Rows) -> Ranked:
    """The graph with its nodes numbered by `order`; arguments as of `earliest`."""
    place = np.empty(len(offsets) - 1, dtype=np.int64)
    place[order] = np.arange(len(order))
    count = np.diff(offsets)[order]
    begin = np.concatenate([[0], np.cumsum(count)])
    edges = np.arange(begin[-1]) + np.repeat(offsets[order] - begin[:-1], count)
    return Ranked(order, place, begin.astype(np.int32), place[sources[edges]].astype(np.int32))


def earliest_ranked(graph: Ranked, seconds: Floats, release: Floats) -> tuple[Floats, Rows]:
    """What `earliest` gives, everything by place."""
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
    """Load the compiled loops, for a caller who is about to time hundreds of small graphs."""
    load(_topological_order, _earliest_ranked, _place)


def compile_all() -> None:
    """Compile each of them, by a call with arguments of the types that all calls have."""
    load_compiled()
    source, target, seconds = np.array([0]), np.array([1]), np.zeros(2)
    order = topological_order(source, target, 2)
    offsets, sources = group_edges(source, target, 2)
    run(_place, 1, source, target, offsets[:-1].copy(), np.empty(1, dtype=np.int64))
    earliest(order, offsets, sources, seconds, seconds)


class Repeats(NamedTuple):
    """Edges from one iteration into the next, and the chains of which each node follows the one before it.

    Attributes:
        source, target: the edges, by target.
        targets: each target once.
        first: the first edge to each of them.
        chains: (chain, node) of workers, and of lanes, chain by chain in order.
    """

    source: Rows
    target: Rows
    targets: Rows
    first: Rows
    chains: Sequence[tuple[Rows, Rows]]


def repeats(carried_source: Rows, carried_target: Rows, chains: Sequence[tuple[Rows, Rows]]) -> Repeats:
    """The carried dependencies, and each of the chains starting over."""
    firsts, lasts = zip(*(chain_ends(one) for one in chains), strict=True)
    source = np.concatenate([carried_source, *lasts])
    target = np.concatenate([carried_target, *firsts])
    by_target = np.argsort(target, kind="stable")
    target = target[by_target]
    first = np.flatnonzero(np.diff(target, prepend=-1))
    return Repeats(source[by_target], target, target[first], first, chains)


def period_of(graph: Ranked, edges: Repeats, seconds: Floats, start: Floats, last: Rows) -> float:
    """Largest mean of a cycle through the repeated schedule.

    From a lower bound on, iterations are released one period after another. Either the releases settle, and the bound
    is the period; or some cycle takes longer, and the critical path to a release that still grows comes to run around
    it: its mean is the next bound. Ends because there are finitely many means. The first bound is what the busiest
    worker or lane takes, which is the period of most schedules that are any good.

    Args:
        seconds: duration of each node.
        start, last: of one iteration from idle, as of `earliest_ranked`.
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
    """Seconds that the busiest worker or lane takes for an iteration: no period is shorter."""
    longest = 0.0
    for chain, nodes in edges.chains:
        if len(nodes):
            taken = seconds[nodes]
            bounds = np.flatnonzero(np.diff(chain, prepend=-1, append=-1))
            most = int(np.add.reduceat(taken, bounds[:-1]).argmax())
            longest = max(longest, math.fsum(taken[bounds[most] : bounds[most + 1]].tolist()))
    return longest


def _cycle_mean(history: list[tuple[Rows, Rows]], seconds: Floats, node: int) -> float:
    """Seconds per iteration of the first cycle on the critical path to the release of `node`; 0 when there is none."""
    seen: dict[int, tuple[int, int]] = {}
    path: list[float] = []
    for iteration in range(len(history) - 1, -1, -1):
        last, decides = history[iteration]
        if node in seen:
            later, begin = seen[node]
            return math.fsum(path[begin:]) / (later - iteration)
        seen[node] = iteration, len(path)
        node = int(decides[node])
        if node < 0:
            return 0.0
        path.append(float(seconds[node]))
        while last[node] >= 0:
            node = int(last[node])
            path.append(float(seconds[node]))
    return 0.0


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
    before = rows_before(columns, ~is_kind(columns.kind, Beside))
    extra = [
        (compute_order(columns), Cause.ORDER),
        (consecutive(lane_chains(columns)), Cause.LANE),
        (_arrivals(graph, columns, before), Cause.REDUCE),
    ]
    begins = np.flatnonzero(columns.kind == ReduceBucket.kind)
    if len(begins):
        sums = is_kind(columns.kind, (ReduceBucket, ReduceGradients))  # a worker begins them one after the other
        begins = begins[before[begins] >= 0]
        extra += [
            ((before[begins], begins), Cause.ORDER),
            (in_order(columns, sums), Cause.LANE),
            (_arrivals(graph, columns, rows_before(columns, sums)), Cause.LANE),
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
