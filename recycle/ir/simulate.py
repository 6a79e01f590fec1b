"""The simulator: order + profile -> Timeline.

Every instruction starts as soon as what it needs is there and its worker (a transfer: its lane) is free. Compute
rows occupy their worker in program order, sends occupy the lane of their directed pair, receives take no time. Where a
stage's gradients are reduced in N buckets, each takes the latency of a reduce and an N-th of its rest, and each part of
a W an N-th of the W; the sums of a worker follow each other, beside its computing but for REDUCE_GRAD.

The period is the distance of two iterations in steady state when the schedule is repeated for ever (`period`).
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from recycle.cut import profile_of_cut
from recycle.errors import JobError, ScheduleError, ScheduleWarning
from recycle.ir.chains import (
    compute_before,
    compute_chains,
    compute_order,
    consecutive,
    lane_chains,
    serial_chains,
    sum_chains,
)
from recycle.ir.columns import Columns, Floats, Rows
from recycle.ir.dependencies import Cause, Dependencies, dependencies
from recycle.ir.gaps import Gaps, find_gaps
from recycle.ir.graph import Ranked, earliest_ranked, group_edges, ranked, topological_order
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
    StageWide,
    is_kind,
)
from recycle.ir.lower import lower_with_origin
from recycle.ir.memory import TOLERANCE as TOLERANCE
from recycle.ir.memory import held_activations, static_bytes
from recycle.ir.period import Repeats, period_of, repeats
from recycle.ir.pieces import incomplete_count
from recycle.ir.schedule import Schedule
from recycle.ir.text_grid import text_grid
from recycle.profile import Profile

T = TypeVar("T")
_MOST_SECONDS = 1e100
"""All times of a schedule together; sums of more may be infinite."""


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
    out = np.flatnonzero((graph.source >= graph.rows) & (graph.target < graph.rows))
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
class Timeline:
    """When everything happens in one iteration from idle, and how often iterations can follow each other.

    Attributes:
        schedule: the lowered schedule that was timed.
        profile: what it was timed with.
        start, end: seconds per row of `schedule.columns`; of a send: when its transfer is under way.
        last: for each row, then each join, the node it waited for last, -1 if none.
        period: seconds between two iterations in steady state.
        dependencies: what each row needs.
    """

    schedule: Schedule
    profile: Profile
    start: Floats
    end: Floats
    last: Rows
    period: float
    dependencies: Dependencies

    @cached_property
    def makespan(self) -> float:
        """Last end minus first start of one iteration from idle."""
        return float(self.end.max() - self.start.min()) if len(self.end) else 0.0

    def _per_worker(self, values: Sequence[T]) -> list[T | None]:
        dead = self.schedule.failed
        return [None if w in dead else v for w, v in zip(self.schedule.shape.workers(), values, strict=True)]

    @cached_property
    def _occupied(self) -> list[tuple[float, float, float]]:
        """(busy, first start, last end) of each worker's compute rows."""
        c, workers = self.schedule.columns, self.schedule.shape.worker_count
        rows = np.flatnonzero(~is_kind(c.kind, Beside))
        worker, seconds = c.worker[rows], self.end[rows] - self.start[rows]
        is_work = ~is_kind(c.kind[rows], StageWide)
        # What a worker does for the whole stage counts only where it does nothing else.
        spans = is_work | (np.bincount(worker[is_work], minlength=workers) == 0)[worker]
        first, last = np.full(workers, np.inf), np.zeros(workers)
        np.minimum.at(first, worker[spans], self.start[rows[spans]])
        np.maximum.at(last, worker[spans], self.end[rows[spans]])
        first[np.isinf(first)] = 0.0
        # Row by row of each worker, as a sum over its own rows is.
        begin = np.searchsorted(worker, np.arange(workers + 1))
        busy = [float(seconds[begin[w] : begin[w + 1]].sum()) for w in range(workers)]
        return list(zip(busy, first.tolist(), last.tolist(), strict=True))

    @cached_property
    def busy(self) -> list[float | None]:
        """Seconds of work per worker (None for a failed one)."""
        return self._per_worker([busy for busy, _, _ in self._occupied])

    @cached_property
    def bubble(self) -> list[float | None]:
        """Makespan minus busy time, per worker."""
        return self._per_worker([self.makespan - busy for busy, _, _ in self._occupied])

    @cached_property
    def inner_bubble(self) -> list[float | None]:
        """(Last end - first start of the worker's work) minus busy time, per worker."""
        return self._per_worker([max(0.0, last - first - busy) for busy, first, last in self._occupied])

    @cached_property
    def bubble_ratio(self) -> float:
        """Share of the live workers' time in the makespan that is bubble."""
        live = [b for b in self.bubble if b is not None]
        return sum(live) / (self.makespan * len(live)) if live and self.makespan else 0.0

    @cached_property
    def peak_activations(self) -> list[float | None]:
        """Most activations (in chunks) held at once, per worker: from the start of F to the end of W (or B)."""
        return self._per_worker(held_activations(self.schedule, self.profile, in_bytes=False)[0])

    @cached_property
    def _held_bytes(self) -> tuple[list[float], list[int]]:
        return held_activations(self.schedule, self.profile, in_bytes=True)

    @cached_property
    def peak_bytes(self) -> list[float | None]:
        """Most bytes held at once, per worker: activations and what its stages need whatever the order."""
        fixed = static_bytes(self.schedule, self.profile)
        return self._per_worker([peak + own for peak, own in zip(self._held_bytes[0], fixed, strict=True)])

    @cached_property
    def peak_row(self) -> list[int | None]:
        """The row at whose start `peak_bytes` is first reached, per worker; None where nothing is ever held."""
        return self._per_worker([row if peak else None for peak, row in zip(*self._held_bytes, strict=True)])

    @cached_property
    def critical_path(self) -> list[int]:
        """Rows of one longest chain of waits that ends last, in time order."""
        nodes = len(self.end)
        node = int(self.end.argmax()) if nodes else -1
        path: list[int] = []
        seen: set[int] = set()
        while node >= 0 and node not in seen:  # recorded times of an impossible order lead back to where they began
            seen.add(node)
            if node < nodes:
                path.append(node)
            node = int(self.last[node])
        return path[::-1]

    @cached_property
    def critical_causes(self) -> list[Cause | None]:
        """Why each row of the critical path waited for what comes before it; None for the first."""
        graph, kind = self.dependencies, self.schedule.columns.kind
        rows = np.array(self.critical_path, dtype=np.int64)
        before = self.last[rows]
        edges = np.flatnonzero(np.isin(graph.target, rows))
        edges = edges[self.last[graph.target[edges]] == graph.source[edges]]
        cause_of = dict(zip(graph.target[edges].tolist(), graph.cause[edges].tolist(), strict=True))
        sends = is_kind(kind[rows], Send)
        return [
            None if node < 0 else Cause(cause_of.get(row, Cause.LANE if is_send else Cause.ORDER))
            for row, node, is_send in zip(rows.tolist(), before.tolist(), sends.tolist(), strict=True)
        ]

    def gaps(self, limits: Sequence[float] | None = None, byte_limit: float | None = None) -> Gaps:
        """What every worker waits for whenever it does nothing; arguments and errors as of `gaps.find_gaps`."""
        return find_gaps(self, limits, byte_limit)

    def text(self, width: int = 120) -> str:
        """The timeline drawn as text, a lane of at most `width` characters per worker (see `text_grid`)."""
        return text_grid(self.schedule, self.start, self.end, width)

    def show(self, width: int = 120) -> str:
        """Print the timeline as text, a lane per worker, and return it; a notebook does not print it a second time."""
        text = _Printed(self.text(width))
        print(text)
        return text

    def _repr_svg_(self) -> str | None:
        """The lanes, for notebooks; None where there are too many operations for a picture."""
        drawn: str | None = self.schedule.show(self.profile)._repr_svg_()
        return drawn

    def __repr__(self) -> str:
        return f"<Timeline of {self.schedule!r}: makespan {self.makespan:g}, period {self.period:g}>"


