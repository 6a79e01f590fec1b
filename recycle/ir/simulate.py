"""The simulator: a schedule and a profile give a Timeline.

Every instruction starts as soon as its dependencies are met and its worker (for a transfer: its lane) is free; see
`recycle.ir.event_graph`. `slack` is the delay that one instruction tolerates without a longer iteration.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import TypeVar

import numpy as np

from recycle.errors import JobError, ScheduleError, ScheduleWarning
from recycle.ir.clocks import Clocks
from recycle.ir.columns import Floats
from recycle.ir.dependencies import Cause
from recycle.ir.event_graph import (
    EventGraph,
    Times,
    durations,
    earliest,
    earliest_ranked,
    event_graph,
    group_edges,
    period_of,
)
from recycle.ir.gaps import Gaps, find_gaps
from recycle.ir.instruction import (
    KIND_CLASSES,
    AsyncInstruction,
    Compute,
    Offload,
    OverlappedPair,
    Reload,
    Send,
    StageWide,
    is_kind,
)
from recycle.ir.lower import lowered_graph
from recycle.ir.memory import TOLERANCE as TOLERANCE, held_activations, static_bytes
from recycle.ir.operations import incomplete_count
from recycle.ir.schedule import Schedule
from recycle.job.cut import profile_of_cut
from recycle.job.profile import Profile

T = TypeVar("T")
_MOST_SECONDS = 1e100
"""Maximum sum of all times of a schedule; larger sums may overflow."""
DRAWN = 32
"""Maximum number of workers for which commands draw a grid."""


@dataclass(frozen=True, eq=False)
class Timeline(Times):
    """The times of one iteration from idle.

    Attributes:
        period: seconds between two iterations in steady state.
        clocks: how the workers' clocks were aligned; None for a planned iteration.
    """

    period: float
    clocks: Clocks | None = None

    def _per_worker(self, values: Sequence[T]) -> list[T | None]:
        dead = self.schedule.failed
        return [None if w in dead else v for w, v in zip(self.schedule.shape.workers(), values, strict=True)]

    @cached_property
    def _occupied(self) -> list[tuple[float, float, float]]:
        """(busy, first start, last end) of each worker's compute rows."""
        c, workers = self.schedule.columns, self.schedule.shape.worker_count
        rows = np.flatnonzero(~is_kind(c.kind, AsyncInstruction))
        worker, seconds = c.worker[rows], self.end[rows] - self.start[rows]
        is_work = ~is_kind(c.kind[rows], StageWide)
        # Stage-wide rows count only for workers without other work.
        spans = is_work | (np.bincount(worker[is_work], minlength=workers) == 0)[worker]
        first, last = np.full(workers, np.inf), np.zeros(workers)
        np.minimum.at(first, worker[spans], self.start[rows[spans]])
        np.maximum.at(last, worker[spans], self.end[rows[spans]])
        first[np.isinf(first)] = 0.0
        # Sum per worker, so the rounding does not depend on other workers.
        begin = np.searchsorted(worker, np.arange(workers + 1))
        busy = [float(seconds[begin[w] : begin[w + 1]].sum()) for w in range(workers)]
        return list(zip(busy, first.tolist(), last.tolist(), strict=True))

    @cached_property
    def busy(self) -> list[float | None]:
        """Seconds of work per worker; None for failed workers."""
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
        """Share of the live workers' time within the makespan that is bubble."""
        live = [b for b in self.bubble if b is not None]
        return sum(live) / (self.makespan * len(live)) if live and self.makespan else 0.0

    @cached_property
    def peak_activations(self) -> list[float | None]:
        """Peak number of activations (in chunks) per worker, held from the start of F to the end of W (or B)."""
        return self._per_worker(held_activations(self.schedule, self.profile, in_bytes=False)[0])

    @cached_property
    def _held_bytes(self) -> tuple[list[float], list[int]]:
        return held_activations(self.schedule, self.profile, in_bytes=True)

    @cached_property
    def peak_bytes(self) -> list[float | None]:
        """Peak bytes per worker: activations and the static bytes of its stages."""
        fixed = static_bytes(self.schedule, self.profile)
        return self._per_worker([peak + own for peak, own in zip(self._held_bytes[0], fixed, strict=True)])

    @cached_property
    def peak_row(self) -> list[int | None]:
        """The first row at whose start `peak_bytes` is reached, per worker; None if the worker holds no activations."""
        return self._per_worker([row if peak else None for peak, row in zip(*self._held_bytes, strict=True)])

    @cached_property
    def critical_path(self) -> list[int]:
        """Rows of one longest chain of waits that ends last, in time order."""
        nodes = len(self.end)
        node = int(self.end.argmax()) if nodes else -1
        path: list[int] = []
        seen: set[int] = set()
        while node >= 0 and node not in seen:  # inconsistent recorded times may form a cycle
            seen.add(node)
            if node < nodes:
                path.append(node)
            node = self.last.item(node)
        return path[::-1]

    @cached_property
    def critical_causes(self) -> list[Cause | None]:
        """Why each row of the critical path waited for the previous row; None for the first."""
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
        """Find the idle times of every worker; arguments and errors as in `gaps.find_gaps`."""
        return find_gaps(self, limits, byte_limit)

    def text(self, width: int = 120) -> str:
        """Draw the timeline as text, at most `width` characters per worker (see `text_grid`)."""
        return text_grid(self.schedule, self.start, self.end, width)

    def show(self, width: int = 120) -> str:
        """Print the timeline as text and return the text; notebooks do not print it again."""
        text = _Printed(self.text(width))
        print(text)
        return text

    def _repr_svg_(self) -> str | None:
        drawn: str | None = self.schedule.show(self.profile)._repr_svg_()
        return drawn

    def __repr__(self) -> str:
        return f"<Timeline of {self.schedule!r}: makespan {self.makespan:g}, period {self.period:g}>"