class _Printed(str):
    """Text that has been printed, so that a notebook which ends with it shows nothing more."""

    def _ipython_display_(self) -> None:
        return None


def simulate(schedule: Schedule, profile: Profile | None = None, *, serialised: bool = False) -> Timeline:
    """Time a schedule. Warns with a `ScheduleWarning` where some forward or backward is missing: the figures then are
    those of the rest.

    Args:
        schedule: lowered or compute-only; transfers, reduces and steps that are missing are implied, as `lower` writes
            them.
        profile: seconds and bytes; one unit for each of F, I and W when left out.
        serialised: each worker carries one transfer at a time, unbuffered, in program order.

    Raises:
        JobError, ScheduleError: as `timeline_of`.
    """
    timeline = timeline_of(schedule, profile, serialised=serialised)
    if count := incomplete_count(schedule):
        shape = schedule.shape
        warnings.warn(
            f"the schedule is incomplete: {count} of {shape.stages * shape.global_micro_batches} pairs of stage and"
            " micro-batch lack their forward or a part of their backward, so its times are those of the rest;"
            " recycle.check says which",
            ScheduleWarning,
            stacklevel=2,
        )
    return timeline


def timeline_of(schedule: Schedule, profile: Profile | None = None, *, serialised: bool = False) -> Timeline:
    """What `simulate` gives, without its warning: for callers who tell what is missing in their own way.

    Raises:
        JobError: the times add up to what no number holds, or do not fit the schedule (see `durations`).
        ScheduleError: the order has a cycle and could never finish (`check` shows where).
    """
    return time_graph(lowered_graph(schedule, serialised), profile or Profile.uniform())


def time_graph(graph: EventGraph, profile: Profile) -> Timeline:
    """The timeline of an event graph; one graph serves any number of profiles.

    Raises:
        JobError, ScheduleError: as `timeline_of`.
    """
    profile = profile_of_cut(profile, graph.schedule.shape)
    if not graph.is_acyclic:
        stuck = np.setdiff1d(np.arange(graph.dependencies.rows), graph.order)
        worker, position = graph.schedule.position(int(stuck[0]))
        raise ScheduleError(
            f"the schedule deadlocks: {len(stuck)} instructions wait for each other, among them"
            f" {graph.schedule.instruction(int(stuck[0]))} on worker {worker} at position {position};"
            f" `recycle check` shows the cycle"
        )
    rows, nodes = graph.dependencies.rows, graph.dependencies.nodes
    seconds = np.zeros(nodes)
    seconds[:rows] = durations(graph.schedule, profile)
    if seconds.max(initial=0.0) > _MOST_SECONDS / max(nodes, 1):
        raise JobError(f"the times add up to more than {_MOST_SECONDS:g}: state them in another unit")
    order, placed = graph.order, seconds[graph.order]
    start, last = np.empty(nodes), np.empty(nodes, dtype=np.int64)
    by_place = earliest_ranked(graph.ranked, placed, np.zeros(nodes))
    start[order] = by_place[0]
    last[order] = np.where(by_place[1] >= 0, order[by_place[1]], -1)
    period = period_of(graph.ranked, graph.repeats, placed, *by_place) if rows else 0.0
    return Timeline(graph.schedule, profile, start[:rows], (start + seconds)[:rows], last, period, graph.dependencies)