class _Printed(str):
    """Text that was already printed, so notebooks do not display it again."""

    def _ipython_display_(self) -> None:
        return None


def simulate(
    schedule: Schedule, profile: Profile | None = None, *, serialised: bool = False, shared: bool = False
) -> Timeline:
    """Simulate a schedule. Warns with `ScheduleWarning` if a forward or backward is missing; raises as `timeline_of`.

    Args:
        schedule: lowered or compute-only; missing transfers, reduces and steps are implied, as `lower` adds them.
        profile: seconds and bytes; one unit for each of F, I and W if None.
        serialised: each worker carries one transfer at a time, unbuffered, in program order.
        shared: the same for lanes that share a communicator, as over NCCL (`recycle.ir.communicators`).
    """
    timeline = timeline_of(schedule, profile, serialised=serialised, shared=shared)
    if count := incomplete_count(schedule):
        shape = schedule.shape
        warnings.warn(
            f"the schedule is incomplete: {count} of {shape.stages * shape.global_micro_batches} pairs of stage and"
            " micro-batch lack a forward or a part of the backward, and the times do not include them;"
            " recycle.check lists them",
            ScheduleWarning,
            stacklevel=2,
        )
    return timeline


def timeline_of(
    schedule: Schedule, profile: Profile | None = None, *, serialised: bool = False, shared: bool = False
) -> Timeline:
    """Simulate a schedule without warnings.

    Raises:
        JobError: the times overflow, or do not fit the schedule (see `durations`).
        ScheduleError: the order has a cycle and could never finish (`check` shows where).
    """
    return time_graph(lowered_graph(schedule, serialised, shared), profile or Profile.uniform())


def time_graph(graph: EventGraph, profile: Profile) -> Timeline:
    """Simulate an event graph; one graph serves any number of profiles. Raises as `timeline_of`."""
    profile = profile_of_cut(profile, graph.schedule.shape)
    if not graph.is_acyclic:
        stuck = np.flatnonzero(np.bincount(graph.order, minlength=graph.dependencies.rows) == 0)
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
    placed, release = seconds[graph.order], np.zeros(nodes)
    by_place = earliest_ranked(graph.ranked, placed, release)
    start, last = graph.ranked.by_node(*by_place, release)
    period = period_of(graph.ranked, graph.repeats, placed, *by_place) if rows else 0.0
    return Timeline(graph.schedule, profile, start[:rows], (start + seconds)[:rows], last, graph.dependencies, period)


def text_grid(schedule: Schedule, start: Floats, end: Floats, width: int = 120) -> str:
    """Draw a schedule as text with at most `width` characters per lane; `start` and `end` are seconds per row.

    Each instruction begins with its letter (F, B, I, W, R, X for an overlapped pair) and micro-batch index, as far as
    its length allows. Letters are lower case for stages other than the worker's first. `·` is idle time, `x` a failed
    worker, `'` marks re-routed instructions. Copies to and from the host are on lines `out` and `back`.
    """
    makespan = float(end.max() - start.min()) if len(end) else 0.0
    c = schedule.columns
    compute = is_kind(c.kind, (Compute, OverlappedPair)) & ~is_kind(c.kind, AsyncInstruction)
    shortest = float((end - start)[compute & (end > start)].min(initial=np.inf))
    columns = min(width - 6, max(1, round(makespan / shortest) * 3))
    scale = columns / makespan if makespan else 1.0
    lines = [f"{'':6}0{'':{max(columns - 12, 1)}}{makespan:>10g}"]
    lanes = (("", compute), ("out", c.kind == Offload.kind), ("back", c.kind == Reload.kind))
    for (w, worker), (lane, is_drawn) in product(enumerate(schedule.shape.workers()), lanes):
        cells = ["x" if worker in schedule.failed else "·"] * columns
        first = min(schedule.stages_of(worker), default=-1)
        rows = c.offsets[w] + np.flatnonzero(is_drawn[c.offsets[w] : c.offsets[w + 1]])
        if lane and not len(rows):
            continue
        for row in rows.tolist():
            begin, stop = round(start[row] * scale), round(end[row] * scale)
            cls = KIND_CLASSES[c.kind[row]]
            letter = "X" if cls is OverlappedPair else cls.token if cls.row.letter is None else cls.row.letter
            letter = letter if c.stage[row] == first else letter.lower()
            mark = "'" if c.pipeline[row] != worker.pipeline else ""
            label = f"{letter}{c.index[row]}{mark}".ljust(stop - begin, "-")[: stop - begin]
            cells[begin:stop] = label
        lines.append(f"{lane or str(worker):>5} " + "".join(cells[:columns]))
    return "\n".join(lines)


def slack(timeline: Timeline) -> Floats:
    """Compute the seconds by which each row of a timeline without serialised transports may start later; at least 0."""
    graph = timeline.dependencies
    rows, nodes = graph.rows, graph.nodes
    if not rows:
        return np.zeros(0)
    events = event_graph(timeline.schedule, graph=graph)
    source, target = events.edges
    offsets, followers = group_edges(target, source, nodes)
    seconds = np.zeros(nodes)
    seconds[:rows] = timeline.end - timeline.start
    remaining, _ = earliest(events.order[::-1].copy(), offsets, followers, seconds, np.zeros(nodes))
    return np.maximum(float(timeline.end.max()) - timeline.end - remaining[:rows], 0.0)
